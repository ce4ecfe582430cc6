//! What this process is short of. Calls go on by another lane, so each cause is told once.

use crate::runtime::PerProcess;
use std::collections::HashSet;
use std::io;
use std::sync::{LazyLock, Mutex, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Bytes that all segments may have together.
    Cap(usize),
    /// Segments in use.
    Count(usize),
    /// The system's reason against more shared memory.
    System(i32),
    /// A peer's memory came without its descriptor.
    Descriptor,
}

static TOLD: LazyLock<PerProcess<Mutex<HashSet<Cause>>>> = LazyLock::new(|| PerProcess::new(Mutex::default));

/// Warns when this cause is new to the process.
pub fn tell(cause: Cause) {
    if !is_new(cause) {
        return;
    }
    match cause {
        Cause::Cap(bytes) => tracing::warn!(
            "Shared memory is at its limit, RAY_SERVE_GRPC_SHM_LIMIT={bytes} bytes: what does not fit goes by the socket. \
             Raise the setting where memory allows. Told once"
        ),
        Cause::Count(most) => tracing::warn!(
            "All {most} segments of shared memory are in use: other messages go by the socket. Results that are kept \
             hold theirs. Told once"
        ),
        Cause::System(code) => tracing::warn!(
            "Shared memory cannot be had ({}): messages go by the socket. See the limits of this process (ulimit -n, -f) \
             and of its container. Told once",
            io::Error::from_raw_os_error(code)
        ),
        Cause::Descriptor => tracing::warn!(
            "No file descriptor is left for a peer's shared memory: its messages come by the socket. Raise the limit of \
             open files (ulimit -n). Told once"
        ),
    }
}

/// As `tell`, for an error that tells of a shortage here, and not of the peer.
pub fn tell_of(error: &io::Error) {
    use rustix::io::Errno;
    const SHORT: [Errno; 8] =
        [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOSPC, Errno::FBIG, Errno::PERM, Errno::ACCESS, Errno::NOSYS];
    if let Some(errno) = Errno::from_io_error(error).filter(|errno| SHORT.contains(errno)) {
        tell(Cause::System(errno.raw_os_error()));
    }
}

fn is_new(cause: Cause) -> bool {
    TOLD.current().lock().unwrap_or_else(PoisonError::into_inner).insert(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_new_once() {
        for cause in [Cause::Count(7), Cause::System(7), Cause::System(8)] {
            assert!(is_new(cause));
            assert!(!is_new(cause));
        }
    }
}
