//! Memory that Python reads and writes: the one file of the core with unsafe code (the other is
//! `py/buffer.rs`, which gives this memory to the interpreter).
#![allow(unsafe_code)]
// The one cast that clippy suspects starts at a page.
#![allow(clippy::cast_ptr_alignment)]

use crate::runtime;
use crate::wire::ALIGNMENT;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::io;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf};

/// From this size on freed memory is kept for the next message: the allocator gives such blocks back to the
/// kernel, and fresh pages cost about 0.25 ms per MB when they are touched.
const POOLED_FROM: usize = 16 << 20;
/// Bytes kept in all.
const POOL_LIMIT: usize = 256 << 20;
/// A block that was not used for this long is freed.
const POOL_IDLE: Duration = Duration::from_secs(5);

static POOL: Mutex<Pool> = Mutex::new(Pool { kept: Vec::new(), trimming: None });

struct Pool {
    kept: Vec<(Instant, Block)>,
    /// Of the process whose task looks for idle blocks.
    trimming: Option<u64>,
}

impl Pool {
    fn trim_when_idle(&mut self) {
        let here = Some(runtime::generation());
        if self.trimming != here {
            self.trimming = here;
            runtime::handle().spawn(async {
                while !trim(POOL_IDLE) {
                    tokio::time::sleep(POOL_IDLE).await;
                }
            });
        }
    }
}

/// Frees what was not used for `idle`. Returns whether nothing is left.
fn trim(idle: Duration) -> bool {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let (old, kept) = std::mem::take(&mut pool.kept).into_iter().partition(|(since, _)| since.elapsed() >= idle);
    pool.kept = kept;
    let is_empty = pool.kept.is_empty();
    if is_empty {
        pool.trimming = None;
    }
    drop(pool);
    let old: Vec<(Instant, Block)> = old;
    for (_, block) in old {
        block.free();
    }
    is_empty
}

/// An owned allocation that starts at a multiple of `ALIGNMENT`.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: a block owns its memory; nothing about it is bound to a thread.
unsafe impl Send for Block {}
// SAFETY: a shared block can do nothing; only its owner frees it.
unsafe impl Sync for Block {}

impl Block {
    /// None when the system has no such memory. Pages that are never written to cost none.
    fn with_capacity(size: usize) -> Option<Self> {
        let capacity = size.max(ALIGNMENT).checked_next_multiple_of(ALIGNMENT)?;
        if capacity >= POOLED_FROM {
            let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |(_, block): &(_, Block)| block.capacity >= capacity && block.capacity / 2 <= capacity;
            if let Some(index) = pool.kept.iter().position(fits) {
                return Some(pool.kept.swap_remove(index).1);
            }
        }
        // SAFETY: the layout's size is at least ALIGNMENT, so not zero.
        let start = NonNull::new(unsafe { alloc(Self::layout(capacity)?) })?;
        prefer_huge_pages(start.as_ptr(), capacity);
        Some(Block { start, capacity })
    }

    fn layout(capacity: usize) -> Option<Layout> {
        Layout::from_size_align(capacity, ALIGNMENT).ok()
    }

    fn free(self) {
        let Some(layout) = Self::layout(self.capacity) else { return };
        // SAFETY: `start` came from `alloc` with this very layout, and `self` is its only owner.
        unsafe { dealloc(self.start.as_ptr(), layout) }
    }
}

/// The owner of a region's memory: gives the block to the pool when the last region of it dies.
#[derive(Debug)]
struct Owner {
    block: Option<Block>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if block.capacity >= POOLED_FROM {
            let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
            let kept: usize = pool.kept.iter().map(|(_, block)| block.capacity).sum();
            if kept + block.capacity <= POOL_LIMIT {
                pool.kept.push((Instant::now(), block));
                pool.trim_when_idle();
                return;
            }
        }
        block.free();
    }
}

/// Fresh memory of this size and more is filled by two threads: most of the time goes into its pages.
const SPLIT_FROM: usize = 32 << 20;

/// Memory that is to be filled, of somebody who gave it away until then.
#[derive(Debug)]
pub struct Blank {
    start: *mut u8,
    length: usize,
}

// SAFETY: whoever made it promised that nobody else touches the memory.
unsafe impl Send for Blank {}

impl Blank {
    /// # Safety
    /// `start` points to `length` bytes that may be written to, and that nobody else reads or writes before the value
    /// is gone.
    pub unsafe fn new(start: *mut u8, length: usize) -> Blank {
        Blank { start, length }
    }

