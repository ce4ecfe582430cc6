//! Several `Bytes` that leave as one DATA frame and one writev.

use bytes::{Buf, Bytes};
use std::collections::VecDeque;
use std::io::IoSlice;

/// Bytes of one or more gRPC messages in the parts in which they lie in memory.
#[derive(Debug, Default)]
pub struct FrameBuf {
    parts: VecDeque<Bytes>,
    remaining: usize,
}

impl FrameBuf {
    pub fn push(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.remaining += part.len();
            self.parts.push_back(part);
        }
    }

    /// Takes all parts of `other` behind its own.
    pub fn append(&mut self, mut other: FrameBuf) {
        self.remaining += other.remaining;
        self.parts.append(&mut other.parts);
    }
}

impl From<Bytes> for FrameBuf {
    fn from(part: Bytes) -> Self {
        let mut buf = FrameBuf::default();
        buf.push(part);
        buf
    }
}

impl Buf for FrameBuf {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.parts.front().map_or(&[], |part| part)
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "advance past the end");
        self.remaining -= count;
        while count > 0 {
            let Some(front) = self.parts.front_mut() else { return };
            if front.len() > count {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.parts.pop_front();
        }
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut filled = 0;
        for (slot, part) in slices.iter_mut().zip(&self.parts) {
            *slot = IoSlice::new(part);
            filled += 1;
        }
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reads_as_its_parts_joined(parts: Vec<Vec<u8>>, step in 1_usize..40) {
            let joined: Vec<u8> = parts.concat();
            let mut buf = FrameBuf::default();
            for part in parts { buf.push(Bytes::from(part)); }
            prop_assert_eq!(buf.remaining(), joined.len());
            let mut read = Vec::new();
            while buf.has_remaining() {
                let chunk = buf.chunk();
                let taken = chunk.len().min(step);
                read.extend_from_slice(&chunk[..taken]);
                buf.advance(taken);
            }
            prop_assert_eq!(read, joined);
        }
    }
}
