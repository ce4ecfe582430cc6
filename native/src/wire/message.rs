//! The messages of `protos/inter_deployment.proto` and of Ray's `ASGIService`, coded by hand: a
//! generated codec would flatten each message into one buffer, both ways.

use super::varint::{self, Field};
use super::{ALIGNMENT, COPY_UP_TO, FrameBuf, Payload, WireError};
use crate::lane::sys::{AlignedBuf, Region};
use bytes::{BufMut, Bytes, BytesMut};

const METADATA: u32 = 1;
const KIND: u32 = 1;
const BODY: u32 = 2;
const BUFFER: u32 = 3;
const SEGMENT: u32 = 4;
const BODY_SEGMENT: u32 = 5;
const ADMISSION_WORD: u32 = 7;
const PADDING: u32 = 15;
const EXTRA: u32 = 15;

/// Fields of a message are counted by this bound before memory is set aside for them.
const MAX_BUFFERS: usize = 65_536;

/// ASGIRequest has this many fields, all of them bytes.
pub const STOCK_FIELDS: usize = 3;

/// Strings of `RequestMetadata`, fields 1 to 9.
const METADATA_STRINGS: usize = 9;

/// What a response holds, as `CallResponse.Kind` numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub u32);

/// A piece of a received message.
#[derive(Clone, Debug)]
pub enum Slice {
    Bytes(Bytes),
    Region(Region),
}

impl Slice {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Slice::Bytes(bytes) => bytes,
            Slice::Region(region) => region.as_slice(),
        }
    }
}

impl Default for Slice {
    fn default() -> Self {
        Slice::Bytes(Bytes::new())
    }
}

/// Memory of the sender that a message names instead of holding its bytes: `SegmentRef` of the proto.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentRef {
    pub id: u32,
    pub slot: u32,
    /// Offset and length, bytes.
    pub ranges: Vec<(u64, u64)>,
}

/// The value in a message to send: its parts as they lie, or where they were placed.
#[derive(Debug, Default)]
pub struct Content {
    pub body: Vec<Bytes>,
    pub buffers: Vec<Bytes>,
    pub body_segment: Option<SegmentRef>,
    pub segments: Vec<SegmentRef>,
}

impl Content {
    pub fn of(body: Vec<Bytes>, buffers: Vec<Bytes>) -> Self {
        Content { body, buffers, ..Content::default() }
    }

    pub fn len(&self) -> usize {
        self.body_len() + self.buffers.iter().map(Bytes::len).sum::<usize>()
    }

