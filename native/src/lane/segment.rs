//! This process's own shared memory: memory files that are kept, already faulted in, for one message after
//! the other.

use super::shortage::{self, Cause};
use super::sys::Mapping;
use crate::metrics::COUNTERS;
use crate::runtime;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Smallest segment, bytes.
const SMALLEST: usize = 128 << 10;
/// Each segment costs a file descriptor here and at each peer.
const MOST_SEGMENTS: usize = 512;
/// A segment that was not used for this long is given back to the system.
const IDLE: Duration = Duration::from_secs(60);
const TRIM_INTERVAL: Duration = Duration::from_secs(5);

/// Larger segments are made for the very message that needs one. A smaller message goes by the socket meanwhile.
pub const MADE_AT_ONCE_FROM: usize = 1 << 20;

/// What peers may do with a segment: map it and read it. They can neither resize it nor write to it.
fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

/// A key that no other segment of this process has or had.
pub fn next_key() -> u64 {
    NEXT_KEY.fetch_add(1, Ordering::Relaxed)
}

#[derive(Debug)]
pub struct Segment {
    pub key: u64,
    pub memory: Mapping,
    file: OwnedFd,
}

impl Segment {
    /// Its pages are cold: the first one to touch them pays 0.65 ms per MB.
    fn new(size: usize) -> io::Result<Segment> {
        let file = memfd_create("ray_serve_grpc", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, size as u64)?;
        let memory = Mapping::shared(file.as_fd(), size)?;
        fcntl_add_seals(&file, seals())?;
        Ok(Segment { key: next_key(), memory, file })
    }

    fn warm(size: usize) -> io::Result<Segment> {
        let segment = Segment::new(size)?;
        for page in (0..size).step_by(4096) {
            segment.memory.write(page, &[0]);
        }
        Ok(segment)
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The right to write to a segment, and then to lend it. Given back to the pool when dropped.
#[derive(Debug)]
pub struct Hold {
    segment: Option<Arc<Segment>>,
    pool: &'static Pool,
    /// Set when a peer was lost while it may still have been reading.
    tainted: AtomicBool,
}

impl Hold {
    pub fn segment(&self) -> &Arc<Segment> {
        self.segment.as_ref().expect("taken only when dropped")
    }

    /// The segment is not used again: somebody may read it for ever.
    pub fn taint(&self) {
        self.tainted.store(true, Ordering::Release);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.take() {
            self.pool.put_back(segment, self.tainted.load(Ordering::Acquire));
        }
    }
}

#[derive(Debug)]
pub struct Pool {
    limit: AtomicUsize,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Size -> free segments, the most recently used last.
    free: BTreeMap<usize, Vec<(Instant, Arc<Segment>)>>,
    /// Bytes and segments in existence, those being made included.
    bytes: usize,
    segments: usize,
    /// Segments being made, by size.
    coming: BTreeMap<usize, usize>,
    /// Whether a task looks for idle segments.
    trimming: bool,
    generation: u64,
}

impl Inner {
    fn give_up(&mut self, class: usize, error: &io::Error) {
        self.bytes -= class;
        self.segments -= 1;
        shortage::tell_of(error);
    }
}

static POOL: Pool = Pool {
    limit: AtomicUsize::new(0),
    inner: Mutex::new(Inner {
        free: BTreeMap::new(),
        bytes: 0,
        segments: 0,
        coming: BTreeMap::new(),
        trimming: false,
        generation: 0,
    }),
};

pub fn pool() -> &'static Pool {
    &POOL
}

/// From this size on memory counts more than that sizes are few.
const LARGE: usize = 32 << 20;
const LARGE_STEP: usize = 4 << 20;

/// Sizes are powers of two and one and a half times those; large ones are multiples of 4 MiB.
fn class(size: usize) -> usize {
    if size > LARGE {
        return size.next_multiple_of(LARGE_STEP);
    }
    let power = size.max(SMALLEST).next_power_of_two();
    let between = power / 4 * 3;
    if between >= size && between >= SMALLEST { between } else { power }
}

/// What there is of it.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub bytes: usize,
    pub segments: usize,
    /// Segments that wait for a message.
    pub free: usize,
    /// Segments that are being written to or are lent.
    pub leased: usize,
}

