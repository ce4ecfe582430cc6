//! The server: accepts connections on TCP and on a Unix-domain socket, hands complete requests to its
//! handler, drains. It knows methods and messages, nothing of Serve.

mod call;
mod small;
mod stream;

pub use call::ServerCall;

use crate::config::{self, ServerConfig};
use crate::executor::Tasks;
use crate::keepalive::{self, Signs};
use crate::lane::exchange::Exchange;
use crate::lane::fds::{self, Nonce};
use crate::lane::{self, Accepted, Corked, Flushes, Lane, Listener, Socket, UnixPath, segment, shortage};
use crate::metrics::COUNTERS;
use crate::runtime;
use crate::security::{Event, Notices, Stranger, Strangers};
use crate::signal::Waiter;
use crate::wire::FrameBuf;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::TcpListener as StdTcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::{timeout, timeout_at};

/// Takes the calls that came in. Runs on the I/O thread: it must only pass them on.
pub trait Handler: Send + Sync + 'static {
    fn incoming(&self, call: Arc<ServerCall>);

    /// Something that an operator should know. Comes at a bounded rate.
    fn notice(&self, text: String);
}

/// How long a peer may be silent before it is pinged, and then before it is taken for dead.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Wait after a failed accept: it fails at once again while no file descriptor is free.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// GOAWAY was sent: ongoing calls finish, nothing new is taken.
    Draining,
    Closed,
}

pub struct Server {
    port: u16,
    unix: Option<UnixPath>,
    /// Of the socket that passes descriptors of shared memory.
    _side: Option<UnixPath>,
    shared: Arc<Shared>,
}

struct Shared {
    config: ServerConfig,
    handler: Box<dyn Handler>,
    phase: watch::Sender<Phase>,
    small: small::Services,
    /// Side sockets whose HTTP/2 connection has not named them yet.
    unclaimed: Mutex<HashMap<Nonce, (Instant, Arc<Exchange>)>>,
    strangers: Arc<Strangers>,
    notices: Notices,
    connections: AtomicUsize,
    calls: AtomicUsize,
    /// Told whenever a connection ended.
    connection_ended: Notify,
}

