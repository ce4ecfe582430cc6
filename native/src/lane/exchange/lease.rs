//! The word of a lease: which of two processes may touch the memory behind it.
//!
//! `FREE` and `GRANTED` are the lender's to change, `TAKEN` is the reader's; who leaves `GRANTED` is decided by a
//! compare-and-swap.

use crate::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const GRANTED: u32 = 1;
const TAKEN: u32 = 2;

/// The lender, before it names the memory in a message: all that it wrote shows to who takes the lease.
pub fn grant(word: &AtomicU32) {
    word.store(GRANTED, Ordering::Release);
}

/// The reader. False when the lender took it back: then the memory may change at any time.
pub fn take(word: &AtomicU32) -> bool {
    word.compare_exchange(GRANTED, TAKEN, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// The reader, when it will not look again.
pub fn give_back(word: &AtomicU32) {
    word.store(FREE, Ordering::Release);
}

/// The lender, whose message will not be read. False when the reader has taken it, or has given it back.
pub fn take_back(word: &AtomicU32) -> bool {
    word.compare_exchange(GRANTED, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// The lender: until it is false the memory must not change.
pub fn is_lent(word: &AtomicU32) -> bool {
    word.load(Ordering::Acquire) != FREE
}
