//! The words that both ends of a connection map: leases, and which calls were taken.

use super::{Exchange, lock};
use crate::lane::sys::Mapping;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Lease words of one control page.
pub(super) const SLOTS: u32 = 1024;
/// Admission words, after the lease words.
pub(super) const ADMISSIONS: u32 = 4096;
const CONTROL_BYTES: usize = (SLOTS + ADMISSIONS) as usize * 4;

/// Lease words in a memory file.
#[derive(Debug)]
pub struct Control {
    words: Mapping,
    file: OwnedFd,
}

impl Control {
    pub fn new() -> io::Result<Control> {
        let file = memfd_create("ray_serve_grpc leases", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, CONTROL_BYTES as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let words = Mapping::shared(file.as_fd(), CONTROL_BYTES)?;
        Ok(Control { words, file })
    }

    pub fn of_peer(file: OwnedFd) -> io::Result<Control> {
        require_fixed_size(file.as_fd(), CONTROL_BYTES as u64)?;
        let words = Mapping::shared(file.as_fd(), CONTROL_BYTES)?;
        Ok(Control { words, file })
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Word of a lease.
    pub(super) fn lease(&self, slot: u32) -> &AtomicU32 {
        debug_assert!(slot < SLOTS);
        self.words.word(slot as usize)
    }

    fn admission(&self, word: u32) -> &AtomicU32 {
        debug_assert!(word < ADMISSIONS);
        self.words.word((SLOTS + word) as usize)
    }
}

/// A peer's file must hold `size` bytes for ever: touching what it cut off would kill this process.
pub(super) fn require_fixed_size(file: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    let refused = |text| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return refused("shared memory of a peer is not sealed against shrinking");
    }
    if u64::try_from(fstat(file)?.st_size).unwrap_or(0) < size {
        return refused("shared memory of a peer is smaller than it says");
    }
    Ok(())
}

impl Exchange {
    /// A word in which the peer notes that it took a call; None when all are in use.
    pub fn admission_word(self: &Arc<Self>) -> Option<AdmissionWord> {
        let word = lock(&self.admissions).pop()?;
        self.control.admission(word).store(0, Ordering::Release);
        Some(AdmissionWord { exchange: Arc::clone(self), word })
    }

    /// Notes in the peer's word that this end takes the call on `stream`. False when there is no such word.
    pub fn note_admission(&self, named: u32, stream: u32) -> bool {
        match named.checked_sub(1) {
            Some(word) if word < ADMISSIONS => {
                self.peer_control.admission(word).store(stream, Ordering::Release);
                true
            }
            _ => false,
        }
    }
}

/// A word for one call.
#[derive(Debug)]
pub struct AdmissionWord {
    exchange: Arc<Exchange>,
    word: u32,
}

impl AdmissionWord {
    /// As a message names it.
    pub fn name(&self) -> u32 {
        self.word + 1
    }

    /// Whether the peer took the call on `stream`. Streams of a connection have ids of their own, so that a
    /// late note of an earlier call is not taken for one of this call.
    pub fn is_noted(&self, stream: u32) -> bool {
        self.exchange.control.admission(self.word).load(Ordering::Acquire) == stream
    }
}

impl Drop for AdmissionWord {
    fn drop(&mut self) {
        lock(&self.exchange.admissions).push(self.word);
    }
}
