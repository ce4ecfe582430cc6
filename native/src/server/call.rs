//! What the two sides of a server's call share: the task that owns its stream and the handler that answers.

use crate::error::{Code, Status};
use crate::executor::Tasks;
use crate::lane::exchange::Exchange;
use crate::lane::{Lane, placement};
use crate::metrics::COUNTERS;
use crate::service::{Dialect, Method};
use crate::signal::Waiter;
use crate::timing::{self, STAGES};
use crate::wire::{self, Content, Envelope, FrameBuf, Kind, WireError};
use bytes::Buf;
use http::HeaderValue;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// Messages and bytes that may wait to be written before the writer is told to wait.
const HIGH_WATER_BYTES: usize = 1 << 20;
const HIGH_WATER_MESSAGES: usize = 1024;

pub struct ServerCall {
    pub method: Method,
    pub dialect: Dialect,
    pub lane: Lane,
    pub peer: Arc<str>,
    /// Shared memory with the caller.
    pub exchange: Option<Arc<Exchange>>,
    /// Id of its HTTP/2 stream.
    stream: u32,
    /// The caller's word for the admission; 0 for none.
    admission_word: u32,
    /// Whether the caller knows, or can look up, that the call was taken: user code may start then. A caller that
    /// does not know tries again when the connection is lost.
    admission_safe: AtomicBool,
    /// `traceparent` of the caller's span, as it came.
    pub trace: Option<HeaderValue>,
    received: Option<Instant>,
    user_error: AtomicBool,
    request: Mutex<Option<Envelope>>,
    outbound: Mutex<Outbound>,
    /// Wakes the task that owns the stream.
    nudge: Notify,
    /// What runs that task.
    tasks: Arc<Tasks>,
    cancelled: AtomicBool,
}

#[derive(Default)]
struct Outbound {
    headers: Option<(bool, u32)>,
    items: Vec<Item>,
    messages: usize,
    /// Bytes of the items.
    queued: usize,
    /// Of what was taken and is not yet accepted by HTTP/2's flow control.
    in_transit: usize,
    end: Option<Status>,
    /// When user code began.
    began: Option<Instant>,
    writable_waiters: Vec<Waiter>,
    admission_waiters: Vec<Waiter>,
    cancel_waiters: Vec<Waiter>,
}

impl Outbound {
    fn bytes(&self) -> usize {
        self.queued + self.in_transit
    }

    fn is_over(&self, part: usize) -> bool {
        self.bytes() > HIGH_WATER_BYTES / part || self.messages > HIGH_WATER_MESSAGES / part
    }
}

impl Batch {
    /// Whether it only says that the call was taken.
    pub fn is_bare_admission(&self) -> bool {
        matches!(self.headers, Some((true, _))) && self.items.is_empty() && self.end.is_none()
    }
}

/// Something to write.
#[derive(Debug)]
pub enum Item {
    /// Encoded messages.
    Frames(FrameBuf),
    /// A message that may be placed in shared memory before it is encoded.
    Value(Kind, Content),
}

/// What the task has to write next.
#[derive(Default)]
pub struct Batch {
    pub headers: Option<(bool, u32)>,
    pub items: Vec<Item>,
    pub messages: usize,
    pub end: Option<Status>,
}

/// The handler's side.
impl ServerCall {
    /// The request; None once it was taken.
    pub fn take_request(&self) -> Option<Envelope> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The handler begins with it.
    pub fn mark_taken_up(&self) {
        if self.received.is_some() {
            STAGES.queue.since(self.received);
            self.outbound().began = timing::started();
        }
    }

    /// Its answer is an exception.
    pub fn mark_user_error(&self) {
        self.user_error.store(true, Ordering::Relaxed);
    }

    pub fn has_user_error(&self) -> bool {
        self.user_error.load(Ordering::Relaxed)
    }

    /// False when the caller is known to have given the call up: it may run elsewhere by now, and must not here.
    pub fn claim(&self) -> bool {
        if self.is_admission_safe() {
            return true;
        }
        let taken =
            self.exchange.as_ref().and_then(|exchange| exchange.take_admission(self.admission_word, self.stream));
        match taken {
            Some(true) => self.admission_safe.store(true, Ordering::Release),
            Some(false) => COUNTERS.server_calls_revoked.increment(),
            None => {}
        }
        taken != Some(false)
    }

    /// As `claim`, where it accepts. Without `flush` the headers may stay queued until the next flush.
    pub fn admit(&self, accepted: bool, num_ongoing_requests: u32, flush: bool) -> bool {
        if accepted && !self.claim() {
            return false;
        }
        let mut outbound = self.outbound();
        outbound.headers = Some((accepted, num_ongoing_requests));
        outbound.began = timing::started().filter(|_| accepted);
        drop(outbound);
        if flush || !self.is_admission_safe() {
            self.has_news();
        }
        true
    }

    pub fn is_admission_safe(&self) -> bool {
        self.admission_safe.load(Ordering::Acquire)
    }

    /// Fires when user code may start: see `admission_safe`.
    pub fn watch_admission_safe(&self, waiter: Waiter) {
        let mut outbound = self.outbound();
        if self.is_admission_safe() || self.is_cancelled() || outbound.end.is_some() {
            drop(outbound);
            waiter.fire();
        } else {
            outbound.admission_waiters.push(waiter);
        }
    }

    /// False when so much waits that the next message should too. Nothing is queued after a cancel.
    ///
    /// Without `flush` it may stay queued until the next flush. Fails when the message cannot be framed.
    pub fn send(&self, kind: Kind, content: Content, flush: bool) -> Result<bool, WireError> {
        if self.exchange.is_some() && placement::is_worth_it(&content) {
            let bytes = content.len();
            return Ok(self.queue(bytes, Item::Value(kind, content), flush));
        }
        self.send_frames(wire::encode_call_response(kind, content)?, flush)
    }

