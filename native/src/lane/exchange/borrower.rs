//! What this end has been lent by its peer.

use super::control::{Control, SLOTS, require_fixed_size};
use super::located::Located;
use super::{Exchange, collect_returned, lease, lock};
use crate::error::{Code, Status};
use crate::lane::segment;
use crate::lane::sys::{Mapping, Region};
use crate::metrics::COUNTERS;
use crate::wire::{ALIGNMENT, Envelope, SegmentRef, Slice};
use bytes::Bytes;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};
use std::time::Duration;

/// How long a message may wait for the descriptor of its segment, which travels on another socket.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Private mappings of one segment that are kept for its next message.
const IDLE_MAPPINGS: usize = 2;

/// From this size on the pages of a returned lease are looked through on a thread of their own.
const CLEAN_ON_THREAD: usize = 8 << 20;

/// From this size on the lender is told of a return, so that it gives back in turn what it has passed on. Of smaller
/// segments it takes note when it lends the next time.
const TOLD_FROM: usize = 1 << 20;

/// Segments that a peer may have announced and not forgotten: its own pool's, and as many that it passes on.
const MOST_BORROWED: usize = 1024;

impl Exchange {
    /// The peer announced a segment.
    pub fn add_borrowed(&self, id: u32, size: u64, file: OwnedFd) -> io::Result<()> {
        require_fixed_size(file.as_fd(), size)?;
        if lock(&self.borrowed).len() >= MOST_BORROWED {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "more segments than a peer may lend"));
        }
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let foreign = Foreign { key: segment::next_key(), file, size, idle: Mutex::default() };
        lock(&self.borrowed).insert(id, Arc::new(foreign));
        self.announced.notify_waiters();
        Ok(())
    }

    pub fn forget_borrowed(&self, id: u32) {
        let forgotten = lock(&self.borrowed).remove(&id);
        if forgotten.is_some() {
            drop(forgotten);
            // Whom it was passed on to forgets it too.
            collect_returned();
        }
    }

    async fn open(self: &Arc<Self>, envelope: &mut Envelope) -> Result<(), Status> {
        let mut leases: BTreeMap<u32, Arc<Lease>> = BTreeMap::new();
        let mut bytes = 0;
        for (is_body, named) in std::mem::take(&mut envelope.body_segment)
            .into_iter()
            .map(|named| (true, named))
            .chain(std::mem::take(&mut envelope.segments).into_iter().map(|named| (false, named)))
        {
            let lease = match leases.get(&named.slot) {
                Some(lease) => Arc::clone(lease),
                None => {
                    let lease = self.take(&named).await?;
                    leases.insert(named.slot, Arc::clone(&lease));
                    lease
                }
            };
            let whole = Region::of_mapping(Arc::clone(&lease));
            for (offset, length) in named.ranges {
                let end = offset.checked_add(length).filter(|end| *end <= lease.segment.size as u64);
                let Some(end) = end else {
                    return Err(Status::new(Code::INVALID_ARGUMENT, "a range lies outside of its segment"));
                };
                let region = whole.slice(offset as usize..end as usize);
                bytes += region.len();
                if is_body {
                    envelope.body = Slice::Region(region);
                } else {
                    envelope.buffers.push(region);
                }
            }
        }
        envelope.size += bytes;
        COUNTERS.shm_messages_received.increment();
        COUNTERS.shm_bytes_received.add(bytes);
        Ok(())
    }

    async fn take(self: &Arc<Self>, named: &SegmentRef) -> Result<Arc<Lease>, Status> {
        let segment = tokio::time::timeout(DESCRIPTOR_TIMEOUT, self.borrowed(named.id)).await;
        let Ok(Some(segment)) = segment else {
            return Err(Status::unavailable("shared memory that a message names was not passed on"));
        };
        if named.slot >= SLOTS {
            return Err(Status::new(Code::INVALID_ARGUMENT, "there is no such lease"));
        }
        let mapping = segment.mapping().map_err(|error| no_mapping(&error))?;
        if !lease::take(self.peer_control.lease(named.slot)) {
            return Err(Status::unavailable("the memory of a message was taken back"));
        }
        let lease = Arc::new(Lease {
            segment,
            mapping: Some(mapping),
            exchange: Arc::downgrade(self),
            control: Arc::clone(&self.peer_control),
            slot: named.slot,
        });
        LEASED.insert(&lease);
        Ok(lease)
    }

    async fn borrowed(&self, id: u32) -> Option<Arc<Foreign>> {
        loop {
            let announced = self.announced.notified();
            if let Some(segment) = lock(&self.borrowed).get(&id) {
                return Some(Arc::clone(segment));
            }
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            announced.await;
        }
    }
}

