//! The wire without I/O: gRPC frames, the messages of both services, and the bytes they are made of.

mod backlog;
mod frame_buf;
mod message;
mod reader;
mod varint;

pub use backlog::Backlog;
pub use frame_buf::FrameBuf;
pub use message::{
    Content, Envelope, Kind, Metadata, STOCK_FIELDS, SegmentRef, Slice, encode_call_request, encode_call_response,
    encode_fields, encode_metadata, encode_stock_response, parse_call_request, parse_call_response, parse_fields,
    parse_stock_response,
};
pub use reader::{MessageReader, Payload};

use thiserror::Error;

/// Start of every buffer handed to user code, in bytes: numpy's vector loops want a cache line.
pub const ALIGNMENT: usize = 64;

/// A part of at most this many bytes is copied next to its neighbours instead of being sent from where it is.
/// One more entry of a writev costs about what copying 4 KiB does.
pub const COPY_UP_TO: usize = 4096;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum WireError {
    #[error("message of {size} bytes is over the limit of {limit} bytes")]
    TooLarge { size: usize, limit: usize },
    #[error("there is no memory for a message of {size} bytes")]
    NoMemory { size: usize },
    #[error("compressed messages are not supported")]
    Compressed,
    #[error("malformed message: {0}")]
    Malformed(&'static str),
}
