//! Shared memory between the two ends of one connection: what this end has lent to its peer, and what the
//! peer has lent to this end.
//!
//! Each end owns a control page of lease words that both map. A lender takes a slot, stores `GRANTED` in its
//! word, and names slot and segment in a message. The reader makes it `TAKEN` when it reads the message and
//! `FREE` when the last view of the memory dies. A lender takes back what was never taken by making a
//! `GRANTED` word `FREE` again. Whoever loses that race of compare-and-swaps leaves the memory alone.

use super::segment::{self, Hold, Segment};
use super::sys::{Mapping, Region};
use crate::error::{Code, Status};
use crate::metrics::COUNTERS;
use crate::wire::{ALIGNMENT, Envelope, SegmentRef, Slice};
use bytes::Bytes;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::Notify;

/// Lease words of one control page.
const SLOTS: u32 = 1024;
/// Admission words, after the lease words.
const ADMISSIONS: u32 = 4096;
const CONTROL_BYTES: usize = (SLOTS + ADMISSIONS) as usize * 4;

const FREE: u32 = 0;
const GRANTED: u32 = 1;
const TAKEN: u32 = 2;

/// How long a message may wait for the descriptor of its segment, which travels on another socket.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Private mappings of one segment that are kept for its next message.
const IDLE_MAPPINGS: usize = 2;

/// From this size on the pages of a returned lease are looked through on a thread of their own.
const CLEAN_ON_THREAD: usize = 8 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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

    fn change(&self, slot: u32, from: u32, to: u32) -> bool {
        self.words.word(slot as usize).compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn set(&self, slot: u32, value: u32) {
        self.words.word(slot as usize).store(value, Ordering::Release);
    }

    fn value(&self, slot: u32) -> u32 {
        self.words.word(slot as usize).load(Ordering::Acquire)
    }
}

/// A peer's file must hold `size` bytes for ever: touching what it cut off would kill this process.
fn require_fixed_size(file: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    let refused = |text| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return refused("shared memory of a peer is not sealed against shrinking");
    }
    if u64::try_from(fstat(file)?.st_size).unwrap_or(0) < size {
        return refused("shared memory of a peer is smaller than it says");
    }
    Ok(())
}

/// Memory that can be lent to a peer.
#[derive(Clone, Debug)]
enum Source {
    Own(Arc<Hold>),
    /// Lent to this process, and passed on.
    Foreign(Arc<Lease>),
}

impl Source {
    fn key(&self) -> u64 {
        match self {
            Source::Own(hold) => hold.segment().key,
            Source::Foreign(lease) => lease.segment.key,
        }
    }

    fn file(&self) -> BorrowedFd<'_> {
        match self {
            Source::Own(hold) => hold.segment().file(),
            Source::Foreign(lease) => lease.segment.file.as_fd(),
        }
    }

    fn size(&self) -> usize {
        match self {
            Source::Own(hold) => hold.segment().memory.len(),
            Source::Foreign(lease) => lease.segment.size,
        }
    }
}

#[derive(Debug)]
struct Grant {
    slot: u32,
    source: Source,
    bytes: usize,
    /// HTTP/2 stream of the response that it belongs to; 0 for a request.
    stream: u32,
}

/// What was lent with one message or one call; taken back when dropped before the peer took it.
#[derive(Debug, Default)]
pub struct Grants {
    slots: Vec<u32>,
    exchange: Weak<Exchange>,
}

impl Grants {
    /// The peer has the message, or will have it: the lease words tell the rest.
    pub fn settle(mut self) {
        self.slots.clear();
    }

    pub fn append(&mut self, mut other: Grants) {
        self.slots.append(&mut other.slots);
        if self.exchange.strong_count() == 0 {
            self.exchange = std::mem::take(&mut other.exchange);
        }
    }

    /// Says which response it belongs to, for when the peer gives that up.
    pub fn belong_to(&self, stream: u32) {
        let Some(exchange) = self.exchange.upgrade() else { return };
        let mut lending = lock(&exchange.lending);
        for slot in &self.slots {
            if let Some(grant) = lending.grants.get_mut(slot) {
                grant.stream = stream;
            }
        }
    }

