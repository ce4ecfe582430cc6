//! What this end has lent to its peer.

use super::borrower::{Foreign, Lease, Loan, forwardable, is_snapshot, snapshot};
use super::control::{Control, SLOTS};
use super::located::Located;
use super::{Exchange, Peer, collect_returned, lease, lock};
use crate::lane::placement::SHM_FROM;
use crate::lane::segment::{self, Hold, Segment};
use crate::lane::sys::{AlignedBuf, Mapping, Region};
use crate::metrics::COUNTERS;
use crate::wire::{ALIGNMENT, SegmentRef};
use bytes::Bytes;
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

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

/// Own memory that was written before it was known to whom it will be lent.
struct Own {
    hold: Arc<Hold>,
}

static OWN: Located<Own> = Located::new();

impl Own {
    fn of(bytes: &[u8]) -> Option<(Source, usize)> {
        let own = OWN.of(bytes)?;
        Some((Source::Own(Arc::clone(&own.hold)), own.hold.segment().memory.offset_of(bytes)))
    }
}

impl AsRef<Mapping> for Own {
    fn as_ref(&self) -> &Mapping {
        &self.hold.segment().memory
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        OWN.remove(self.as_ref());
    }
}

/// The same bytes where nobody changes them: in memory that can be lent to any number of peers, if there is some.
/// What a peer lent is not copied, all else is, with up to two threads. None when there is no memory.
pub fn secure(bytes: Bytes) -> Option<Region> {
    let snapshot = snapshot(&bytes);
    if snapshot.is_some() {
        return snapshot;
    }
    let length = bytes.len();
    let hold = if length >= SHM_FROM && segment::pool().is_enabled() { take_segment(length) } else { None };
    let Some(hold) = hold else {
        let mut copy = AlignedBuf::with_capacity(length)?;
        copy.extend(&bytes);
        return Some(copy.freeze());
    };
    copy_all(&hold.segment().memory, &[(0, bytes)]);
    COUNTERS.shm_bytes_sent.add(length);
    let own = Arc::new(Own { hold: Arc::new(hold) });
    OWN.insert(&own);
    Some(Region::of_mapping(own).slice(0..length))
}

/// The buffers that can be lent where they lie, and at which offset.
fn lendable(buffers: &[Bytes]) -> Vec<Option<(Source, usize)>> {
    buffers
        .iter()
        .zip(forwardable(buffers))
        .map(|(buffer, loan)| {
            let found = match loan {
                Some(Loan { lease, offset }) => (Source::Foreign(lease), offset),
                None => Own::of(buffer)?,
            };
            COUNTERS.shm_bytes_forwarded.add(buffer.len());
            Some(found)
        })
        .collect()
}

/// Whether lending these takes neither a copy nor a look at their pages.
pub fn are_at_hand(buffers: &[Bytes]) -> bool {
    buffers.iter().all(|buffer| OWN.of(buffer).is_some() || is_snapshot(buffer))
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
            let lent = lease::is_lent(exchange.control.lease(*slot));
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
                lease::take_back(exchange.control.lease(*slot));
            }
        }
    }
}

/// A segment of this process, or one that a peer lent it.
trait Memory: Debug + Send + Sync {}
impl Memory for Segment {}
impl Memory for Foreign {}

/// A segment whose descriptor was sent.
#[derive(Clone, Copy, Debug)]
struct Announced {
    id: u32,
    has: Answer,
}

/// Whether the peer has a segment. One that is at its limit of descriptors does not get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Yes,
    No,
    NotYet,
}

/// How long a message waits for the answer. Beyond, it goes by the socket.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Lending {
    grants: HashMap<u32, Grant>,
    next_slot: u32,
    /// Key of a segment -> what the peer was told of it.
    announced: HashMap<u64, Announced>,
    /// What was announced, own and passed on, to tell the peer when it is gone.
    alive: Vec<(u64, Weak<dyn Memory>)>,
    next_id: u32,
}

/// Placed buffers of one message: what the message says of them, and the grants behind it.
#[derive(Debug, Default)]
pub struct Placed {
    pub body: Option<SegmentRef>,
    pub buffers: Vec<SegmentRef>,
    pub grants: Grants,
    /// Segments that the peer may not have: see `has_confirmed`.
    pub unconfirmed: Vec<u32>,
    /// Copied into shared memory.
    pub bytes: usize,
    may_wait: bool,
}

