//! DATA frames of any content, cut anywhere: what is read does not depend on the cuts.

use bytes::Bytes;
use ray_serve_grpc_native::wire::{MessageReader, Payload, WireError};
use std::collections::VecDeque;

const LIMIT: usize = 1 << 20;

fn read(data: &[u8], step: usize) -> (Vec<Vec<u8>>, Option<WireError>, bool) {
    let mut reader = MessageReader::new(LIMIT);
    let mut messages = VecDeque::new();
    let mut error = None;
    for frame in data.chunks(step) {
        if let Err(found) = reader.push(Bytes::copy_from_slice(frame), &mut messages) {
            error = Some(found);
            break;
        }
    }
    let messages = messages.iter().map(Payload::as_slice).map(<[u8]>::to_vec).collect();
    (messages, error, reader.is_between_messages())
}

pub fn run(data: &[u8]) {
    let Some((step, data)) = data.split_first() else { return };
    let (messages, error, _) = read(data, usize::from(*step) + 1);
    let whole = read(data, data.len().max(1));
    assert_eq!((&messages, &error), (&whole.0, &whole.1));
    let read: usize = messages.iter().map(|message| message.len() + 5).sum();
    assert!(read <= data.len() && messages.iter().all(|message| message.len() <= LIMIT));
}