fn no_mapping(error: &io::Error) -> Status {
    let code = match error.kind() {
        io::ErrorKind::OutOfMemory => Code::RESOURCE_EXHAUSTED,
        _ => Code::UNAVAILABLE,
    };
    Status::new(code, format!("shared memory: {error}"))
}

/// Puts the memory that a message names in the place of its body and buffers.
pub async fn open(exchange: Option<&Arc<Exchange>>, envelope: &mut Envelope) -> Result<(), Status> {
    if envelope.body_segment.is_none() && envelope.segments.is_empty() {
        return Ok(());
    }
    match exchange {
        Some(exchange) => exchange.open(envelope).await,
        None => Err(Status::new(Code::INVALID_ARGUMENT, "the message names shared memory, which was not agreed on")),
    }
}

/// A segment of a peer.
#[derive(Debug)]
pub(super) struct Foreign {
    pub(super) key: u64,
    pub(super) file: OwnedFd,
    pub(super) size: usize,
    /// Private mappings without a lease, clean. Each lease has one for itself: what user code writes to
    /// one message must not show in another.
    idle: Mutex<Vec<Mapping>>,
}

impl Foreign {
    fn mapping(&self) -> io::Result<Mapping> {
        if let Some(mapping) = lock(&self.idle).pop() {
            return Ok(mapping);
        }
        Mapping::private(self.file.as_fd(), self.size)
    }

    fn put_back(&self, mapping: Mapping) {
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE_MAPPINGS {
            idle.push(mapping);
        }
    }
}

/// The right to read a peer's segment. Given back when the last view of it dies.
#[derive(Debug)]
pub struct Lease {
    pub(super) segment: Arc<Foreign>,
    mapping: Option<Mapping>,
    exchange: Weak<Exchange>,
    control: Arc<Control>,
    slot: u32,
}

static LEASED: Located<Lease> = Located::new();

impl Lease {
    pub(super) fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("taken only when dropped")
    }
}

impl AsRef<Mapping> for Lease {
    fn as_ref(&self) -> &Mapping {
        self.mapping()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        LEASED.remove(&mapping);
        let (segment, control, slot) = (Arc::clone(&self.segment), Arc::clone(&self.control), self.slot);
        let exchange = Weak::clone(&self.exchange);
        let give_back = move || {
            let clean = is_clean(mapping.address(), mapping.len()) || mapping.forget_writes().is_ok();
            let is_large = segment.size >= TOLD_FROM;
            if clean {
                segment.put_back(mapping);
            }
            lease::give_back(control.lease(slot));
            if is_large && let Some(exchange) = exchange.upgrade() {
                exchange.tell_returned(slot);
            }
        };
        if self.segment.size < CLEAN_ON_THREAD {
            give_back();
        } else {
            crate::runtime::handle().spawn_blocking(give_back);
        }
    }
}

/// What a peer wrote, for as long as it is lent: in a mapping of its own, to which nobody writes. User code has the
/// lease's.
#[derive(Debug)]
struct Snapshot {
    lease: Arc<Lease>,
    mapping: Mapping,
}

static SNAPSHOTS: Located<Snapshot> = Located::new();

impl AsRef<Mapping> for Snapshot {
    fn as_ref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        SNAPSHOTS.remove(&self.mapping);
    }
}

