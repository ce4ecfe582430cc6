//! What the two sides of a client's call share: the task that runs it and whoever waits for it.

use crate::error::Status;
use crate::lane::Lane;
use crate::metrics::COUNTERS;
use crate::signal::Waiter;
use crate::wire::Envelope;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// Received bytes and messages that may wait to be taken; beyond either the stream is read no further, and
/// HTTP/2's window holds the writer back.
const QUEUE_BYTES: usize = 4 << 20;
pub const QUEUE_MESSAGES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    pub accepted: bool,
    pub num_ongoing_requests: u32,
}

#[derive(Default)]
pub struct CallState {
    inner: Mutex<Inner>,
    /// For threads that wait without an event loop.
    arrived: Condvar,
    cancelled: AtomicBool,
    user_error: AtomicBool,
    cancel_nudge: Notify,
    room_nudge: Notify,
}

#[derive(Default)]
struct Inner {
    admission: Option<Admission>,
    messages: VecDeque<Envelope>,
    queued_bytes: usize,
    status: Option<Status>,
    sent: bool,
    lane: Option<Lane>,
    admission_waiters: Vec<Waiter>,
    message_waiters: Vec<Waiter>,
    done_waiters: Vec<Waiter>,
}

impl Inner {
    fn has_news(&self) -> bool {
        !self.messages.is_empty() || self.status.is_some()
    }

    fn is_full(&self) -> bool {
        self.queued_bytes >= QUEUE_BYTES || self.messages.len() >= QUEUE_MESSAGES
    }
}

fn fire(waiters: Vec<Waiter>) {
    waiters.into_iter().for_each(Waiter::fire);
}

/// The side of whoever made the call.
impl CallState {
    pub fn admission(&self) -> Option<Admission> {
        self.lock().admission
    }

    pub fn status(&self) -> Option<Status> {
        self.lock().status.clone()
    }

    /// False only if the request certainly never reached the peer's handler.
    pub fn was_sent(&self) -> bool {
        self.lock().sent
    }

    pub fn lane(&self) -> Option<Lane> {
        self.lock().lane
    }

    /// (lane, whether the replica had no slot, whether user code failed), for the books.
    pub fn summary(&self) -> (Option<Lane>, bool, bool) {
        let inner = self.lock();
        let rejected = inner.admission.is_some_and(|admission| !admission.accepted);
        (inner.lane, rejected, self.user_error.load(Ordering::Relaxed))
    }

    pub fn take(&self) -> Option<Envelope> {
        let mut inner = self.lock();
        let was_full = inner.is_full();
        let envelope = inner.messages.pop_front()?;
        inner.queued_bytes -= envelope.size;
        if was_full && !inner.is_full() {
            self.room_nudge.notify_one();
        }
        Some(envelope)
    }

    pub fn take_all(&self) -> VecDeque<Envelope> {
        let mut inner = self.lock();
        if inner.is_full() {
            self.room_nudge.notify_one();
        }
        inner.queued_bytes = 0;
        std::mem::take(&mut inner.messages)
    }

    pub fn watch_admission(&self, waiter: Waiter) {
        let mut inner = self.lock();
        if inner.admission.is_none() && inner.status.is_none() {
            inner.admission_waiters.push(waiter);
        } else {
            drop(inner);
            waiter.fire();
        }
    }

    pub fn watch_message(&self, waiter: Waiter) {
        let mut inner = self.lock();
        if inner.has_news() {
            drop(inner);
            waiter.fire();
        } else {
            inner.message_waiters.push(waiter);
        }
    }

    pub fn watch_done(&self, waiter: Waiter) {
        let mut inner = self.lock();
        if inner.status.is_some() {
            drop(inner);
            waiter.fire();
        } else {
            inner.done_waiters.push(waiter);
        }
    }

    /// Blocks this thread. False when `until` passed before there was a message or an end.
    pub fn wait(&self, until: Option<Instant>) -> bool {
        let mut inner = self.lock();
        while !inner.has_news() {
            inner = match until {
                None => self.arrived.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.arrived.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// Ends the call here and resets its stream. Nothing when it has ended.
    pub fn cancel(&self) {
        if !self.cancelled.swap(true, Ordering::AcqRel) {
            self.finish(Status::cancelled());
            self.cancel_nudge.notify_one();
        }
    }
}

/// The side of the task that runs the call.
impl CallState {
    pub fn mark_sent(&self, lane: Lane) {
        let mut inner = self.lock();
        inner.sent = true;
        inner.lane = Some(lane);
    }

    /// The peer said that it never began.
    pub fn mark_refused(&self) {
        self.lock().sent = false;
    }

    /// One of the messages is an exception.
    pub fn mark_user_error(&self) {
        self.user_error.store(true, Ordering::Relaxed);
    }

    pub fn admit(&self, admission: Admission) {
        self.advance(Some(admission), Vec::new(), None);
    }

    pub fn push(&self, envelopes: Vec<Envelope>) {
        self.advance(None, envelopes, None);
    }

    /// The first end counts.
    pub fn finish(&self, status: Status) {
        self.advance(None, Vec::new(), Some(status));
    }

    /// All that a unary call brings, at once: whoever waits for any of it is woken once.
    pub fn complete(&self, admission: Option<Admission>, envelopes: Vec<Envelope>, status: Status) {
        self.advance(admission, envelopes, Some(status));
    }

    fn advance(&self, admission: Option<Admission>, envelopes: Vec<Envelope>, status: Option<Status>) {
        let mut inner = self.lock();
        if inner.status.is_some() {
            return;
        }
        let mut waiters = Vec::new();
        if admission.is_some() {
            inner.admission = admission;
        }
        if !envelopes.is_empty() {
            inner.queued_bytes += envelopes.iter().map(|envelope| envelope.size).sum::<usize>();
            inner.messages.extend(envelopes);
        }
        let has_ended = status.is_some();
        inner.status = status;
        if inner.admission.is_some() || has_ended {
            waiters.append(&mut inner.admission_waiters);
        }
        if inner.has_news() {
            waiters.append(&mut inner.message_waiters);
        }
        if has_ended {
            waiters.append(&mut inner.done_waiters);
        }
        drop(inner);
        self.arrived.notify_all();
        fire(waiters);
    }

    pub async fn cancelled(&self) {
        while !self.cancelled.load(Ordering::Acquire) {
            self.cancel_nudge.notified().await;
        }
    }

    /// Returns once there is room for another message.
    pub async fn room(&self) {
        if !self.lock().is_full() {
            return;
        }
        COUNTERS.client_queue_stalls.increment();
        loop {
            self.room_nudge.notified().await;
            if !self.lock().is_full() {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
