//! Settings of both ends, and the HTTP/2 figures behind them.

use crate::lane::{Endpoint, tls};
use http::HeaderValue;
use std::fmt;
use std::time::Duration;

/// gRPC's length prefix has 32 bits; upstream's default is one bit less.
pub const DEFAULT_MAX_MESSAGE_SIZE: usize = (1 << 31) - 1;

/// Bytes of a DATA frame: what a small message waits for behind a big one. A 10 MB message in frames of 16 KiB costs
/// twice the CPU; in larger ones than this it costs the same.
pub const MAX_FRAME_SIZE: u32 = 1 << 20;
/// Bytes that a peer may send on one stream before they are read: what is ahead of a small message at most, besides the
/// sockets' buffers. With 16 MiB a call of 200 MiB lets a third as many small ones pass. Fixed: windows that adapt were
/// slower.
pub const STREAM_WINDOW: u32 = 4 << 20;
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes of a stream that wait in h2 for the socket before the writer is held back.
pub const SEND_BUFFER: usize = 4 << 20;
/// What small frames may cost until they are read: each counts 256 less its bytes, so a million of one byte. A peer
/// that sends more loses the connection. Whoever reads streams here reads them at once, wanted or not.
pub const FRAME_BUDGET: usize = 256 << 20;
pub const MAX_CONCURRENT_STREAMS: u32 = 16_384;
pub const MAX_HEADER_LIST_SIZE: u32 = 64 << 10;
/// Resets that may wait to be accepted. A caller that cancels many calls at once is no attacker here: it
/// has shown its token.
pub const MAX_PENDING_RESETS: usize = 16_384;

/// Time that a peer has for TLS, for its HTTP/2 preface, for its Handshake, and for its first call with the token.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct ChannelConfig {
    /// Tried in this order.
    pub endpoints: Vec<Endpoint>,
    /// What the peer's Handshake must name; empty accepts any.
    pub identity: String,
    /// Value of every call's `authorization` header.
    pub authorization: Option<HeaderValue>,
    /// For the TCP endpoints.
    pub tls: Option<tls::Connector>,
    pub max_message_size: usize,
    pub connect_timeout: Duration,
    /// A ping is sent this long after the last one was answered.
    pub keepalive_interval: Duration,
    /// A peer that does not answer a ping within it is dead.
    pub keepalive_timeout: Duration,
}

#[derive(Clone)]
pub struct ServerConfig {
    pub identity: String,
    pub version: String,
    pub authorization: Option<HeaderValue>,
    /// For TCP.
    pub tls: Option<tls::Acceptor>,
    pub max_message_size: usize,
    /// Whether the port tells what it serves (gRPC server reflection).
    pub reflection: bool,
}

/// The peer, for logs.
impl fmt::Display for ChannelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.identity)?;
        for (number, endpoint) in self.endpoints.iter().enumerate() {
            write!(f, "{}{endpoint}", if number == 0 { " at " } else { " or " })?;
        }
        Ok(())
    }
}