    pub fn body_len(&self) -> usize {
        self.body.iter().map(Bytes::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A received message of either direction: what its fields held.
#[derive(Debug, Default)]
pub struct Envelope {
    pub kind: u32,
    pub metadata: Metadata,
    pub body: Slice,
    pub buffers: Vec<Region>,
    /// Memory to be put in the place of the body and of the buffers: see `lane::exchange`.
    pub body_segment: Option<SegmentRef>,
    pub segments: Vec<SegmentRef>,
    /// One more than the index of the word in which an admission is to be noted; 0 for none.
    pub admission_word: u32,
    /// Only of Ray's ASGIRequest.
    pub fields: Vec<Slice>,
    /// Bytes of the whole message.
    pub size: usize,
}

impl Envelope {
    /// Bytes of the message and of the memory that it names; over `limit`, it is too large.
    pub fn require_size(&self, limit: usize) -> Result<(), WireError> {
        let named = self.segments.iter().chain(&self.body_segment).flat_map(|segment| &segment.ranges);
        let lent = named.fold(0_u64, |sum, (_, length)| sum.saturating_add(*length));
        let size = self.size.saturating_add(usize::try_from(lent).unwrap_or(usize::MAX));
        if size > limit { Err(WireError::TooLarge { size, limit }) } else { Ok(()) }
    }
}

/// `RequestMetadata`: its strings in the order of their fields, and the pickled rest.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    pub strings: Vec<String>,
    pub extra: Bytes,
}

pub fn encode_metadata<'a>(strings: impl Iterator<Item = &'a str>, extra: &[u8]) -> BytesMut {
    let mut out = BytesMut::with_capacity(160 + extra.len());
    for (field, string) in (1..).zip(strings) {
        if !string.is_empty() {
            varint::put_length_delimited(&mut out, field, string.len());
            out.put_slice(string.as_bytes());
        }
    }
    if !extra.is_empty() {
        varint::put_length_delimited(&mut out, EXTRA, extra.len());
        out.put_slice(extra);
    }
    out
}

/// A framed CallRequest with encoded metadata.
pub fn encode_call_request(metadata: Bytes, content: Content, admission_word: u32) -> Result<FrameBuf, WireError> {
    let mut out = Encoder::new();
    out.field(METADATA, vec![metadata]);
    out.varint_field(ADMISSION_WORD, u64::from(admission_word));
    out.payload(content);
    out.finish()
}

/// A framed CallResponse.
pub fn encode_call_response(kind: Kind, content: Content) -> Result<FrameBuf, WireError> {
    let mut out = Encoder::new();
    out.varint_field(KIND, u64::from(kind.0));
    out.payload(content);
    out.finish()
}

/// A framed message whose fields 1, 2, 3 … are bytes: Ray's ASGIRequest.
pub fn encode_fields(fields: Vec<Vec<Bytes>>) -> Result<FrameBuf, WireError> {
    let mut out = Encoder::new();
    for (field, parts) in (1..).zip(fields) {
        out.field(field, parts);
    }
    out.finish()
}

/// A framed ASGIResponse.
pub fn encode_stock_response(is_error: bool, body: Vec<Bytes>) -> Result<FrameBuf, WireError> {
    let mut out = Encoder::new();
    out.field(1, body);
    out.varint_field(2, u64::from(is_error));
    out.finish()
}

pub fn parse_call_request(payload: &Payload) -> Result<Envelope, WireError> {
    let mut parts = Parts::of(payload)?;
    let metadata = match parts.first.take() {
        Some(range) => parse_metadata(&slice(payload, range))?,
        None => Metadata::default(),
    };
    Ok(Envelope { metadata, ..parts.envelope(payload)? })
}

pub fn parse_call_response(payload: &Payload) -> Result<Envelope, WireError> {
    Parts::of(payload)?.envelope(payload)
}

/// ASGIRequest: its three fields.
pub fn parse_fields(payload: &Payload) -> Result<Envelope, WireError> {
    let mut fields = vec![Slice::default(); STOCK_FIELDS];
    let bytes = payload.as_slice();
    let mut at = 0;
    while at < bytes.len() {
        if let Field::Range(number, range) = varint::take_field(bytes, &mut at)?
            && let Some(field) = (number as usize).checked_sub(1).and_then(|index| fields.get_mut(index))
        {
            *field = slice(payload, range);
        }
    }
    Ok(Envelope { fields, size: bytes.len(), ..Envelope::default() })
}

/// ASGIResponse: `kind` is its `is_error`.
pub fn parse_stock_response(payload: &Payload) -> Result<Envelope, WireError> {
    let mut envelope = Envelope { size: payload.len(), ..Envelope::default() };
    let bytes = payload.as_slice();
    let mut at = 0;
    while at < bytes.len() {
        match varint::take_field(bytes, &mut at)? {
            Field::Range(1, range) => envelope.body = slice(payload, range),
            Field::Varint(2, value) => envelope.kind = u32::from(value != 0),
            _ => {}
        }
    }
    Ok(envelope)
}

fn encode_segment(segment: &SegmentRef) -> Bytes {
    let mut ranges = BytesMut::new();
    for (offset, length) in &segment.ranges {
        varint::put(&mut ranges, *offset);
        varint::put(&mut ranges, *length);
    }
    let mut out = BytesMut::with_capacity(16 + ranges.len());
    // Always written, so that a SegmentRef is never empty.
    for (field, value) in [(1, segment.id), (2, segment.slot)] {
        varint::put(&mut out, field << 3);
        varint::put(&mut out, u64::from(value));
    }
    varint::put_length_delimited(&mut out, 3, ranges.len());
    out.put_slice(&ranges);
    out.freeze()
}

fn parse_segment(bytes: &[u8]) -> Result<SegmentRef, WireError> {
    let mut segment = SegmentRef::default();
    let narrow = |value: u64| u32::try_from(value).map_err(|_| WireError::Malformed("a SegmentRef is over 32 bits"));
    let mut at = 0;
    while at < bytes.len() {
        match varint::take_field(bytes, &mut at)? {
            Field::Varint(1, value) => segment.id = narrow(value)?,
            Field::Varint(2, value) => segment.slot = narrow(value)?,
            Field::Range(3, range) => {
                let mut from = range.start;
                while from < range.end {
                    if segment.ranges.len() == MAX_BUFFERS {
                        return Err(WireError::Malformed("more than 65,536 ranges of a segment"));
                    }
                    let offset = varint::take(&bytes[..range.end], &mut from)?;
                    segment.ranges.push((offset, varint::take(&bytes[..range.end], &mut from)?));
                }
            }
            _ => {}
        }
    }
    Ok(segment)
}

fn parse_metadata(bytes: &Slice) -> Result<Metadata, WireError> {
    let bytes = bytes.as_slice();
    let mut metadata = Metadata { strings: vec![String::new(); METADATA_STRINGS], extra: Bytes::new() };
    let mut at = 0;
    while at < bytes.len() {
        if let Field::Range(number, range) = varint::take_field(bytes, &mut at)? {
            if number == EXTRA {
                metadata.extra = Bytes::copy_from_slice(&bytes[range]);
            } else if let Some(string) =
                (number as usize).checked_sub(1).and_then(|index| metadata.strings.get_mut(index))
            {
                let text = std::str::from_utf8(&bytes[range])
                    .map_err(|_| WireError::Malformed("a string of RequestMetadata is not UTF-8"))?;
                text.clone_into(string);
            }
        }
    }
    Ok(metadata)
}

/// Where the fields that both of our messages have lie in their bytes.
#[derive(Default)]
struct Parts {
    first: Option<std::ops::Range<usize>>,
    kind: u32,
    body: Option<std::ops::Range<usize>>,
    buffers: Vec<std::ops::Range<usize>>,
    body_segment: Option<SegmentRef>,
    segments: Vec<SegmentRef>,
    admission_word: u32,
}

impl Parts {
    fn of(payload: &Payload) -> Result<Parts, WireError> {
        let bytes = payload.as_slice();
        let mut parts = Parts::default();
        let (mut at, mut ranges) = (0, 0);
        while at < bytes.len() {
            match varint::take_field(bytes, &mut at)? {
                Field::Varint(KIND, value) => {
                    parts.kind = u32::try_from(value).map_err(|_| WireError::Malformed("kind is over 32 bits"))?;
                }
                Field::Varint(ADMISSION_WORD, value) => {
                    parts.admission_word =
                        u32::try_from(value).map_err(|_| WireError::Malformed("admission_word is over 32 bits"))?;
                }
                Field::Range(METADATA, range) => parts.first = Some(range),
                Field::Range(BODY, range) => parts.body = Some(range),
                Field::Range(BUFFER, range) => {
                    if parts.buffers.len() == MAX_BUFFERS {
                        return Err(WireError::Malformed("more than 65,536 buffers"));
                    }
                    parts.buffers.push(range);
                }
                Field::Range(SEGMENT, range) => {
                    let segment = parse_segment(&bytes[range])?;
                    // Each names a range at least: else it says nothing.
                    ranges += segment.ranges.len().max(1);
                    if ranges > MAX_BUFFERS {
                        return Err(WireError::Malformed("more than 65,536 ranges of segments"));
                    }
                    parts.segments.push(segment);
                }
                Field::Range(BODY_SEGMENT, range) => parts.body_segment = Some(parse_segment(&bytes[range])?),
                _ => {}
            }
        }
        Ok(parts)
    }