    /// Fills all of it. Panics when `bytes` has another length.
    pub fn fill(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.length, "another length than that of the memory");
        prefer_huge_pages(self.start, self.length);
        if self.length < SPLIT_FROM {
            return self.write(bytes);
        }
        let (first, second) = bytes.split_at(self.length / 2);
        // SAFETY: both parts lie within the memory, the second where the first ends.
        let rest = Blank { start: unsafe { self.start.add(first.len()) }, length: second.len() };
        std::thread::scope(|scope| {
            scope.spawn(move || rest.write(second));
            Blank { length: first.len(), ..self }.write(first);
        });
    }

    fn write(self, bytes: &[u8]) {
        // SAFETY: `fill` made sure that it has this length; the memory is ours alone (see `new`), so `bytes` lies
        // elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, bytes.len()) }
    }
}

/// Asks the kernel for huge pages, where this memory has none yet: 100 MB are then filled in a quarter of the time.
fn prefer_huge_pages(start: *mut u8, length: usize) {
    const PAGE: usize = 4096;
    let skipped = start.addr().next_multiple_of(PAGE) - start.addr();
    let whole = length.saturating_sub(skipped) / PAGE * PAGE;
    if whole >= HUGE_FROM {
        // SAFETY: whole pages within memory of ours; the advice changes nothing about what is in them. A kernel
        // without huge pages refuses it, which does not matter.
        let _ = unsafe { madvise(start.wrapping_add(skipped).cast(), whole, Advice::LinuxHugepage) };
    }
}

/// Of smaller memory the allocator keeps most, with its pages.
const HUGE_FROM: usize = 16 << 20;

/// Aligned memory that is filled once, from front to back, up to the size it was made for.
#[derive(Debug)]
pub struct AlignedBuf {
    block: Option<Block>,
    filled: usize,
    size: usize,
}

impl AlignedBuf {
    /// None when there is no memory for it.
    pub fn with_capacity(size: usize) -> Option<Self> {
        Some(AlignedBuf { block: Some(Block::with_capacity(size)?), filled: 0, size })
    }

    /// Bytes still to come.
    pub fn room(&self) -> usize {
        self.size - self.filled
    }

    pub fn extend(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.room(), "more bytes than the buffer was made for");
        let Some(block) = &self.block else { return };
        // SAFETY: filled + bytes.len() <= size <= capacity was just checked; the block is ours alone, so
        // `bytes` cannot overlap it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), block.start.as_ptr().add(self.filled), bytes.len());
        }
        self.filled += bytes.len();
    }

    pub fn freeze(mut self) -> Region {
        assert_eq!(self.room(), 0, "frozen before it was full");
        let block = self.block.take().expect("frozen once");
        Region { start: block.start, length: self.size, owner: Arc::new(Owner { block: Some(block) }) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        drop(Owner { block: self.block.take() });
    }
}