impl Pool {
    /// Bytes that all segments of this process may have together. Zero: there are none.
    pub fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    pub fn is_enabled(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// A warm segment of at least `size` bytes, if there is one.
    pub fn take_warm(&'static self, size: usize) -> Option<Hold> {
        let class = class(size);
        let mut inner = self.lock();
        // One that is somewhat larger wastes nothing but its idle pages.
        let fitting = inner.free.range_mut(class..=class.saturating_mul(2)).find_map(|(_, free)| free.pop());
        let (_, segment) = fitting?;
        Some(self.hold(segment))
    }

    /// As `take_warm`; if there is none, a large one is made here, and a small one for the next time.
    pub fn take(&'static self, size: usize) -> Option<Hold> {
        let hold = self.take_warm(size);
        if hold.is_some() {
            return hold;
        }
        let hold = if size > MADE_AT_ONCE_FROM { self.make(class(size)) } else { self.make_for_later(class(size)) };
        if hold.is_none() {
            COUNTERS.shm_fallbacks.increment();
        }
        hold
    }

    fn hold(&'static self, segment: Arc<Segment>) -> Hold {
        Hold { segment: Some(segment), pool: self, tainted: AtomicBool::new(false) }
    }

    fn make(&'static self, class: usize) -> Option<Hold> {
        if !self.reserve(&mut self.lock(), class) {
            return None;
        }
        match Segment::new(class) {
            Ok(segment) => Some(self.hold(Arc::new(segment))),
            Err(error) => {
                self.lock().give_up(class, &error);
                None
            }
        }
    }

    fn make_for_later(&'static self, class: usize) -> Option<Hold> {
        let mut inner = self.lock();
        // Two at a time per size: the next miss asks again.
        if inner.coming.get(&class).is_some_and(|coming| *coming >= 2) || !self.reserve(&mut inner, class) {
            return None;
        }
        *inner.coming.entry(class).or_default() += 1;
        runtime::handle().spawn_blocking(move || {
            let made = Segment::warm(class);
            let mut inner = self.lock();
            if let Some(coming) = inner.coming.get_mut(&class) {
                *coming -= 1;
            }
            match made {
                Ok(segment) => inner.free.entry(class).or_default().push((Instant::now(), Arc::new(segment))),
                Err(error) => inner.give_up(class, &error),
            }
        });
        None
    }

    /// Counts one in that is about to be made. False when there is no room for it.
    fn reserve(&'static self, inner: &mut Inner, class: usize) -> bool {
        if !self.make_room(inner, class) {
            shortage::tell(self.full(inner));
            return false;
        }
        inner.bytes += class;
        inner.segments += 1;
        if !inner.trimming {
            inner.trimming = true;
            runtime::handle().spawn(self.trim_while_used());
        }
        true
    }

    /// Frees the segments that were unused for the longest time until another of `class` bytes fits.
    fn make_room(&self, inner: &mut Inner, class: usize) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        while inner.bytes + class > limit || inner.segments >= MOST_SEGMENTS {
            let oldest =
                inner.free.iter().filter_map(|(size, free)| free.first().map(|(used, _)| (*used, *size))).min();
            let Some((_, size)) = oldest else { return false };
            if let Some(free) = inner.free.get_mut(&size) {
                free.remove(0);
                inner.bytes -= size;
                inner.segments -= 1;
                COUNTERS.shm_trimmed.increment();
            }
        }
        true
    }

    /// Why `make_room` found none.
    fn full(&self, inner: &Inner) -> Cause {
        match inner.segments {
            MOST_SEGMENTS.. => Cause::Count(MOST_SEGMENTS),
            _ => Cause::Cap(self.limit.load(Ordering::Relaxed)),
        }
    }

    fn put_back(&self, segment: Arc<Segment>, tainted: bool) {
        let mut inner = self.lock();
        let size = segment.memory.len();
        if tainted {
            inner.bytes -= size;
            inner.segments -= 1;
            return;
        }
        inner.free.entry(size).or_default().push((Instant::now(), segment));
    }

    async fn trim_while_used(&'static self) {
        loop {
            tokio::time::sleep(TRIM_INTERVAL).await;
            super::exchange::collect_returned();
            let mut inner = self.lock();
            let mut trimmed = Vec::new();
            for (size, free) in &mut inner.free {
                let keep = free.iter().position(|(used, _)| used.elapsed() < IDLE).unwrap_or(free.len());
                trimmed.extend(free.drain(..keep).map(|idle| (*size, idle)));
            }
            for (size, _) in &trimmed {
                inner.bytes -= size;
                inner.segments -= 1;
                COUNTERS.shm_trimmed.increment();
            }
            let over = inner.segments == 0;
            inner.trimming = !over;
            drop(inner);
            if !trimmed.is_empty() {
                drop(trimmed);
                // Whoever was lent them is told that they are gone.
                super::exchange::collect_returned();
            }
            if over {
                return;
            }
        }
    }

    pub fn size(&self) -> Size {
        let inner = self.lock();
        let free: usize = inner.free.values().map(Vec::len).sum();
        let coming: usize = inner.coming.values().sum();
        let leased = inner.segments.saturating_sub(free + coming);
        Size { bytes: inner.bytes, segments: inner.segments, free, leased }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let now = runtime::generation();
        if inner.generation != now {
            // A forked child leaves the parent's segments to the parent: both would write to them.
            *inner = Inner {
                free: BTreeMap::new(),
                bytes: 0,
                segments: 0,
                coming: BTreeMap::new(),
                trimming: false,
                generation: now,
            };
        }
        inner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_and_waste_at_most_half() {
        for size in [1, SMALLEST, SMALLEST + 1, 200_000, 1 << 20, (1 << 20) + 64, 10_000_000, 100 << 20] {
            let class = class(size);
            assert!(class >= size && (class <= size * 3 / 2 + 1 || class == SMALLEST), "{size} -> {class}");
        }
    }

    #[test]
    fn a_sealed_segment_refuses_another_writer() {
        let segment = Segment::new(SMALLEST).unwrap();
        assert!(Mapping::shared(segment.file(), SMALLEST).is_err());
        assert!(ftruncate(segment.file(), 0).is_err());
        let reader = Mapping::private(segment.file(), SMALLEST).unwrap();
        reader.write(0, b"mine");
        segment.memory.write(4096, b"ours");
        reader.forget_writes().unwrap();
        assert_eq!(reader.word(0).load(Ordering::Relaxed), 0);
        assert_eq!(reader.word(1024).load(Ordering::Relaxed), u32::from_le_bytes(*b"ours"));
    }
}