    /// Bytes of it that the peer has not given back.
    pub fn outstanding(&mut self) -> usize {
        let Some(exchange) = self.exchange.upgrade() else { return 0 };
        let lending = lock(&exchange.lending);
        let bytes = |slot: &u32| {
            let lent = exchange.control.value(*slot) != FREE;
            lending.grants.get(slot).filter(|_| lent).map(|grant| grant.bytes)
        };
        self.slots.retain(|slot| bytes(slot).is_some());
        self.slots.iter().filter_map(bytes).sum()
    }
}

impl Drop for Grants {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.upgrade() {
            for slot in &self.slots {
                exchange.control.change(*slot, GRANTED, FREE);
            }
        }
    }
}

/// One end of a connection's shared memory.
#[derive(Debug)]
pub struct Exchange {
    control: Arc<Control>,
    peer_control: Arc<Control>,
    lending: Mutex<Lending>,
    /// Admission words that no call uses.
    admissions: Mutex<Vec<u32>>,
    /// Segments that the peer announced, by its id for them.
    borrowed: Mutex<HashMap<u32, Arc<Foreign>>>,
    announced: Notify,
    socket: super::fds::Sender,
    peer: Peer,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Lending {
    grants: HashMap<u32, Grant>,
    next_slot: u32,
    /// Key of a segment -> id under which the peer knows it.
    announced: HashMap<u64, u32>,
    /// Own segments that were announced, to tell the peer when they are gone.
    own: Vec<(u64, Weak<Segment>)>,
    next_id: u32,
}

/// The process at the other end, and when it started: a pid alone may be another's by now.
#[derive(Clone, Debug)]
pub struct Peer {
    pid: u32,
    started: Option<u64>,
}

impl Peer {
    pub fn new(pid: u32) -> Peer {
        Peer { pid, started: start_time(pid) }
    }

    fn is_gone(&self) -> bool {
        self.started.is_some() && start_time(self.pid) != self.started
    }
}

/// Field 22 of /proc/<pid>/stat, in clock ticks since boot. The name before it may hold anything.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Placed buffers of one message: what the message says of them, and the grants behind it.
#[derive(Debug, Default)]
pub struct Placed {
    pub body: Option<SegmentRef>,
    pub buffers: Vec<SegmentRef>,
    pub grants: Grants,
}

impl Exchange {
    pub fn new(control: Control, peer_control: Control, socket: super::fds::Sender, peer: Peer) -> Arc<Exchange> {
        let exchange = Arc::new(Exchange {
            control: Arc::new(control),
            peer_control: Arc::new(peer_control),
            lending: Mutex::default(),
            admissions: Mutex::new((0..ADMISSIONS).rev().collect()),
            borrowed: Mutex::default(),
            announced: Notify::new(),
            socket,
            peer,
            closed: AtomicBool::new(false),
        });
        lock(&EXCHANGES).push(Arc::downgrade(&exchange));
        exchange
    }

    pub fn greet(&self, record: &super::fds::Record) -> io::Result<()> {
        self.socket.hello(record, &self.control)
    }

    /// Lends `body` (when it is given) and `buffers` to the peer. None when there is no room for them: the
    /// message goes by the socket then. Copies with up to two threads: call it where blocking is allowed.
    pub fn place(self: &Arc<Self>, body: Option<&[Bytes]>, buffers: &[Bytes]) -> Option<Placed> {
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let mut placed =
            Placed { grants: Grants { slots: Vec::new(), exchange: Arc::downgrade(self) }, ..Placed::default() };
        let forwarded: Vec<Option<Arc<Lease>>> = forwardable(buffers);
        let copied: usize = buffers
            .iter()
            .zip(&forwarded)
            .filter(|(_, lease)| lease.is_none())
            .map(|(buffer, _)| buffer.len().next_multiple_of(ALIGNMENT))
            .sum();
        let body_bytes: usize = body.map_or(0, |parts| parts.iter().map(Bytes::len).sum());
        let total = copied + body_bytes.next_multiple_of(ALIGNMENT);
        let copies_any = body.is_some() || forwarded.iter().any(Option::is_none);
        let hold = if copies_any { Some(Arc::new(take_segment(total)?)) } else { None };
        let mut at = 0;
        let mut copies: Vec<(usize, Bytes)> = Vec::new();
        if let (Some(parts), Some(hold)) = (body, &hold) {
            let lent = self.lend(Source::Own(Arc::clone(hold)), total, &mut placed.grants)?;
            for part in parts {
                copies.push((at, part.clone()));
                at += part.len();
            }
            placed.body = Some(SegmentRef { ranges: vec![(0, body_bytes as u64)], ..lent });
            at = at.next_multiple_of(ALIGNMENT);
        }
        for (buffer, lease) in buffers.iter().zip(forwarded) {
            let (source, offset) = match lease {
                Some(lease) => {
                    let offset = buffer.as_ptr() as usize - lease.mapping().address();
                    COUNTERS.shm_bytes_forwarded.add(buffer.len());
                    (Source::Foreign(lease), offset)
                }
                None => {
                    copies.push((at, buffer.clone()));
                    let offset = at;
                    at = (at + buffer.len()).next_multiple_of(ALIGNMENT);
                    (Source::Own(Arc::clone(hold.as_ref()?)), offset)
                }
            };
            self.add_range(source, (offset as u64, buffer.len() as u64), total, &mut placed)?;
        }
        if let Some(hold) = &hold {
            copy_all(&hold.segment().memory, &copies);
        }
        COUNTERS.shm_messages_sent.increment();
        COUNTERS.shm_bytes_sent.add(at);
        Some(placed)
    }

