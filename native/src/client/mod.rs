//! A channel: one connection to one replica, made when it is first needed and again when it was lost.

mod connection;
mod exchange;

use crate::call::CallState;
use crate::config::ChannelConfig;
use crate::error::{Code, Status};
use crate::metrics::COUNTERS;
use crate::runtime;
use crate::service::{Dialect, Method};
use crate::signal::Waiter;
use crate::wire::{Content, FrameBuf};
use bytes::{Buf, Bytes};
use connection::Connection;
pub use connection::Pong;
use http::HeaderValue;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::timeout;

pub struct Channel {
    config: ChannelConfig,
    link: Mutex<Link>,
    /// Calls that wait for a flush: as many as one turn of a loop made.
    queued: Mutex<Vec<(Arc<CallState>, Request)>>,
    in_flight: AtomicUsize,
    /// Most of them at a time since there was none.
    peak: AtomicUsize,
}

/// What there is of a connection.
#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    /// Whether a task is connecting; it serves all that wait.
    connecting: bool,
    /// Calls that wait for the connection: as many as their callers have in flight.
    waiting: Vec<oneshot::Sender<Result<Connection, Status>>>,
    watchers: Vec<Waiter>,
    /// Kept over reconnects: a process does not change what it speaks.
    dialect: Option<Dialect>,
    failure: Option<Status>,
    /// Attempts that failed since the last connection, and when the last of them did.
    failures: u32,
    failed_at: Option<Instant>,
    closed: bool,
}

/// Pause before the second attempt to connect, doubled for each one after it up to the longest. A router asks again
/// as fast as it is refused.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Link {
    /// The connection that takes calls.
    fn open_connection(&self) -> Option<&Connection> {
        self.connection.as_ref().filter(|connection| connection.is_open())
    }

    /// What is left of the pause before the next attempt.
    fn backoff(&self) -> Duration {
        let Some(failed_at) = self.failed_at.filter(|_| self.failures > 0) else { return Duration::ZERO };
        let pause = SHORTEST_PAUSE.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST_PAUSE);
        pause.saturating_sub(failed_at.elapsed())
    }
}

/// A request ready to be sent.
pub struct Request {
    pub method: Method,
    pub message: Message,
    /// `traceparent` of the caller's span.
    pub trace: Option<HeaderValue>,
}

pub enum Message {
    /// A CallRequest; how it is encoded depends on the connection's lane.
    Native { metadata: Bytes, content: Content },
    /// A framed ASGIRequest.
    Stock(FrameBuf),
}

impl Message {
    fn len(&self) -> usize {
        match self {
            Message::Native { metadata, content } => metadata.len() + content.len(),
            Message::Stock(frames) => frames.remaining(),
        }
    }

    fn dialect(&self) -> Dialect {
        match self {
            Message::Native { .. } => Dialect::Native,
            Message::Stock(_) => Dialect::Stock,
        }
    }
}

impl Channel {
    pub fn new(config: ChannelConfig) -> Self {
        Channel {
            config,
            link: Mutex::default(),
            queued: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }
    }

    /// Starts a call; its state tells the rest. Without `flush` it may stay queued until the next one.
    pub fn start(self: &Arc<Self>, request: Request, flush: bool) -> Arc<CallState> {
        let call = Arc::new(CallState::default());
        self.queued().push((Arc::clone(&call), request));
        if flush {
            self.flush();
        }
        call
    }

    /// Sends the calls that are queued. Waking the I/O thread costs more than a call: it is woken once for all.
    pub fn flush(self: &Arc<Self>) {
        let queued = std::mem::take(&mut *self.queued());
        if queued.is_empty() {
            return;
        }
        let before = self.in_flight.fetch_add(queued.len(), Ordering::Relaxed);
        if before == 0 {
            self.peak.store(queued.len(), Ordering::Relaxed);
        } else {
            self.peak.fetch_max(before + queued.len(), Ordering::Relaxed);
        }
        let bytes = queued.iter().map(|(_, request)| request.message.len()).sum();
        let runs = queued.into_iter().map(|(call, request)| {
            let channel = Arc::clone(self);
            async move {
                exchange::run(&channel, &call, request).await;
                channel.in_flight.fetch_sub(1, Ordering::Relaxed);
            }
        });
        let tasks = self.link().open_connection().map(|connection| Arc::clone(&connection.tasks));
        match tasks {
            Some(tasks) => tasks.visit(bytes, || runs.for_each(|run| tasks.spawn(run))),
            None => runs.for_each(|run| drop(runtime::handle().spawn(run))),
        }
    }

