//! `RequestMetadata` of any content inside a request: its strings are UTF-8 and as many as the message has.

use bytes::{Buf, Bytes};
use ray_serve_grpc_native::wire::{Content, Payload, encode_call_request, encode_metadata, parse_call_request};

fn parse(metadata: Bytes) -> Option<ray_serve_grpc_native::wire::Metadata> {
    let mut frames = encode_call_request(metadata, Content::default(), 0).expect("small");
    let framed = frames.copy_to_bytes(frames.remaining());
    parse_call_request(&Payload::Small(framed.slice(5..))).ok().map(|envelope| envelope.metadata)
}

pub fn run(data: &[u8]) {
    let Some(metadata) = parse(Bytes::copy_from_slice(data)) else { return };
    assert!(metadata.strings.is_empty() || metadata.strings.len() == 9);
    // Encoded again, it says the same.
    let encoded = encode_metadata(metadata.strings.iter().map(String::as_str), &metadata.extra);
    let again = parse(encoded.freeze()).expect("our own message");
    assert_eq!(again.extra, metadata.extra);
    if !again.strings.is_empty() {
        assert_eq!(again.strings, metadata.strings);
    }
}