    fn envelope(self, payload: &Payload) -> Result<Envelope, WireError> {
        Ok(Envelope {
            kind: self.kind,
            body: self.body.map(|range| slice(payload, range)).unwrap_or_default(),
            buffers: aligned(payload, self.buffers)?,
            body_segment: self.body_segment,
            segments: self.segments,
            admission_word: self.admission_word,
            size: payload.len(),
            ..Envelope::default()
        })
    }
}

fn slice(payload: &Payload, range: std::ops::Range<usize>) -> Slice {
    match payload {
        Payload::Small(bytes) => Slice::Bytes(bytes.slice(range)),
        Payload::Large(region) => Slice::Region(region.slice(range)),
    }
}

/// Buffers that lie aligned in memory of their own are handed on as they are; the others are copied together.
fn aligned(payload: &Payload, ranges: Vec<std::ops::Range<usize>>) -> Result<Vec<Region>, WireError> {
    let padded = |length: usize| length.next_multiple_of(ALIGNMENT);
    let region = match payload {
        Payload::Large(region) if ranges.iter().all(|range| range.start % ALIGNMENT == 0) => {
            return Ok(ranges.into_iter().map(|range| region.slice(range)).collect());
        }
        _ if ranges.is_empty() => return Ok(Vec::new()),
        _ => {
            let size = ranges.iter().map(|range| padded(range.len())).sum();
            let mut buf = AlignedBuf::with_capacity(size).ok_or(WireError::NoMemory { size })?;
            for range in &ranges {
                buf.extend(&payload.as_slice()[range.clone()]);
                buf.extend(&[0; ALIGNMENT][..padded(range.len()) - range.len()]);
            }
            buf.freeze()
        }
    };
    let mut at = 0;
    let place = |range: std::ops::Range<usize>| {
        let start = at;
        at += padded(range.len());
        region.slice(start..start + range.len())
    };
    Ok(ranges.into_iter().map(place).collect())
}

const PREFIX: usize = 5;

/// Builds one framed message: small parts are copied together, large ones stay where they are.
struct Encoder {
    parts: Vec<BytesOrHead>,
    current: BytesMut,
    /// Bytes of the message so far, without the prefix.
    position: usize,
}

enum BytesOrHead {
    Head(BytesMut),
    Bytes(Bytes),
}

impl Encoder {
    fn new() -> Self {
        let mut current = BytesMut::with_capacity(512);
        current.put_slice(&[0; PREFIX]);
        Encoder { parts: Vec::new(), current, position: 0 }
    }