impl Server {
    /// Binds and serves at once.
    pub fn bind(
        host: &str,
        port: u16,
        unix_path: Option<&Path>,
        config: ServerConfig,
        handler: Box<dyn Handler>,
    ) -> io::Result<Server> {
        let tcp = StdTcpListener::bind((host, port))?;
        tcp.set_nonblocking(true)?;
        let port = tcp.local_addr()?.port();
        let runtime = runtime::handle();
        let _in_runtime = runtime.enter();
        let tcp = TcpListener::from_std(tcp)?;
        let unix = unix_path.map(lane::bind_unix).transpose()?;
        let side_path = unix_path.filter(|_| segment::pool().is_enabled()).map(fds::path_of);
        let side = side_path.and_then(|path| {
            let failed = |error: &io::Error| {
                let path = path.display();
                tracing::warn!(
                    "No socket at {path} ({error}): callers on this node have no shared memory with this process"
                );
            };
            lane::bind_unix(&path).inspect_err(failed).ok()
        });
        let shared = Arc::new(Shared {
            small: small::Services::new(&config),
            config,
            handler,
            unclaimed: Mutex::default(),
            phase: watch::channel(Phase::Serving).0,
            strangers: Arc::default(),
            notices: Notices::default(),
            connections: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            connection_ended: Notify::new(),
        });
        tokio::spawn(accept_all(Listener::Tcp(tcp), Arc::clone(&shared), serve_calls));
        let unix = unix.map(|(listener, path)| {
            tokio::spawn(accept_all(Listener::Unix(listener), Arc::clone(&shared), serve_calls));
            path
        });
        let side = side.map(|(listener, path)| {
            tokio::spawn(accept_all(Listener::Unix(listener), Arc::clone(&shared), serve_side));
            path
        });
        Ok(Server { port, unix, _side: side, shared })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn unix_path(&self) -> Option<&Path> {
        self.unix.as_ref().map(UnixPath::as_path)
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    pub fn ongoing_calls(&self) -> usize {
        self.shared.calls.load(Ordering::Relaxed)
    }

    /// GOAWAY to all peers. `done` fires when the ongoing calls have ended, or after `grace`, when what was
    /// left has been cut off.
    pub fn stop(&self, grace: Duration, done: Waiter) {
        self.advance(Phase::Draining);
        let shared = Arc::clone(&self.shared);
        runtime::handle().spawn(async move {
            let _ = timeout(grace, shared.all_connections_ended()).await;
            shared.phase.send_replace(Phase::Closed);
            let _ = timeout(Duration::from_secs(1), shared.all_connections_ended()).await;
            done.fire();
        });
    }

    pub fn close(&self) {
        self.advance(Phase::Closed);
    }

    fn advance(&self, phase: Phase) {
        self.shared.phase.send_if_modified(|current| {
            let forward = *current != Phase::Closed;
            if forward {
                *current = phase;
            }
            forward
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// Side sockets that may wait to be named by their connection.
const MOST_UNCLAIMED: usize = 256;

impl Shared {
    fn add_unclaimed(&self, nonce: Nonce, exchange: Arc<Exchange>) {
        let mut unclaimed = self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner);
        unclaimed.retain(|_, (came, exchange)| exchange.is_open() && came.elapsed() < config::HANDSHAKE_TIMEOUT);
        if unclaimed.len() < MOST_UNCLAIMED {
            unclaimed.insert(nonce, (Instant::now(), exchange));
        }
    }

    fn claim(&self, nonce: Nonce) -> Option<Arc<Exchange>> {
        let mut unclaimed = self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner);
        unclaimed.remove(&nonce).map(|(_, exchange)| exchange)
    }

    fn notice(&self, event: Event, detail: impl FnOnce() -> String) {
        if let Some(text) = self.notices.note(event, detail) {
            self.handler.notice(text);
        }
    }

    async fn all_connections_ended(&self) {
        loop {
            let ended = self.connection_ended.notified();
            if self.connections.load(Ordering::Acquire) == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// Hands each connection that arrives to `serve`, until the server stops.
async fn accept_all(listener: Listener, shared: Arc<Shared>, serve: impl Fn(Accepted, Arc<Shared>)) {
    let mut phase = shared.phase.subscribe();
    loop {
        let accepted = tokio::select! {
            _ = phase.wait_for(|phase| *phase != Phase::Serving) => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(accepted) => serve(accepted, Arc::clone(&shared)),
            Err(error) => {
                shared.notice(Event::NotAccepted, || error.to_string());
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

fn serve_calls(accepted: Accepted, shared: Arc<Shared>) {
    COUNTERS.server_connections.increment();
    shared.connections.fetch_add(1, Ordering::AcqRel);
    // Encryption is for the I/O thread.
    let open_to_visits = accepted.lane() == Lane::Unix || shared.config.tls.is_none();
    Tasks::start(open_to_visits, |tasks| {
        let tasks = Arc::clone(tasks);
        async move {
            serve_connection(accepted, &shared, tasks).await;
            COUNTERS.server_connections_ended.increment();
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            shared.connection_ended.notify_waiters();
        }
    });
}

fn serve_side(accepted: Accepted, shared: Arc<Shared>) {
    let Accepted::Unix(socket) = accepted else { return };
    tokio::spawn(async move {
        let register = |nonce, exchange| shared.add_unclaimed(nonce, exchange);
        if let Err(error) = fds::accept(socket, register).await {
            shortage::tell_of(&error);
            tracing::debug!(%error, "no shared memory with a peer");
        }
    });
}

/// What the streams of a connection share.
struct Connection {
    lane: Lane,
    peer: Arc<str>,
    /// None where no token is asked for.
    stranger: Option<Stranger>,
    exchange: OnceLock<Arc<Exchange>>,
    flushes: Arc<Flushes>,
    signs: Arc<Signs>,
    tasks: Arc<Tasks>,
}

impl Connection {
    /// Its peer has shown the token.
    fn trust(&self) {
        if let Some(stranger) = &self.stranger {
            stranger.trust();
        }
    }
}

async fn overstayed(stranger: Option<&Stranger>) {
    match stranger {
        Some(stranger) => stranger.overstayed(config::HANDSHAKE_TIMEOUT).await,
        None => std::future::pending().await,
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.get() {
            exchange.close();
        }
    }
}

async fn serve_connection(accepted: Accepted, shared: &Arc<Shared>, tasks: Arc<Tasks>) {
    let (lane, peer) = (accepted.lane(), Arc::<str>::from(accepted.peer()));
    let stranger = shared.config.authorization.is_some().then(|| shared.strangers.arrived());
    let deadline = Instant::now() + config::HANDSHAKE_TIMEOUT;
    let opening = open(accepted, shared, &peer);
    let Some(socket) = before(deadline, shared, stranger.as_ref(), opening).await.flatten() else { return };
    let cork = socket.cork();
    let state = Arc::new(Connection {
        lane,
        peer,
        stranger,
        exchange: OnceLock::new(),
        flushes: Arc::clone(socket.flushes()),
        signs: Arc::clone(socket.signs()),
        tasks,
    });
    Corked::new(serve_streams(socket, deadline, shared, state), cork).await;
}

/// What `step` of a connection's beginning gives. None when it took too long, or the server stops: nothing was promised
/// yet, and it does not wait.
async fn before<T>(
    deadline: Instant,
    shared: &Shared,
    stranger: Option<&Stranger>,
    step: impl Future<Output = T>,
) -> Option<T> {
    let mut phase = shared.phase.subscribe();
    tokio::select! {
        done = timeout_at(deadline.into(), step) => done.ok(),
        () = overstayed(stranger) => None,
        _ = reached(&mut phase, false) => None,
    }
}

async fn serve_streams(socket: Socket, deadline: Instant, shared: &Arc<Shared>, state: Arc<Connection>) {
    let stranger = state.stranger.as_ref();
    let socket = socket.gated(stranger.map(|stranger| Arc::clone(stranger.gate())));
    let Some(Ok(mut connection)) = before(deadline, shared, stranger, http2(socket)).await else { return };
    let mut phase = shared.phase.subscribe();
    let mut overstayed = std::pin::pin!(overstayed(stranger));
    let mut draining = false;
    let ping_pong = connection.ping_pong();
    let mut silent = std::pin::pin!(async {
        match ping_pong {
            Some(ping_pong) => keepalive::watch(ping_pong, &state.signs, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT).await,
            None => std::future::pending().await,
        }
    });
    loop {
        tokio::select! {
            accepted = connection.accept() => {
                let Some(Ok((request, respond))) = accepted else { return };
                let (shared, state) = (Arc::clone(shared), Arc::clone(&state));
                let tasks = Arc::clone(&state.tasks);
                tasks.spawn(async move { stream::serve(&shared, &state, request, respond).await });
            }
            reached = reached(&mut phase, draining) => {
                if reached == Phase::Closed {
                    return;
                }
                draining = true;
                connection.graceful_shutdown();
            }
            _ = &mut silent => return,
            () = &mut overstayed => return,
        }
    }
}

/// TLS where it is on, and the check of a local peer's user.
async fn open(accepted: Accepted, shared: &Shared, peer: &str) -> Option<Socket> {
    match accepted.secured(shared.config.tls.as_ref()).await {
        Ok(socket) => Some(socket),
        Err(error) => {
            COUNTERS.server_handshake_failures.increment();
            shared.notice(Event::TlsFailed, || format!("{peer}: {error}"));
            None
        }
    }
}

/// The phase after the present one, once it has come.
async fn reached(phase: &mut watch::Receiver<Phase>, draining: bool) -> Phase {
    let next = |phase: &Phase| *phase == Phase::Closed || *phase == Phase::Draining && !draining;
    phase.wait_for(next).await.map_or(Phase::Closed, |phase| *phase)
}

async fn http2(socket: Socket) -> Result<h2::server::Connection<Socket, FrameBuf>, h2::Error> {
    h2::server::Builder::new()
        .initial_window_size(config::STREAM_WINDOW)
        .initial_connection_window_size(config::CONNECTION_WINDOW)
        .max_frame_size(config::MAX_FRAME_SIZE)
        .max_send_buffer_size(config::SEND_BUFFER)
        .max_header_list_size(config::MAX_HEADER_LIST_SIZE)
        .data_frame_budget(config::FRAME_BUDGET)
        .max_concurrent_streams(config::MAX_CONCURRENT_STREAMS)
        .max_concurrent_reset_streams(config::MAX_PENDING_RESETS)
        .max_pending_accept_reset_streams(config::MAX_PENDING_RESETS)
        .handshake(socket)
        .await
}