    /// Adds a range to the last segment named, or names another one.
    fn add_range(self: &Arc<Self>, source: Source, range: (u64, u64), total: usize, placed: &mut Placed) -> Option<()> {
        let known = {
            let lending = lock(&self.lending);
            let id = lending.announced.get(&source.key()).copied();
            placed
                .buffers
                .last()
                .or(placed.body.as_ref())
                .filter(|last| id == Some(last.id))
                .map(|last| (last.id, last.slot))
        };
        match (known, placed.buffers.last_mut()) {
            (Some((_, slot)), Some(last)) if last.slot == slot => last.ranges.push(range),
            (Some((id, slot)), _) => placed.buffers.push(SegmentRef { id, slot, ranges: vec![range] }),
            (None, _) => {
                let lent = self.lend(source, total, &mut placed.grants)?;
                placed.buffers.push(SegmentRef { ranges: vec![range], ..lent });
            }
        }
        Some(())
    }

    fn lend(&self, source: Source, bytes: usize, grants: &mut Grants) -> Option<SegmentRef> {
        let mut lending = lock(&self.lending);
        self.reap(&mut lending);
        let slot = (0..SLOTS)
            .map(|step| (lending.next_slot + step) % SLOTS)
            .find(|slot| !lending.grants.contains_key(slot))?;
        lending.next_slot = (slot + 1) % SLOTS;
        let id = self.announce(&mut lending, &source)?;
        self.control.set(slot, GRANTED);
        lending.grants.insert(slot, Grant { slot, source, bytes, stream: 0 });
        grants.slots.push(slot);
        Some(SegmentRef { id, slot, ranges: Vec::new() })
    }

    /// Sends the segment's descriptor, once. None when the socket takes no more just now.
    fn announce(&self, lending: &mut Lending, source: &Source) -> Option<u32> {
        let key = source.key();
        if let Some(id) = lending.announced.get(&key) {
            return Some(*id);
        }
        let id = lending.next_id;
        self.socket.segment(id, source.size() as u64, source.file()).ok()?;
        lending.next_id += 1;
        lending.announced.insert(key, id);
        if let Source::Own(hold) = source {
            lending.own.push((key, Arc::downgrade(hold.segment())));
        }
        Some(id)
    }

    /// Forgets what the peer gave back, and tells it which segments are gone.
    fn reap(&self, lending: &mut Lending) {
        lending.grants.retain(|slot, _| self.control.value(*slot) != FREE);
        let Lending { own, announced, .. } = lending;
        own.retain(|(key, segment)| {
            let lives = segment.strong_count() > 0;
            if !lives && let Some(id) = announced.remove(key) {
                // If it does not go out, the peer keeps a mapping until the connection ends.
                let _ = self.socket.forget(id);
            }
            lives
        });
    }

    /// A word in which the peer notes that it took a call; None when all are in use.
    pub fn admission_word(self: &Arc<Self>) -> Option<AdmissionWord> {
        let word = lock(&self.admissions).pop()?;
        self.control.set(SLOTS + word, 0);
        Some(AdmissionWord { exchange: Arc::clone(self), word })
    }