    fn queued(&self) -> MutexGuard<'_, Vec<(Arc<CallState>, Request)>> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call that failed before it was made.
    pub fn failed(status: Status) -> Arc<CallState> {
        let call = Arc::new(CallState::default());
        call.finish(status);
        call
    }

    pub fn dialect(&self) -> Option<Dialect> {
        self.link().dialect
    }

    pub fn failure(&self) -> Option<Status> {
        self.link().failure.clone()
    }

    pub fn lane(&self) -> &'static str {
        self.link().open_connection().map_or("", |connection| connection.lane.name())
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether no call is under way, and the last one was so alone.
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.peak.load(Ordering::Relaxed) <= 1
    }

    /// Fires once the connection is settled or has failed; connects if need be.
    pub fn watch_ready(self: &Arc<Self>, waiter: Waiter) {
        let mut link = self.link();
        if link.open_connection().is_some() || link.closed {
            drop(link);
            waiter.fire();
            return;
        }
        link.watchers.push(waiter);
        self.ensure_connecting(&mut link);
    }

    pub fn connect(self: &Arc<Self>) {
        let mut link = self.link();
        if !link.closed && link.open_connection().is_none() {
            self.ensure_connecting(&mut link);
        }
    }

    /// A small round trip that no user code sees; connects if need be. One answer comes out, or none after a failure
    /// of the runtime.
    pub fn ping(self: &Arc<Self>, patience: Duration) -> mpsc::Receiver<Result<Pong, Status>> {
        let (sender, answer) = mpsc::sync_channel(1);
        let channel = Arc::clone(self);
        runtime::handle().spawn(async move {
            let ping = async {
                let connection = channel.connection().await?;
                connection::ping(&channel.config, &connection).await
            };
            let unanswered = |_| Err(Status::new(Code::DEADLINE_EXCEEDED, format!("no answer within {patience:?}")));
            // Whoever asked may have given up.
            let _ = sender.send(timeout(patience, ping).await.unwrap_or_else(unanswered));
        });
        answer
    }

    /// No new calls; the connection ends with the last call in flight.
    pub fn close(&self) {
        let mut link = self.link();
        link.closed = true;
        // h2 sends GOAWAY and closes when the last handle and stream of a connection is gone.
        let connection = link.connection.take();
        drop(link);
        drop(connection);
    }

    async fn connection(self: &Arc<Self>) -> Result<Connection, Status> {
        let settled = {
            let mut link = self.link();
            if link.closed {
                return Err(Status::unavailable("the channel is closed: its replica was removed"));
            }
            if let Some(connection) = link.open_connection() {
                return Ok(connection.clone());
            }
            let (sender, settled) = oneshot::channel();
            link.waiting.push(sender);
            self.ensure_connecting(&mut link);
            settled
        };
        settled.await.unwrap_or_else(|_| Err(Status::unavailable("the attempt to connect was abandoned")))
    }

    fn ensure_connecting(self: &Arc<Self>, link: &mut Link) {
        if !link.connecting {
            link.connecting = true;
            let channel = Arc::clone(self);
            runtime::handle().spawn(async move { channel.settle().await });
        }
    }

    async fn settle(&self) {
        let backoff = self.link().backoff();
        if !backoff.is_zero() {
            tokio::time::sleep(backoff).await;
        }
        let result = connection::establish(&self.config).await;
        let mut link = self.link();
        link.connecting = false;
        match &result {
            Ok(connection) => {
                COUNTERS.client_connections.increment();
                if link.dialect.is_some() {
                    COUNTERS.client_reconnects.increment();
                    tracing::info!(replica = %self.config, lane = connection.lane.name(), "Connected again");
                }
                link.dialect = Some(connection.dialect);
                link.failure = None;
                link.failures = 0;
                link.connection = (!link.closed).then(|| connection.clone());
            }
            Err(status) => {
                COUNTERS.client_connect_failures.increment();
                if link.failures == 0 {
                    tracing::info!(replica = %self.config, reason = %status, "Cannot connect, trying again when asked to");
                }
                link.failure = Some(status.clone());
                link.failures = link.failures.saturating_add(1);
                link.failed_at = Some(Instant::now());
                link.connection = None;
            }
        }
        let waiting = std::mem::take(&mut link.waiting);
        let watchers = std::mem::take(&mut link.watchers);
        drop(link);
        for waiter in waiting {
            let _ = waiter.send(result.clone());
        }
        watchers.into_iter().for_each(Waiter::fire);
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
