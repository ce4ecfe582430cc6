//! Shared memory between the two ends of one connection: what this end has lent to its peer, and what the
//! peer has lent to this end.
//!
//! Each end owns a control page of lease words that both map. A lender takes a slot, stores `GRANTED` in its
//! word, and names slot and segment in a message. The reader makes it `TAKEN` when it reads the message and
//! `FREE` when the last view of the memory dies. A lender takes back what was never taken by making a
//! `GRANTED` word `FREE` again. Whoever loses that race of compare-and-swaps leaves the memory alone.
//!
//! # Layout
//! - `control`: the words that both ends map
//! - `admission`: what a word says of a call
//! - `lease`: what a word of theirs says of the memory behind it
//! - `lender`: what this end has lent
//! - `borrower`: what it has been lent
//! - `located`: where such memory lies in this process

mod admission;
mod borrower;
mod control;
mod lease;
mod lender;
mod located;

pub use borrower::{open, snapshot};
pub use control::{AdmissionWord, Control};
pub use lender::{Grants, Placed, are_at_hand, secure};

use super::fds;
use borrower::Foreign;
use control::ADMISSIONS;
use lender::{Lending, reap_orphans};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::Notify;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// The peer has said of a segment whether it has it.
    answered: Notify,
    socket: fds::Sender,
    peer: Peer,
    closed: AtomicBool,
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

impl Exchange {
    pub fn new(control: Control, peer_control: Control, socket: fds::Sender, peer: Peer) -> Arc<Exchange> {
        let exchange = Arc::new(Exchange {
            control: Arc::new(control),
            peer_control: Arc::new(peer_control),
            lending: Mutex::default(),
            admissions: Mutex::new((0..ADMISSIONS).rev().collect()),
            borrowed: Mutex::default(),
            announced: Notify::new(),
            answered: Notify::new(),
            socket,
            peer,
            closed: AtomicBool::new(false),
        });
        lock(&EXCHANGES).push(Arc::downgrade(&exchange));
        exchange
    }

    pub fn greet(&self, record: &fds::Record) -> io::Result<()> {
        self.socket.hello(record, &self.control)
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
        self.leave_lent();
        self.announced.notify_waiters();
        self.answered.notify_waiters();
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
        exchange.collect();
    }
    reap_orphans();
}