/// The same bytes where user code cannot reach them, without a copy. None when they do not lie in leased memory, when
/// somebody wrote to them, or when a copy costs less.
pub fn snapshot(bytes: &[u8]) -> Option<Region> {
    if bytes.len() < SNAPSHOT_FROM || !is_forwardable(bytes) {
        return None;
    }
    let lease = LEASED.of(bytes)?;
    let offset = lease.mapping().offset_of(bytes);
    if !is_clean(bytes.as_ptr().addr(), bytes.len()) {
        return None;
    }
    let mapping = Mapping::private(lease.segment.file.as_fd(), lease.segment.size).ok()?;
    let snapshot = Arc::new(Snapshot { lease, mapping });
    SNAPSHOTS.insert(&snapshot);
    Some(Region::of_mapping(snapshot).slice(offset..offset + bytes.len()))
}

pub(super) fn is_snapshot(bytes: &[u8]) -> bool {
    SNAPSHOTS.of(bytes).is_some()
}

/// Bytes in leased memory that can be lent again.
pub(super) struct Loan {
    pub(super) lease: Arc<Lease>,
    pub(super) offset: usize,
}

impl Loan {
    fn of(bytes: &[u8]) -> Option<Loan> {
        if !is_forwardable(bytes) {
            return None;
        }
        if let Some(snapshot) = SNAPSHOTS.of(bytes) {
            return Some(Loan { lease: Arc::clone(&snapshot.lease), offset: snapshot.mapping.offset_of(bytes) });
        }
        let lease = LEASED.of(bytes).filter(|_| is_clean(bytes.as_ptr().addr(), bytes.len()))?;
        let offset = lease.mapping().offset_of(bytes);
        Some(Loan { lease, offset })
    }
}

/// The buffers that can be passed on where they lie: those in leased memory to which nobody wrote.
pub(super) fn forwardable(buffers: &[Bytes]) -> Vec<Option<Loan>> {
    let mut ranges: Vec<(u64, Range<usize>)> = Vec::new();
    buffers
        .iter()
        .map(|buffer| {
            let loan = Loan::of(buffer)?;
            let (key, range) = (loan.lease.segment.key, loan.offset..loan.offset + buffer.len());
            // Two buffers over the same bytes become two copies, as they would by the socket.
            let apart = |(other, bytes): &(u64, Range<usize>)| {
                *other != key || range.end <= bytes.start || bytes.end <= range.start
            };
            if !ranges.iter().all(apart) {
                return None;
            }
            ranges.push((key, range));
            Some(loan)
        })
        .collect()
}

fn is_forwardable(bytes: &[u8]) -> bool {
    bytes.len() >= FORWARD_FROM && bytes.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// Smaller buffers are cheaper to copy.
const FORWARD_FROM: usize = 64 << 10;

/// As above, for a copy that is made at once into memory that is at hand: 500 KB were 5 to 15 % slower with a snapshot,
/// 2 MB 20 to 45 % faster (whole calls, paired runs).
const SNAPSHOT_FROM: usize = 1 << 20;

const PAGE: usize = 4096;

/// Whether the pages of a private file mapping still are the file's. /proc/self/pagemap tells: bit 63, the
/// page is present; bit 62, it is swapped (only private copies are); bit 61, it is the file's.
fn is_clean(start: usize, length: usize) -> bool {
    static PAGEMAP: LazyLock<Option<File>> = LazyLock::new(|| File::open("/proc/self/pagemap").ok());
    static FORKED: OnceLock<u64> = OnceLock::new();
    // A forked child would look at its parent's pages.
    if *FORKED.get_or_init(crate::runtime::generation) != crate::runtime::generation() {
        return false;
    }
    let Some(pagemap) = PAGEMAP.as_ref() else { return false };
    let (first, last) = (start / PAGE, (start + length).div_ceil(PAGE));
    let mut entries = [0_u8; 8 * 512];
    let mut page = first;
    while page < last {
        let wanted = (last - page).min(512) * 8;
        if pagemap.read_exact_at(&mut entries[..wanted], page as u64 * 8).is_err() {
            return false;
        }
        let copied = entries[..wanted].chunks_exact(8).any(|entry| {
            let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
            entry >> 62 & 1 == 1 || entry >> 63 == 1 && entry >> 61 & 1 == 0
        });
        if copied {
            return false;
        }
        page += 512;
    }
    true
}