    /// Notes in the peer's word that this end takes the call on `stream`. False when there is no such word.
    pub fn note_admission(&self, named: u32, stream: u32) -> bool {
        match named.checked_sub(1) {
            Some(word) if word < ADMISSIONS => {
                self.peer_control.set(SLOTS + word, stream);
                true
            }
            _ => false,
        }
    }

    /// The peer will not read what was lent with this response and not taken yet.
    pub fn take_back(&self, stream: u32) {
        let mut lending = lock(&self.lending);
        for grant in lending.grants.values().filter(|grant| grant.stream == stream) {
            self.control.change(grant.slot, GRANTED, FREE);
        }
        self.reap(&mut lending);
    }

    /// Tells the peer that nobody reads the response on this stream any more.
    pub fn abandon(&self, stream: u32) {
        let _ = self.socket.abandon(stream);
    }

    pub fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// The connection has ended. What the peer may still be reading is never written to again.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.socket.close();
        let grants = std::mem::take(&mut lock(&self.lending).grants);
        let lent: Vec<Grant> = grants
            .into_values()
            .filter(|grant| !self.control.change(grant.slot, GRANTED, FREE) && self.control.value(grant.slot) != FREE)
            .collect();
        if lent.is_empty() || self.peer.is_gone() {
            return;
        }
        for grant in &lent {
            if let Source::Own(hold) = &grant.source {
                hold.taint();
            }
        }
        lock(&ORPHANS).push(Orphan { peer: self.peer.clone(), control: Arc::clone(&self.control), lent });
        self.announced.notify_waiters();
    }

    /// The peer announced a segment.
    pub fn add_borrowed(&self, id: u32, size: u64, file: OwnedFd) -> io::Result<()> {
        require_fixed_size(file.as_fd(), size)?;
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let foreign = Foreign { key: segment::next_key(), file, size, idle: Mutex::default() };
        lock(&self.borrowed).insert(id, Arc::new(foreign));
        self.announced.notify_waiters();
        Ok(())
    }

    pub fn forget_borrowed(&self, id: u32) {
        lock(&self.borrowed).remove(&id);
    }

    async fn open(&self, envelope: &mut Envelope) -> Result<(), Status> {
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
        Ok(())
    }

    async fn take(&self, named: &SegmentRef) -> Result<Arc<Lease>, Status> {
        let segment = tokio::time::timeout(DESCRIPTOR_TIMEOUT, self.borrowed(named.id)).await;
        let Ok(Some(segment)) = segment else {
            return Err(Status::unavailable("shared memory that a message names was not passed on"));
        };
        if named.slot >= SLOTS {
            return Err(Status::new(Code::INVALID_ARGUMENT, "there is no such lease"));
        }
        let mapping = segment.mapping().map_err(|error| Status::unavailable(format!("shared memory: {error}")))?;
        if !self.peer_control.change(named.slot, GRANTED, TAKEN) {
            return Err(Status::unavailable("the memory of a message was taken back"));
        }
        Ok(Lease::register(segment, mapping, Arc::clone(&self.peer_control), named.slot))
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

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}

/// Every exchange of this process: what one peer gave back may serve another.
static EXCHANGES: Mutex<Vec<Weak<Exchange>>> = Mutex::new(Vec::new());

/// Collects what all peers gave back.
pub fn collect_returned() {
    let exchanges: Vec<Arc<Exchange>> = {
        let mut exchanges = lock(&EXCHANGES);
        exchanges.retain(|exchange| exchange.strong_count() > 0);
        exchanges.iter().filter_map(Weak::upgrade).collect()
    };
    for exchange in exchanges {
        exchange.reap(&mut lock(&exchange.lending));
    }
    reap_orphans();
}

fn take_segment(size: usize) -> Option<Hold> {
    if let Some(hold) = segment::pool().take_warm(size) {
        return Some(hold);
    }
    collect_returned();
    segment::pool().take(size)
}

/// Memory lent to peers whose connection was lost, but which live: they may still read it.
static ORPHANS: Mutex<Vec<Orphan>> = Mutex::new(Vec::new());

struct Orphan {
    peer: Peer,
    control: Arc<Control>,
    lent: Vec<Grant>,
}

fn reap_orphans() {
    let mut returned = Vec::new();
    lock(&ORPHANS).retain_mut(|orphan| {
        let gone = orphan.peer.is_gone();
        let still_lent = |grant: &Grant| !gone && orphan.control.value(grant.slot) != FREE;
        let (kept, back) = std::mem::take(&mut orphan.lent).into_iter().partition(still_lent);
        orphan.lent = kept;
        returned.push(back);
        !orphan.lent.is_empty()
    });
    // Dropping what came back takes other locks.
    drop::<Vec<Vec<Grant>>>(returned);
}

/// Runs the copies of one message: on two threads when they are large.
fn copy_all(memory: &Mapping, copies: &[(usize, Bytes)]) {
    const SPLIT_FROM: usize = 8 << 20;
    let total: usize = copies.iter().map(|(_, bytes)| bytes.len()).sum();
    if total < SPLIT_FROM {
        for (offset, bytes) in copies {
            memory.write(*offset, bytes);
        }
        return;
    }
    std::thread::scope(|scope| {
        let second = scope.spawn(|| copy_part(memory, copies, total / 2, total));
        copy_part(memory, copies, 0, total / 2);
        second.join().expect("copying does not panic");
    });
}

/// Copies the bytes `from..to` of all copies taken together.
fn copy_part(memory: &Mapping, copies: &[(usize, Bytes)], from: usize, to: usize) {
    let mut passed = 0;
    for (offset, bytes) in copies {
        let start = from.saturating_sub(passed).min(bytes.len());
        let end = to.saturating_sub(passed).min(bytes.len());
        if start < end {
            memory.write(offset + start, &bytes[start..end]);
        }
        passed += bytes.len();
    }
}

/// A segment of a peer.
#[derive(Debug)]
struct Foreign {
    key: u64,
    file: OwnedFd,
    size: usize,
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
    segment: Arc<Foreign>,
    mapping: Option<Mapping>,
    control: Arc<Control>,
    slot: u32,
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
        self.exchange.control.value(SLOTS + self.word) == stream
    }
}