    fn varint_field(&mut self, field: u32, value: u64) {
        if value != 0 {
            let before = self.current.len();
            varint::put(&mut self.current, u64::from(field << 3));
            varint::put(&mut self.current, value);
            self.position += self.current.len() - before;
        }
    }

    fn payload(&mut self, content: Content) {
        self.field(BODY, content.body);
        for (field, segment) in content
            .segments
            .iter()
            .map(|segment| (SEGMENT, segment))
            .chain(content.body_segment.iter().map(|segment| (BODY_SEGMENT, segment)))
        {
            self.field(field, vec![encode_segment(segment)]);
        }
        for buffer in content.buffers {
            self.align(buffer.len());
            self.write_field(BUFFER, buffer.len(), std::iter::once(buffer));
        }
    }

    /// An empty field is left out, as proto3 does.
    fn field(&mut self, field: u32, parts: Vec<Bytes>) {
        let length = parts.iter().map(Bytes::len).sum();
        if length > 0 {
            self.write_field(field, length, parts.into_iter());
        }
    }

    fn write_field(&mut self, field: u32, length: usize, parts: impl Iterator<Item = Bytes>) {
        let before = self.current.len();
        varint::put_length_delimited(&mut self.current, field, length);
        self.position += self.current.len() - before + length;
        for part in parts {
            if part.len() <= COPY_UP_TO {
                self.current.put_slice(&part);
            } else {
                self.split();
                self.parts.push(BytesOrHead::Bytes(part));
            }
        }
    }

    /// Pads so that the data of a buffer of `length` bytes starts at a multiple of `ALIGNMENT`.
    fn align(&mut self, length: usize) {
        let head = 1 + varint::encoded_len(length as u64);
        if (self.position + head).is_multiple_of(ALIGNMENT) {
            return;
        }
        let padding = (ALIGNMENT - (self.position + 2 + head) % ALIGNMENT) % ALIGNMENT;
        varint::put_length_delimited(&mut self.current, PADDING, padding);
        self.current.put_bytes(0, padding);
        self.position += 2 + padding;
    }

    fn split(&mut self) {
        let head = self.current.split();
        if self.parts.is_empty() {
            self.parts.push(BytesOrHead::Head(head));
        } else if !head.is_empty() {
            self.parts.push(BytesOrHead::Bytes(head.freeze()));
        }
    }

