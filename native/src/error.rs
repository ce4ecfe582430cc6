//! How a call ended.

use crate::lane::tls;
use crate::wire::WireError;
use std::fmt;

/// gRPC status codes that the core uses itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    pub const OK: Code = Code(0);
    pub const CANCELLED: Code = Code(1);
    pub const UNKNOWN: Code = Code(2);
    pub const INVALID_ARGUMENT: Code = Code(3);
    pub const DEADLINE_EXCEEDED: Code = Code(4);
    pub const RESOURCE_EXHAUSTED: Code = Code(8);
    pub const UNIMPLEMENTED: Code = Code(12);
    pub const INTERNAL: Code = Code(13);
    pub const UNAVAILABLE: Code = Code(14);
    pub const UNAUTHENTICATED: Code = Code(16);
}

/// How the text of a lost connection begins.
const LOST: &str = "connection lost";

/// A gRPC status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub code: Code,
    pub detail: String,
}

impl Status {
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Status { code, detail: detail.into() }
    }

    pub fn ok() -> Self {
        Status::new(Code::OK, "")
    }

    pub fn unavailable(detail: impl Into<String>) -> Self {
        Status::new(Code::UNAVAILABLE, detail)
    }

    /// Of a call whose connection ended under it.
    pub fn lost(reason: impl fmt::Display) -> Self {
        Status::unavailable(format!("{LOST}: {reason}"))
    }

    /// The same for the reason that this end had to end the connection, where it did.
    #[must_use]
    pub fn because(self, reason: Option<&String>) -> Self {
        match reason {
            Some(reason) if self.code == Code::UNAVAILABLE && self.detail.starts_with(LOST) => Status::lost(reason),
            _ => self,
        }
    }

    pub fn cancelled() -> Self {
        Status::new(Code::CANCELLED, "the call was cancelled")
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (gRPC status {})", self.detail, self.code.0)
    }
}

impl From<WireError> for Status {
    fn from(error: WireError) -> Self {
        let code = match error {
            WireError::TooLarge { .. } | WireError::NoMemory { .. } => Code::RESOURCE_EXHAUSTED,
            WireError::Compressed => Code::UNIMPLEMENTED,
            WireError::Malformed(_) => Code::INVALID_ARGUMENT,
        };
        Status::new(code, error.to_string())
    }
}

impl From<h2::Error> for Status {
    fn from(error: h2::Error) -> Self {
        if error.get_io().is_some_and(tls::is_refusal) {
            return Status::new(Code::UNAUTHENTICATED, format!("TLS: {error}"));
        }
        match error.reason() {
            Some(h2::Reason::CANCEL) => Status::new(Code::CANCELLED, "the peer cancelled the call"),
            Some(reason) if error.is_reset() && reason != h2::Reason::REFUSED_STREAM => {
                Status::new(Code::INTERNAL, format!("the peer reset the stream: {reason}"))
            }
            _ if error.is_io() => Status::lost(format!("closed by the peer, whose process may have ended: {error}")),
            _ => Status::lost(error),
        }
    }
}

/// Whether this error says that the peer never began to work on the stream.
pub fn was_refused(error: &h2::Error) -> bool {
    let stopped = error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR);
    stopped || error.reason() == Some(h2::Reason::REFUSED_STREAM)
}