impl Exchange {
    /// Lends `body` (when it is given) and `buffers` to the peer. None when there is no room for them: the
    /// message goes by the socket then. Copies with up to two threads: call it where blocking is allowed.
    /// Unless the message `may_wait` for the peer's answer, only segments that the peer has are lent.
    pub fn place(self: &Arc<Self>, body: Option<&[Bytes]>, buffers: &[Bytes], may_wait: bool) -> Option<Placed> {
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let grants = Grants { slots: Vec::new(), exchange: Arc::downgrade(self) };
        let mut placed = Placed { grants, may_wait, ..Placed::default() };
        let mut lendable = lendable(buffers);
        let copied: usize = buffers
            .iter()
            .zip(&lendable)
            .filter(|(_, source)| source.is_none())
            .map(|(buffer, _)| buffer.len().next_multiple_of(ALIGNMENT))
            .sum();
        let own_body = match body {
            Some([part]) => Own::of(part),
            _ => None,
        };
        let copied_body = body.filter(|_| own_body.is_none());
        let body_bytes: usize = body.map_or(0, |parts| parts.iter().map(Bytes::len).sum());
        let total = copied + copied_body.map_or(0, |_| body_bytes.next_multiple_of(ALIGNMENT));
        let copies_any = copied_body.is_some() || lendable.iter().any(Option::is_none);
        let hold = if copies_any { Some(Arc::new(take_segment(total)?)) } else { None };
        let mut at = 0;
        let mut copies: Vec<(usize, Bytes)> = Vec::new();
        if let (Some(parts), Some(hold)) = (copied_body, &hold) {
            let lent = self.lend(Source::Own(Arc::clone(hold)), total, &mut placed)?;
            for part in parts {
                copies.push((at, part.clone()));
                at += part.len();
            }
            placed.body = Some(SegmentRef { ranges: vec![(0, body_bytes as u64)], ..lent });
            at = at.next_multiple_of(ALIGNMENT);
        }
        if let Some((source, offset)) = own_body {
            let lent = self.lend(source, body_bytes, &mut placed)?;
            placed.body = Some(SegmentRef { ranges: vec![(offset as u64, body_bytes as u64)], ..lent });
        }
        for (buffer, lendable) in buffers.iter().zip(&mut lendable) {
            let (source, offset) = match lendable.take() {
                Some(found) => found,
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
        placed.bytes = at;
        Some(placed)
    }

    /// Adds a range to the last segment named, or names another one.
    fn add_range(self: &Arc<Self>, source: Source, range: (u64, u64), total: usize, placed: &mut Placed) -> Option<()> {
        let known = {
            let lending = lock(&self.lending);
            let id = lending.announced.get(&source.key()).map(|announced| announced.id);
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
                let lent = self.lend(source, total, placed)?;
                placed.buffers.push(SegmentRef { ranges: vec![range], ..lent });
            }
        }
        Some(())
    }

    fn lend(&self, source: Source, bytes: usize, placed: &mut Placed) -> Option<SegmentRef> {
        let mut lending = lock(&self.lending);
        self.reap(&mut lending);
        let slot = (0..SLOTS)
            .map(|step| (lending.next_slot + step) % SLOTS)
            .find(|slot| !lending.grants.contains_key(slot))?;
        lending.next_slot = (slot + 1) % SLOTS;
        let Announced { id, has } = self.announce(&mut lending, &source)?;
        match has {
            Answer::Yes => {}
            Answer::NotYet if placed.may_wait => placed.unconfirmed.push(id),
            _ => return None,
        }
        lease::grant(self.control.lease(slot));
        lending.grants.insert(slot, Grant { slot, source, bytes, stream: 0 });
        placed.grants.slots.push(slot);
        Some(SegmentRef { id, slot, ranges: Vec::new() })
    }

    /// What the peer knows of a segment. The descriptor is sent once.
    fn announce(&self, lending: &mut Lending, source: &Source) -> Option<Announced> {
        let key = source.key();
        if let Some(announced) = lending.announced.get(&key) {
            return Some(*announced);
        }
        let announced = Announced { id: lending.next_id, has: Answer::NotYet };
        self.socket.segment(announced.id, source.size() as u64, source.file()).ok()?;
        lending.next_id += 1;
        lending.announced.insert(key, announced);
        let memory: Weak<dyn Memory> = match source {
            Source::Own(hold) => Arc::<Segment>::downgrade(hold.segment()),
            Source::Foreign(lease) => Arc::<Foreign>::downgrade(&lease.segment),
        };
        lending.alive.push((key, memory));
        Some(announced)
    }

    /// The peer says whether it got the segment that it was told of by this id.
    pub fn answered(&self, id: u32, has: bool) {
        let mut lending = lock(&self.lending);
        if let Some(announced) = lending.announced.values_mut().find(|announced| announced.id == id) {
            announced.has = if has { Answer::Yes } else { Answer::No };
        }
        drop(lending);
        self.answered.notify_waiters();
    }

    /// Whether the peer has all these segments, as soon as it has said so.
    pub async fn has_confirmed(&self, ids: &[u32]) -> bool {
        if ids.is_empty() {
            return true;
        }
        let all = async {
            loop {
                let answered = self.answered.notified();
                if !self.is_open() {
                    return false;
                }
                match self.answer_of(ids) {
                    Answer::Yes => return true,
                    Answer::No => return false,
                    Answer::NotYet => answered.await,
                }
            }
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, all).await {
            Ok(has) => has,
            Err(_) => {
                self.expect_no_answer(ids);
                false
            }
        }
    }

    /// No other message waits for it. One that comes late counts all the same.
    fn expect_no_answer(&self, ids: &[u32]) {
        let mut lending = lock(&self.lending);
        for announced in lending.announced.values_mut() {
            if announced.has == Answer::NotYet && ids.contains(&announced.id) {
                announced.has = Answer::No;
            }
        }
    }

    fn answer_of(&self, ids: &[u32]) -> Answer {
        let lending = lock(&self.lending);
        let asked = || lending.announced.values().filter(|announced| ids.contains(&announced.id));
        if asked().any(|announced| announced.has == Answer::No) {
            Answer::No
        } else if asked().all(|announced| announced.has == Answer::Yes) {
            Answer::Yes
        } else {
            Answer::NotYet
        }
    }

    /// Tells the peer whether this end has the segment.
    pub fn answer(&self, id: u32, has: bool) {
        let _ = self.socket.answer(id, has);
    }

    /// Forgets what the peer gave back, and tells it which segments are gone.
    pub(super) fn reap(&self, lending: &mut Lending) {
        lending.grants.retain(|slot, _| lease::is_lent(self.control.lease(*slot)));
        let Lending { alive, announced, .. } = lending;
        alive.retain(|(key, memory)| {
            let lives = memory.strong_count() > 0;
            if !lives && let Some(announced) = announced.remove(key) {
                // If it does not go out, the peer keeps a mapping until the connection ends.
                let _ = self.socket.forget(announced.id);
            }
            lives
        });
    }

    /// The peer will not read what was lent with this response and not taken yet.
    pub fn take_back(&self, stream: u32) {
        let mut lending = lock(&self.lending);
        for grant in lending.grants.values().filter(|grant| grant.stream == stream) {
            lease::take_back(self.control.lease(grant.slot));
        }
        self.reap(&mut lending);
    }

    /// Forgets what the peer gave back.
    pub fn collect(&self) {
        self.reap(&mut lock(&self.lending));
    }

    /// Tells the peer that it may collect.
    pub(super) fn tell_returned(&self, slot: u32) {
        let _ = self.socket.returned(slot);
    }

    /// Tells the peer that nobody reads the response on this stream any more.
    pub fn abandon(&self, stream: u32) {
        let _ = self.socket.abandon(stream);
    }

    /// The connection has ended: what the peer has taken is not used again while it may read it.
    pub(super) fn leave_lent(&self) {
        let grants = std::mem::take(&mut lock(&self.lending).grants);
        let lent: Vec<Grant> = grants
            .into_values()
            .filter(|grant| {
                !lease::take_back(self.control.lease(grant.slot)) && lease::is_lent(self.control.lease(grant.slot))
            })
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
    }
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

pub(super) fn reap_orphans() {
    let mut returned = Vec::new();
    lock(&ORPHANS).retain_mut(|orphan| {
        let gone = orphan.peer.is_gone();
        let still_lent = |grant: &Grant| !gone && lease::is_lent(orphan.control.lease(grant.slot));
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
