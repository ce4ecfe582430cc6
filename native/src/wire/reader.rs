//! Cuts the DATA frames of a stream into gRPC messages.

use super::WireError;
use crate::lane::sys::{AlignedBuf, Region};
use bytes::{Buf, Bytes, BytesMut};
use std::collections::VecDeque;

/// From this size on a message is gathered in aligned memory of its own, so that the buffers
/// in it can be handed on as they lie. Smaller ones stay in the frame that brought them.
const ALIGN_FROM: usize = 16 * 1024;

const PREFIX: usize = 5;

/// The bytes of one message, without its gRPC prefix.
#[derive(Debug)]
pub enum Payload {
    Small(Bytes),
    Large(Region),
}

impl Payload {
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn as_slice(&self) -> &[u8] {
        match self {
            Payload::Small(bytes) => bytes,
            Payload::Large(region) => region.as_slice(),
        }
    }
}

#[derive(Debug)]
enum State {
    Prefix { bytes: [u8; PREFIX], have: usize },
    Small { bytes: BytesMut, size: usize },
    Large { buf: AlignedBuf },
}

const AT_START: State = State::Prefix { bytes: [0; PREFIX], have: 0 };

/// Takes frames of any size in order, gives whole messages.
#[derive(Debug)]
pub struct MessageReader {
    limit: usize,
    state: State,
}

impl MessageReader {
    /// `limit`: bytes of the largest message; its prefix alone is enough to refuse a larger one.
    pub fn new(limit: usize) -> Self {
        MessageReader { limit, state: AT_START }
    }

    pub fn push(&mut self, mut frame: Bytes, messages: &mut VecDeque<Payload>) -> Result<(), WireError> {
        self.push_up_to(usize::MAX, &mut frame, messages)
    }

    /// Leaves the rest in `frame` once there are `most` messages: a frame may hold a million of them.
    pub fn push_up_to(
        &mut self,
        most: usize,
        frame: &mut Bytes,
        messages: &mut VecDeque<Payload>,
    ) -> Result<(), WireError> {
        while messages.len() < most && self.step(frame, messages)? {}
        Ok(())
    }

    /// True when the stream may end here.
    pub fn is_between_messages(&self) -> bool {
        matches!(self.state, State::Prefix { have: 0, .. })
    }

    fn step(&mut self, frame: &mut Bytes, messages: &mut VecDeque<Payload>) -> Result<bool, WireError> {
        if frame.is_empty() {
            return Ok(false);
        }
        match &mut self.state {
            State::Prefix { bytes, have } => {
                let taken = frame.len().min(PREFIX - *have);
                bytes[*have..*have + taken].copy_from_slice(&frame[..taken]);
                frame.advance(taken);
                *have += taken;
                if *have == PREFIX {
                    let prefix = *bytes;
                    self.begin(prefix, frame, messages)?;
                }
            }
            State::Small { bytes, size } => {
                let taken = frame.len().min(*size - bytes.len());
                bytes.extend_from_slice(&frame.split_to(taken));
                if bytes.len() == *size {
                    messages.push_back(Payload::Small(std::mem::take(bytes).freeze()));
                    self.state = AT_START;
                }
            }
            State::Large { buf } => {
                let taken = frame.len().min(buf.room());
                buf.extend(&frame.split_to(taken));
                if buf.room() == 0
                    && let State::Large { buf } = std::mem::replace(&mut self.state, AT_START)
                {
                    messages.push_back(Payload::Large(buf.freeze()));
                }
            }
        }
        Ok(true)
    }

    fn begin(
        &mut self,
        prefix: [u8; PREFIX],
        frame: &mut Bytes,
        messages: &mut VecDeque<Payload>,
    ) -> Result<(), WireError> {
        let [compressed, length @ ..] = prefix;
        if compressed != 0 {
            return Err(WireError::Compressed);
        }
        let size = u32::from_be_bytes(length) as usize;
        if size > self.limit {
            return Err(WireError::TooLarge { size, limit: self.limit });
        }
        self.state = if size >= ALIGN_FROM {
            State::Large { buf: AlignedBuf::with_capacity(size).ok_or(WireError::NoMemory { size })? }
        } else if frame.len() >= size {
            messages.push_back(Payload::Small(frame.split_to(size)));
            AT_START
        } else {
            State::Small { bytes: BytesMut::with_capacity(size), size }
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn framed(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut out = Vec::new();
        for message in messages {
            out.push(0);
            out.extend_from_slice(&(message.len() as u32).to_be_bytes());
            out.extend_from_slice(message);
        }
        out
    }

    proptest! {
        #[test]
        fn messages_survive_any_cut_into_frames(
            sizes in proptest::collection::vec(0_usize..40_000, 0..6),
            cuts in proptest::collection::vec(1_usize..30_000, 1..8),
        ) {
            let messages: Vec<Vec<u8>> =
                sizes.iter().map(|size| (0..*size).map(|i| (i * 7 + size) as u8).collect()).collect();
            let mut bytes = Bytes::from(framed(&messages));
            let mut reader = MessageReader::new(1 << 20);
            let mut out = VecDeque::new();
            for cut in cuts.iter().cycle() {
                if bytes.is_empty() { break }
                let frame = bytes.split_to((*cut).min(bytes.len()));
                reader.push(frame, &mut out).unwrap();
            }
            prop_assert!(reader.is_between_messages());
            let read: Vec<Vec<u8>> = out.iter().map(|payload| payload.as_slice().to_vec()).collect();
            prop_assert_eq!(read, messages);
        }
    }

    #[test]
    fn a_message_over_the_limit_is_refused_by_its_prefix() {
        let mut reader = MessageReader::new(10);
        let refused = reader.push(Bytes::from_static(&[0, 0, 0, 0, 11]), &mut VecDeque::new());
        assert_eq!(refused, Err(WireError::TooLarge { size: 11, limit: 10 }));
    }

    #[test]
    fn compressed_messages_are_refused() {
        let mut reader = MessageReader::new(10);
        let refused = reader.push(Bytes::from_static(&[1, 0, 0, 0, 1, 0]), &mut VecDeque::new());
        assert_eq!(refused, Err(WireError::Compressed));
    }
}