/// Pages of a memory file in this process.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping owns its pages; nothing about it is bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: `write` demands that its caller is alone with the bytes; all else reads or is atomic.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// What is written here is seen by all who map the file.
    pub fn shared(file: BorrowedFd<'_>, length: usize) -> io::Result<Mapping> {
        Self::new(file, length, MapFlags::SHARED)
    }

    /// Reads the file; what is written here stays here.
    pub fn private(file: BorrowedFd<'_>, length: usize) -> io::Result<Mapping> {
        Self::new(file, length, MapFlags::PRIVATE)
    }

    fn new(file: BorrowedFd<'_>, length: usize, flags: MapFlags) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing. Whoever maps a file
        // of a peer has checked that it is long enough and sealed against shrinking, so no access faults.
        let start = unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }

    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Of bytes that lie in it.
    pub fn offset_of(&self, bytes: &[u8]) -> usize {
        bytes.as_ptr().addr() - self.address()
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies `bytes` to `offset`. Whoever calls it holds the segment alone: no lease of it is out.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.length), "write out of bounds");
        // SAFETY: the target lies within the mapping, as just checked, and is written by this caller alone
        // (see above). `bytes` may lie in another mapping of the same file, but not in this one: the
        // writable mapping of a segment is never handed out.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len()) }
    }

    /// The 32-bit word at `index`, shared with the peer.
    pub fn word(&self, index: usize) -> &AtomicU32 {
        assert!((index + 1) * 4 <= self.length, "word out of bounds");
        // SAFETY: within the mapping, as just checked; page-aligned start, so aligned for u32; both processes
        // access the words of a control page only as atomics.
        unsafe { &*self.start.as_ptr().cast::<AtomicU32>().add(index) }
    }

    /// Drops what was written to a private mapping: the file's bytes show again.
    pub fn forget_writes(&self) -> io::Result<()> {
        // SAFETY: the whole of a private file mapping of ours that nobody looks at any more: its lease is
        // being returned.
        unsafe { madvise(self.start.as_ptr().cast(), self.length, Advice::LinuxDontNeed)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `mmap` with this length; regions of it keep its owner alive, so nobody looks any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// A part of filled memory, shared with the other parts of the same message.
///
/// The core only reads it until it is handed to Python, which may write to it; from then on the core
/// looks at it no more.
#[derive(Clone, Debug)]
pub struct Region {
    start: NonNull<u8>,
    length: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is owned through `owner` and only read by the core (see the type's contract).
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// All of a mapping, for as long as whoever owns it lives.
    pub fn of_mapping<T: AsRef<Mapping> + Any + Send + Sync>(owner: Arc<T>) -> Region {
        let mapping: &Mapping = (*owner).as_ref();
        Region { start: mapping.start, length: mapping.length, owner }
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `freeze` made sure that all bytes were written, and pages of a file always are; `slice`
        // stays within them; `owner` keeps them; nobody writes while the core holds the region.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Region {
        assert!(range.start <= range.end && range.end <= self.length, "slice out of bounds");
        // SAFETY: the start is within the region, as just checked.
        let start = unsafe { self.start.add(range.start) };
        Region { start, length: range.len(), owner: Arc::clone(&self.owner) }
    }

    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// Has tokio tell of a socket. Within a runtime only.
pub fn watched(socket: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: a `UnixStream` owns its descriptor, the same one until it is dropped, which `AsyncFd` does after it has
    // taken it out of the poll set; nobody here takes the stream out of it.
    unsafe { AsyncFd::register_with_interest(socket, interest) }.map_err(|error| error.into_parts().1)
}

/// Reads once from a socket into the free part of `buf`. Returns the bytes read, 0 at the end.
pub fn receive(socket: impl AsFd, buf: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: nothing is de-initialised: rustix writes to it what the kernel gives, and nothing else.
    let free = unsafe { buf.unfilled_mut() };
    let (filled, _) = rustix::io::read(socket, free)?;
    let count = filled.len();
    // SAFETY: rustix hands out as `filled` just what the kernel has written, from the start of `free`.
    unsafe { buf.assume_init(count) };
    buf.advance(count);
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_holds_what_was_written() {
        for size in [0, 1, 63, 64, 65, 100_000] {
            let bytes: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let mut buf = AlignedBuf::with_capacity(size).unwrap();
            for part in bytes.chunks(33) {
                buf.extend(part);
            }
            let region = buf.freeze();
            assert_eq!(region.as_slice(), bytes);
            assert_eq!(region.as_mut_ptr() as usize % ALIGNMENT, 0);
        }
    }

    #[test]
    fn large_blocks_are_used_again() {
        let size = POOLED_FROM + 12_345;
        let fill = |byte: u8| {
            let mut buf = AlignedBuf::with_capacity(size).unwrap();
            buf.extend(&vec![byte; size]);
            buf.freeze()
        };
        let first = fill(1);
        let address = first.as_mut_ptr();
        drop(first);
        let second = fill(2);
        assert_eq!(second.as_mut_ptr(), address);
        drop(second);
        assert!(!trim(POOL_IDLE));
        assert!(trim(Duration::ZERO));
    }

    #[test]
    fn blank_memory_is_filled_by_one_thread_or_two() {
        for size in [0, 1, SPLIT_FROM - 1, SPLIT_FROM, SPLIT_FROM + 4097] {
            let bytes: Vec<u8> = (0..size).map(|i| (i / 4096) as u8).collect();
            let mut filled = vec![0; size];
            // SAFETY: the vector's own memory, which is not used until the value is gone.
            unsafe { Blank::new(filled.as_mut_ptr(), size) }.fill(&bytes);
            assert!(filled == bytes, "{size}");
        }
    }

    #[test]
    fn memory_that_cannot_be_had_is_none() {
        for size in [1 << 60, isize::MAX as usize, usize::MAX] {
            assert!(AlignedBuf::with_capacity(size).is_none());
        }
    }

    #[test]
    #[should_panic(expected = "slice out of bounds")]
    fn a_slice_cannot_leave_its_region() {
        let _ = AlignedBuf::with_capacity(0).unwrap().freeze().slice(0..1);
    }
}
