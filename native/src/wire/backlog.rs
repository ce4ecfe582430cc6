//! Bytes of a stream that its reader does not want yet.

use bytes::{Bytes, BytesMut};
use std::collections::VecDeque;

/// Frames of fewer bytes are copied together: what HTTP/2 keeps of a frame of one byte is a hundred bytes, and
/// its window counts the one.
const WHOLE_FROM: usize = 4096;
/// Bytes of a copy before the next one is begun.
const COPY_BYTES: usize = 64 * 1024;

/// Takes frames and gives their bytes in order. Holds what flow control lets its peer send, and little more.
#[derive(Debug, Default)]
pub struct Backlog {
    parts: VecDeque<Bytes>,
    last: BytesMut,
}

impl Backlog {
    pub fn push(&mut self, frame: Bytes) {
        if frame.len() >= WHOLE_FROM {
            self.seal();
            self.parts.push_back(frame);
            return;
        }
        self.last.extend_from_slice(&frame);
        if self.last.len() >= COPY_BYTES {
            self.seal();
        }
    }

    /// The next bytes; None when all were taken.
    pub fn pop(&mut self) -> Option<Bytes> {
        if self.parts.is_empty() {
            self.seal();
        }
        self.parts.pop_front()
    }

    /// Before all others: what was taken and is not wanted yet.
    pub fn put_back(&mut self, rest: Bytes) {
        if !rest.is_empty() {
            self.parts.push_front(rest);
        }
    }

    fn seal(&mut self) {
        if !self.last.is_empty() {
            self.parts.push_back(self.last.split().freeze());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gives_what_it_took_in_order(sizes in proptest::collection::vec(0_usize..10_000, 0..60), step in 1_usize..9_000) {
            let frames: Vec<Vec<u8>> = sizes.iter().map(|size| (0..*size).map(|i| (i * 7 + size) as u8).collect()).collect();
            let (mut backlog, mut read) = (Backlog::default(), Vec::new());
            for (at, frame) in frames.iter().enumerate() {
                backlog.push(Bytes::from(frame.clone()));
                if at % 3 == 0 && let Some(mut bytes) = backlog.pop() {
                    read.extend_from_slice(&bytes.split_to(step.min(bytes.len())));
                    backlog.put_back(bytes);
                }
            }
            while let Some(bytes) = backlog.pop() {
                read.extend_from_slice(&bytes);
            }
            prop_assert_eq!(read, frames.concat());
        }
    }

    #[test]
    fn tiny_frames_become_few_parts() {
        let mut backlog = Backlog::default();
        for _ in 0..1_000_000 {
            backlog.push(Bytes::from_static(b"x"));
        }
        assert!(backlog.parts.len() < 20);
    }
}
