//! Messages of any content: parsed or refused; what is parsed lies within the message, and its buffers are aligned.

use bytes::{Buf, Bytes};
use ray_serve_grpc_native::wire::{
    ALIGNMENT, Content, Envelope, Kind, MessageReader, Payload, encode_call_response, parse_call_request,
    parse_call_response, parse_fields, parse_stock_response,
};
use std::collections::VecDeque;

/// From this size on messages are gathered in memory of their own.
const LARGE: usize = 16 * 1024;

fn check(envelope: &Envelope, size: usize) {
    let buffers: usize = envelope.buffers.iter().map(|buffer| buffer.as_slice().len()).sum();
    let fields: usize = envelope.fields.iter().map(|field| field.as_slice().len()).sum();
    assert!(envelope.body.as_slice().len() <= size && buffers <= size && fields <= size);
    assert_eq!(envelope.size, size);
    for buffer in &envelope.buffers {
        assert_eq!(buffer.as_slice().as_ptr() as usize % ALIGNMENT, 0);
    }
    let _ = envelope.require_size(size);
}

fn parse(payload: &Payload) {
    for parse in [parse_call_request, parse_call_response, parse_fields, parse_stock_response] {
        if let Ok(envelope) = parse(payload) {
            check(&envelope, payload.len());
        }
    }
}

/// As it comes from the network, so that a large message lies in memory of its own.
fn received(framed: Bytes) -> Payload {
    let mut messages = VecDeque::new();
    MessageReader::new(usize::MAX).push(framed, &mut messages).expect("a whole message");
    messages.pop_front().expect("a whole message")
}

pub fn run(data: &[u8]) {
    parse(&Payload::Small(Bytes::copy_from_slice(data)));
    let mut large = data.to_vec();
    if data.len() < LARGE {
        // Field 15 of the missing length: ignored by every reader.
        let rest = LARGE - data.len();
        large.extend([0x7a, (rest & 0x7f) as u8 | 0x80, (rest >> 7 & 0x7f) as u8 | 0x80, (rest >> 14) as u8]);
        large.extend(std::iter::repeat_n(0, rest));
    }
    let mut framed = vec![0];
    framed.extend((large.len() as u32).to_be_bytes());
    framed.extend(&large);
    parse(&received(Bytes::from(framed)));

    // What we encode, we read.
    let (body, buffer) = data.split_at(data.len() / 2);
    let content = Content::of(vec![Bytes::copy_from_slice(body)], vec![Bytes::copy_from_slice(buffer)]);
    let mut frames = encode_call_response(Kind(2), content).expect("small");
    let payload = received(frames.copy_to_bytes(frames.remaining()));
    let envelope = parse_call_response(&payload).expect("our own message");
    assert_eq!((envelope.kind, envelope.body.as_slice()), (2, body));
    assert_eq!(envelope.buffers.len(), 1);
    assert_eq!(envelope.buffers[0].as_slice(), buffer);
}
