//! Protobuf's base-128 integers and field tags.

use super::WireError;
use bytes::{BufMut, BytesMut};

pub const VARINT: u8 = 0;
pub const FIXED64: u8 = 1;
pub const LENGTH_DELIMITED: u8 = 2;
pub const FIXED32: u8 = 5;

pub fn put(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

/// Tag of a length-delimited field, then its length. The data follows.
pub fn put_length_delimited(out: &mut BytesMut, field: u32, length: usize) {
    put(out, u64::from(field << 3 | u32::from(LENGTH_DELIMITED)));
    put(out, length as u64);
}

pub fn encoded_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

pub fn take(bytes: &[u8], at: &mut usize) -> Result<u64, WireError> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let byte = *bytes.get(*at).ok_or(WireError::Malformed("varint is cut off"))?;
        *at += 1;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(WireError::Malformed("varint is over 64 bits"))
}

/// One field of a message as it stands in its bytes.
pub enum Field {
    Varint(u32, u64),
    Range(u32, std::ops::Range<usize>),
    Skipped,
}

pub fn take_field(bytes: &[u8], at: &mut usize) -> Result<Field, WireError> {
    let tag = take(bytes, at)?;
    let field = u32::try_from(tag >> 3).map_err(|_| WireError::Malformed("field number is over 32 bits"))?;
    match (tag & 7) as u8 {
        VARINT => Ok(Field::Varint(field, take(bytes, at)?)),
        LENGTH_DELIMITED => {
            let length = usize::try_from(take(bytes, at)?).map_err(|_| WireError::Malformed("length"))?;
            Ok(Field::Range(field, skip(bytes, at, length)?))
        }
        FIXED64 => skip(bytes, at, 8).map(|_| Field::Skipped),
        FIXED32 => skip(bytes, at, 4).map(|_| Field::Skipped),
        _ => Err(WireError::Malformed("unknown wire type")),
    }
}

fn skip(bytes: &[u8], at: &mut usize, length: usize) -> Result<std::ops::Range<usize>, WireError> {
    let start = *at;
    let end = start
        .checked_add(length)
        .filter(|end| *end <= bytes.len())
        .ok_or(WireError::Malformed("field reaches beyond its message"))?;
    *at = end;
    Ok(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_integer_comes_back(value: u64) {
            let mut out = BytesMut::new();
            put(&mut out, value);
            prop_assert_eq!(out.len(), encoded_len(value));
            let mut at = 0;
            prop_assert_eq!(take(&out, &mut at).unwrap(), value);
            prop_assert_eq!(at, out.len());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let mut at = 0;
            while at < bytes.len() {
                let before = at;
                if take_field(&bytes, &mut at).is_err() { break }
                prop_assert!(at > before && at <= bytes.len());
            }
        }
    }
}