impl Drop for AdmissionWord {
    fn drop(&mut self) {
        lock(&self.exchange.admissions).push(self.word);
    }
}

/// Where leased memory lies in this process: how a buffer to send is known for one that was received.
static LEASED: Mutex<BTreeMap<usize, (usize, Weak<Lease>)>> = Mutex::new(BTreeMap::new());

impl Lease {
    fn register(segment: Arc<Foreign>, mapping: Mapping, control: Arc<Control>, slot: u32) -> Arc<Lease> {
        let (start, length) = (mapping.address(), mapping.len());
        let lease = Arc::new(Lease { segment, mapping: Some(mapping), control, slot });
        lock(&LEASED).insert(start, (length, Arc::downgrade(&lease)));
        lease
    }

    fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("taken only when dropped")
    }

    /// The lease whose memory holds all of `bytes`.
    fn of(bytes: &[u8]) -> Option<Arc<Lease>> {
        let (start, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
        let leased = lock(&LEASED);
        let (from, (length, lease)) = leased.range(..=start).next_back()?;
        if end > from + length {
            return None;
        }
        lease.upgrade()
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
        lock(&LEASED).remove(&mapping.address());
        let (segment, control, slot) = (Arc::clone(&self.segment), Arc::clone(&self.control), self.slot);
        let give_back = move || {
            let clean = is_clean(mapping.address(), mapping.len()) || mapping.forget_writes().is_ok();
            if clean {
                segment.put_back(mapping);
            }
            control.set(slot, FREE);
        };
        if self.segment.size < CLEAN_ON_THREAD {
            give_back();
        } else {
            crate::runtime::handle().spawn_blocking(give_back);
        }
    }
}

/// The buffers that can be passed on where they lie: those in leased memory to which nobody wrote.
fn forwardable(buffers: &[Bytes]) -> Vec<Option<Arc<Lease>>> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    buffers
        .iter()
        .map(|buffer| {
            if buffer.len() < FORWARD_FROM {
                return None;
            }
            let lease = Lease::of(buffer)?;
            let (start, end) = (buffer.as_ptr() as usize, buffer.as_ptr() as usize + buffer.len());
            // Two buffers over the same bytes become two copies, as they would by the socket.
            let apart = ranges.iter().all(|(from, to)| end <= *from || *to <= start);
            if start % ALIGNMENT != 0 || !apart || !is_clean(start, buffer.len()) {
                return None;
            }
            ranges.push((start, end));
            Some(lease)
        })
        .collect()
}

/// Smaller buffers are cheaper to copy.
const FORWARD_FROM: usize = 64 << 10;

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