    /// As `send`, with a message that is framed already.
    pub fn send_frames(&self, frames: FrameBuf, flush: bool) -> Result<bool, WireError> {
        Ok(self.queue(frames.remaining(), Item::Frames(frames), flush))
    }

    fn queue(&self, bytes: usize, item: Item, flush: bool) -> bool {
        if self.is_cancelled() {
            return true;
        }
        let mut outbound = self.outbound();
        match (outbound.items.last_mut(), item) {
            (Some(Item::Frames(last)), Item::Frames(frames)) => last.append(frames),
            (_, item) => outbound.items.push(item),
        }
        outbound.queued += bytes;
        outbound.messages += 1;
        let writable = !outbound.is_over(1);
        drop(outbound);
        if !writable && self.method.is_streaming() {
            COUNTERS.server_queue_stalls.increment();
        }
        // A unary answer leaves with its end, which follows.
        if flush && self.method.is_streaming() {
            self.has_news();
        }
        writable
    }

    /// Has what was queued written.
    pub fn flush(&self) {
        self.has_news();
    }

    pub fn finish(&self, status: Status, flush: bool) {
        let mut outbound = self.outbound();
        if outbound.end.is_none() {
            outbound.end = Some(status);
            if !self.is_cancelled() {
                STAGES.user_code.since(outbound.began);
            }
        }
        // Whoever waits for a cancel of a finished call waits in vain.
        let forgotten = std::mem::take(&mut outbound.cancel_waiters);
        drop(outbound);
        drop(forgotten);
        if flush {
            self.has_news();
        }
    }

    /// Ends a call that its handler forgot.
    pub fn abandon(&self) {
        self.finish(Status::new(Code::INTERNAL, "the replica dropped the call without an answer"), true);
    }

    pub fn watch_writable(&self, waiter: Waiter) {
        let mut outbound = self.outbound();
        if outbound.is_over(2) && !self.is_cancelled() {
            outbound.writable_waiters.push(waiter);
        } else {
            drop(outbound);
            waiter.fire();
        }
    }

    pub fn watch_cancel(&self, waiter: Waiter) {
        let mut outbound = self.outbound();
        if self.is_cancelled() {
            drop(outbound);
            waiter.fire();
        } else if outbound.end.is_none() {
            outbound.cancel_waiters.push(waiter);
        }
    }

    /// There is something to write.
    fn has_news(&self) {
        let bytes = self.outbound().queued;
        self.tasks.visit(bytes, || self.nudge.notify_one());
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn outbound(&self) -> MutexGuard<'_, Outbound> {
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task's side.
impl ServerCall {
    #[allow(clippy::too_many_arguments)] // what the stream knows of it
    pub fn new(
        method: Method,
        dialect: Dialect,
        lane: Lane,
        peer: Arc<str>,
        exchange: Option<Arc<Exchange>>,
        stream: u32,
        trace: Option<HeaderValue>,
        request: Envelope,
        tasks: &Arc<Tasks>,
    ) -> Self {
        ServerCall {
            method,
            dialect,
            lane,
            peer,
            exchange,
            stream,
            admission_word: request.admission_word,
            admission_safe: AtomicBool::new(false),
            trace,
            received: timing::started(),
            user_error: AtomicBool::new(false),
            request: Mutex::new(Some(request)),
            outbound: Mutex::default(),
            nudge: Notify::new(),
            tasks: Arc::clone(tasks),
            cancelled: AtomicBool::new(false),
        }
    }

    /// All that waits to be written, as soon as there is something.
    pub async fn next_batch(&self) -> Batch {
        loop {
            if let Some(batch) = self.take_batch() {
                return batch;
            }
            self.nudge.notified().await;
        }
    }

    fn take_batch(&self) -> Option<Batch> {
        let mut outbound = self.outbound();
        let headers = outbound.headers.take();
        if outbound.end.is_none() && !self.method.is_streaming() {
            return headers.map(|headers| Batch { headers: Some(headers), ..Batch::default() });
        }
        let items = std::mem::take(&mut outbound.items);
        let end = outbound.end.clone();
        if headers.is_none() && items.is_empty() && end.is_none() {
            return None;
        }
        outbound.in_transit += std::mem::take(&mut outbound.queued);
        let messages = std::mem::take(&mut outbound.messages);
        Some(Batch { headers, items, messages, end })
    }

    /// The headers have been written.
    pub fn mark_admission_safe(&self) {
        let mut outbound = self.outbound();
        self.admission_safe.store(true, Ordering::Release);
        let waiters = std::mem::take(&mut outbound.admission_waiters);
        drop(outbound);
        waiters.into_iter().for_each(Waiter::fire);
    }

    /// Flow control accepted what was taken.
    pub fn mark_written(&self) {
        let mut outbound = self.outbound();
        outbound.in_transit = 0;
        if !outbound.is_over(2) {
            let waiters = std::mem::take(&mut outbound.writable_waiters);
            drop(outbound);
            waiters.into_iter().for_each(Waiter::fire);
        }
    }

    /// The caller cancelled or is gone.
    pub fn mark_cancelled(&self) {
        let mut outbound = self.outbound();
        self.cancelled.store(true, Ordering::Release);
        let unsent = std::mem::take(&mut outbound.items);
        outbound.queued = 0;
        let mut waiters = std::mem::take(&mut outbound.writable_waiters);
        waiters.append(&mut outbound.cancel_waiters);
        waiters.append(&mut outbound.admission_waiters);
        drop(outbound);
        drop(unsent);
        waiters.into_iter().for_each(Waiter::fire);
    }
}