    fn finish(mut self) -> Result<FrameBuf, WireError> {
        let length = u32::try_from(self.position)
            .map_err(|_| WireError::TooLarge { size: self.position, limit: u32::MAX as usize })?;
        self.split();
        let mut out = FrameBuf::default();
        for part in self.parts {
            out.push(match part {
                BytesOrHead::Head(mut head) => {
                    head[1..PREFIX].copy_from_slice(&length.to_be_bytes());
                    head.freeze()
                }
                BytesOrHead::Bytes(bytes) => bytes,
            });
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MessageReader;
    use bytes::Buf;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn payload(mut frames: FrameBuf) -> Payload {
        let mut reader = MessageReader::new(usize::MAX);
        let mut messages = VecDeque::new();
        reader.push(frames.copy_to_bytes(frames.remaining()), &mut messages).unwrap();
        assert_eq!(messages.len(), 1);
        messages.pop_front().unwrap()
    }

    fn bytes_of_any_size() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![0_usize..300, 4_000_usize..4_200, 16_000_usize..70_000]
            .prop_map(|size| (0..size).map(|i| (i * 31) as u8).collect())
    }

    proptest! {
        #[test]
        fn a_request_comes_back(
            strings in proptest::collection::vec(".{0,12}", 9),
            extra: Vec<u8>,
            body in proptest::collection::vec(bytes_of_any_size(), 0..4),
            buffers in proptest::collection::vec(bytes_of_any_size(), 0..5),
        ) {
            let metadata = encode_metadata(strings.iter().map(String::as_str), &extra).freeze();
            let content = Content::of(
                body.iter().cloned().map(Bytes::from).collect(),
                buffers.iter().cloned().map(Bytes::from).collect(),
            );
            let framed = encode_call_request(metadata, content, 7).unwrap();
            let parsed = parse_call_request(&payload(framed)).unwrap();
            if strings.iter().all(String::is_empty) && extra.is_empty() {
                prop_assert_eq!(parsed.metadata, Metadata::default());
            } else {
                prop_assert_eq!(parsed.metadata, Metadata { strings, extra: Bytes::from(extra) });
            }
            prop_assert_eq!(parsed.admission_word, 7);
            prop_assert_eq!(parsed.body.as_slice(), body.concat());
            prop_assert_eq!(parsed.buffers.len(), buffers.len());
            for (region, buffer) in parsed.buffers.iter().zip(&buffers) {
                prop_assert_eq!(region.as_slice(), &buffer[..]);
                prop_assert_eq!(region.as_slice().as_ptr() as usize % ALIGNMENT, 0);
            }
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>) {
            let payload = Payload::Small(Bytes::from(bytes));
            let _ = parse_call_request(&payload);
            let _ = parse_call_response(&payload);
            let _ = parse_fields(&payload);
            let _ = parse_stock_response(&payload);
        }
    }

    #[test]
    fn a_response_keeps_its_kind() {
        let framed = encode_call_response(Kind(3), Content::of(vec![Bytes::from_static(b"text")], vec![])).unwrap();
        let parsed = parse_call_response(&payload(framed)).unwrap();
        assert_eq!((parsed.kind, parsed.body.as_slice()), (3, &b"text"[..]));
    }

    #[test]
    fn named_memory_comes_back() {
        let segment = |id| SegmentRef { id, slot: id * 2, ranges: vec![(0, 7), (1 << 40, 300)] };
        let content = Content {
            body_segment: Some(segment(0)),
            segments: vec![segment(1), segment(70_000)],
            ..Content::default()
        };
        let parsed = parse_call_response(&payload(encode_call_response(Kind(0), content).unwrap())).unwrap();
        assert_eq!(parsed.body_segment, Some(segment(0)));
        assert_eq!(parsed.segments, vec![segment(1), segment(70_000)]);
    }

    #[test]
    fn stock_messages_have_rays_field_numbers() {
        let framed = encode_stock_response(true, vec![Bytes::from_static(b"x")]).unwrap();
        assert_eq!(payload(framed).as_slice(), &[0x0a, 1, b'x', 0x10, 1]);
        let framed =
            encode_fields(vec![vec![Bytes::from_static(b"m")], vec![], vec![Bytes::from_static(b"k")]]).unwrap();
        assert_eq!(payload(framed).as_slice(), &[0x0a, 1, b'm', 0x1a, 1, b'k']);
    }
}
