//! The word of an admission: whether the replica took a call, or its caller gave it up first.
//!
//! The caller opens the word for the stream of a call before it sends the request. The replica takes it before user
//! code starts; the caller revokes it before it reports that the call never ran. Both are compare-and-swaps from the
//! same value, so that one of them wins. Streams of a connection have ids of their own: a request that lay in a
//! stopped replica's socket does not find its own stream in a word that serves another call by now.

use crate::sync::atomic::{AtomicU32, Ordering};

/// Beside the stream's id, which has 31 bits.
const OPEN: u32 = 1 << 31;
const REVOKED: u32 = 0;

/// The caller, before it sends the request.
pub fn open(word: &AtomicU32, stream: u32) {
    word.store(OPEN | stream, Ordering::Release);
}

/// The replica. False when the caller gave the call up, and may have sent it elsewhere: user code must not start.
pub fn take(word: &AtomicU32, stream: u32) -> bool {
    word.compare_exchange(OPEN | stream, stream, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// The caller. False when the replica took the call, which may have run.
pub fn revoke(word: &AtomicU32, stream: u32) -> bool {
    match word.compare_exchange(OPEN | stream, REVOKED, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => true,
        Err(found) => found == REVOKED,
    }
}
