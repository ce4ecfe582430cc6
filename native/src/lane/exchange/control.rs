//! The words that both ends of a connection map: leases, and which calls were taken.

use super::{Exchange, admission, lock};
use crate::lane::sys::Mapping;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

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
    /// A word for one call; None when all are in use.
    pub fn admission_word(self: &Arc<Self>) -> Option<AdmissionWord> {
        let word = lock(&self.admissions).pop()?;
        Some(AdmissionWord { exchange: Arc::clone(self), word, stream: None })
    }

    /// Takes the call on `stream` in the peer's word: false when the peer has given it up. None when there is no such
    /// word. The page stays mapped for as long as a call of its connection is held, also when the connection is lost.
    pub fn take_admission(&self, named: u32, stream: u32) -> Option<bool> {
        let word = named.checked_sub(1).filter(|word| *word < ADMISSIONS)?;
        Some(admission::take(self.peer_control.admission(word), stream))
    }
}

/// A word for one call. When it is dropped, the peer can take the call no more.
#[derive(Debug)]
pub struct AdmissionWord {
    exchange: Arc<Exchange>,
    word: u32,
    /// Of the call, once it is known.
    stream: Option<u32>,
}

impl AdmissionWord {
    /// As a message names it.
    pub fn name(&self) -> u32 {
        self.word + 1
    }

    /// From here on the peer may take the call: before the request is sent.
    pub fn open(&mut self, stream: u32) {
        admission::open(self.exchange.control.admission(self.word), stream);
        self.stream = Some(stream);
    }

    /// Gives the call up. False when the peer has taken it.
    pub fn revoke(&self) -> bool {
        self.stream.is_none_or(|stream| admission::revoke(self.exchange.control.admission(self.word), stream))
    }
}

impl Drop for AdmissionWord {
    fn drop(&mut self) {
        self.revoke();
        lock(&self.exchange.admissions).push(self.word);
    }
}
