//! One HTTP/2 connection: made, shaken hands over, kept alive.

use crate::config::{self, ChannelConfig};
use crate::error::{Code, Status};
use crate::executor::Tasks;
use crate::keepalive;
use crate::lane::exchange::Exchange;
use crate::lane::fds::{self, Nonce};
use crate::lane::{Corked, Endpoint, Lane, Socket, segment, shortage, tls};
use crate::metrics::COUNTERS;
use crate::proto::{HandshakeRequest, HandshakeResponse};
use crate::service::{self, Dialect, HANDSHAKE_PATH, NONCE_HEADER, SHM};
use crate::wire::{FrameBuf, MessageReader};
use bytes::{BufMut, BytesMut};
use h2::client::SendRequest;
use http::HeaderValue;
use prost::Message;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::time::timeout;

/// grpc servers end a connection that is pinged more often without data.
const STOCK_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(300);

#[derive(Clone)]
pub struct Connection {
    pub sender: SendRequest<FrameBuf>,
    pub lane: Lane,
    pub dialect: Dialect,
    /// Shared memory with the peer, if both ends have it.
    pub exchange: Option<Arc<Exchange>>,
    /// What runs its calls.
    pub tasks: Arc<Tasks>,
    open: Arc<AtomicBool>,
    /// Why this end gave it up.
    given_up: Arc<OnceLock<String>>,
}

impl Connection {
    /// How a call on it failed.
    pub fn failure(&self, status: Status) -> Status {
        status.because(self.given_up.get())
    }

    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// New calls get another connection; those in flight go on.
    pub fn retire(&self) {
        self.open.store(false, Ordering::Release);
    }
}

/// Tries the endpoints in order; the last failure is the one reported, since the first ones are shortcuts.
pub async fn establish(config: &ChannelConfig) -> Result<Connection, Status> {
    let mut failure = Status::unavailable("no endpoint to connect to");
    for (earlier, endpoint) in config.endpoints.iter().enumerate() {
        match connect(config, endpoint).await {
            Ok(connection) => {
                if earlier > 0 {
                    COUNTERS.client_lane_fallbacks.increment();
                    tracing::info!(replica = %config, lane = connection.lane.name(), reason = %failure, "Another lane");
                }
                return Ok(connection);
            }
            Err(status) => failure = status,
        }
    }
    Err(failure)
}

async fn connect(config: &ChannelConfig, endpoint: &Endpoint) -> Result<Connection, Status> {
    let failed = |what: String| Status::unavailable(format!("cannot connect to {endpoint}: {what}"));
    let socket = match timeout(config.connect_timeout, endpoint.connect(config.tls.as_ref())).await {
        Ok(Ok(socket)) => socket,
        Ok(Err(error)) if tls::is_refusal(&error) => {
            return Err(Status::new(Code::UNAUTHENTICATED, failed(error.to_string()).detail));
        }
        Ok(Err(error)) => return Err(failed(error.to_string())),
        Err(_) => return Err(failed(format!("no answer within {:?}", config.connect_timeout))),
    };
    let lane = socket.lane();
    let cork = socket.cork();
    let signs = Arc::clone(socket.signs());
    let (sender, mut connection) = match timeout(config::HANDSHAKE_TIMEOUT, http2(socket)).await {
        Ok(Ok(pair)) => pair,
        Ok(Err(error)) => {
            let status = Status::from(error);
            return Err(Status::new(status.code, failed(format!("HTTP/2: {}", status.detail)).detail));
        }
        Err(_) => return Err(failed("HTTP/2: no answer to the preface".into())),
    };
    let ping_pong = connection.ping_pong();
    let open = Arc::new(AtomicBool::new(true));
    let lent: Arc<OnceLock<Arc<Exchange>>> = Arc::default();
    let span = Arc::new(Lifetime::default());
    let stop = Arc::new(Notify::new());
    let driver = {
        let (open, lent, span) = (Arc::clone(&open), Arc::clone(&lent), EndWhenDropped(Arc::clone(&span)));
        let stop = Arc::clone(&stop);
        let replica = config.to_string();
        async move {
            let _lent = (CloseWhenDropped(lent), span);
            let ended = tokio::select! {
                ended = Corked::new(connection, cork) => ended,
                () = stop.notified() => Ok(()),
            };
            open.store(false, Ordering::Release);
            if let Err(error) = ended {
                tracing::info!(%replica, reason = %error, "Connection lost");
                COUNTERS.client_connections_lost.increment();
            }
        }
    };
    // Encryption is for the I/O thread.
    let tasks = Tasks::start(lane == Lane::Unix || config.tls.is_none(), |_| driver);
    let side = side_socket(endpoint).await;
    let agreed = match timeout(config::HANDSHAKE_TIMEOUT, shake_hands(config, sender.clone(), side)).await {
        Ok(Ok(agreed)) => agreed,
        Ok(Err(status)) => {
            stop.notify_one();
            return Err(Status::new(status.code, format!("handshake with {endpoint}: {}", status.detail)));
        }
        Err(_) => {
            stop.notify_one();
            return Err(failed("no answer to the handshake".into()));
        }
    };
    let (dialect, exchange) = agreed;
    let given_up: Arc<OnceLock<String>> = Arc::default();
    if let Some(ping_pong) = ping_pong {
        let interval = match dialect {
            Dialect::Native => config.keepalive_interval,
            Dialect::Stock => config.keepalive_interval.max(STOCK_KEEPALIVE_INTERVAL),
        };
        let (open, patience, given_up) = (Arc::clone(&open), config.keepalive_timeout, Arc::clone(&given_up));
        let replica = config.to_string();
        tokio::spawn(async move {
            if keepalive::watch(ping_pong, &signs, interval, patience).await == keepalive::Peer::Silent {
                tracing::warn!(%replica, "No answer to a ping within {patience:?}: the connection is given up");
                let _ = given_up.set(format!("no answer to a ping within {patience:?}"));
            }
            open.store(false, Ordering::Release);
            // Streams of a connection that is gone fail at once.
            stop.notify_one();
        });
    }
    if let Some(exchange) = &exchange {
        let _ = lent.set(Arc::clone(exchange));
    }
    span.advance();
    Ok(Connection { sender, lane, dialect, exchange, tasks, open, given_up })
}

/// Counts the end of a connection that came into use: whichever of beginning and end is told second counts it.
#[derive(Default)]
struct Lifetime(AtomicBool);

impl Lifetime {
    fn advance(&self) {
        if self.0.swap(true, Ordering::AcqRel) {
            COUNTERS.client_connections_ended.increment();
        }
    }
}

struct EndWhenDropped(Arc<Lifetime>);

impl Drop for EndWhenDropped {
    fn drop(&mut self) {
        self.0.advance();
    }
}

struct CloseWhenDropped(Arc<OnceLock<Arc<Exchange>>>);

impl Drop for CloseWhenDropped {
    fn drop(&mut self) {
        if let Some(exchange) = self.0.get() {
            exchange.close();
        }
    }
}

/// A side socket for shared memory, where the endpoint is a Unix-domain socket and has one.
async fn side_socket(endpoint: &Endpoint) -> Option<(Nonce, Arc<Exchange>)> {
    let Endpoint::Unix(path) = endpoint else { return None };
    if !segment::pool().is_enabled() {
        return None;
    }
    let nonce = Nonce::random().ok()?;
    match fds::connect(&fds::path_of(path), nonce).await {
        Ok(exchange) => Some((nonce, exchange)),
        Err(error) => {
            shortage::tell_of(&error);
            tracing::debug!(%error, %endpoint, "no shared memory with this peer");
            None
        }
    }
}

async fn http2(socket: Socket) -> Result<(SendRequest<FrameBuf>, h2::client::Connection<Socket, FrameBuf>), h2::Error> {
    h2::client::Builder::new()
        .initial_window_size(config::STREAM_WINDOW)
        .initial_connection_window_size(config::CONNECTION_WINDOW)
        .max_frame_size(config::MAX_FRAME_SIZE)
        .max_send_buffer_size(config::SEND_BUFFER)
        .max_header_list_size(config::MAX_HEADER_LIST_SIZE)
        .data_frame_budget(config::FRAME_BUDGET)
        .max_concurrent_reset_streams(config::MAX_PENDING_RESETS)
        .enable_push(false)
        .handshake(socket)
        .await
}

/// One Handshake over a connection that has had its own: what the peer says of itself, and how long that took. A peer
/// without the plugin says nothing.
pub async fn ping(config: &ChannelConfig, connection: &Connection) -> Result<Pong, Status> {
    let request = super::exchange::http_request(config, service::uri(HANDSHAKE_PATH));
    let began = Instant::now();
    let answer = match unary(request, connection.sender.clone(), &hello()).await {
        Err(status) if status.code == Code::UNIMPLEMENTED => HandshakeResponse::default(),
        answer => answer?,
    };
    Ok(Pong {
        round_trip: began.elapsed(),
        version: answer.version,
        lane: connection.lane,
        shared_memory: connection.exchange.is_some(),
    })
}

/// What a ping found.
#[derive(Debug)]
pub struct Pong {
    pub round_trip: Duration,
    /// Of the plugin at the peer; empty where there is none.
    pub version: String,
    pub lane: Lane,
    /// Whether the connection has a side socket for shared memory.
    pub shared_memory: bool,
}

fn hello() -> HandshakeRequest {
    HandshakeRequest { version: crate::VERSION.to_owned(), capabilities: Vec::new() }
}

async fn shake_hands(
    config: &ChannelConfig,
    sender: SendRequest<FrameBuf>,
    side: Option<(Nonce, Arc<Exchange>)>,
) -> Result<(Dialect, Option<Arc<Exchange>>), Status> {
    let mut request = super::exchange::http_request(config, service::uri(HANDSHAKE_PATH));
    if let Some((nonce, _)) = &side
        && let Ok(value) = HeaderValue::from_str(&nonce.to_text())
    {
        request.headers_mut().insert(NONCE_HEADER, value);
    }
    let answer = match unary(request, sender, &hello()).await {
        Ok(answer) => answer,
        Err(status) if status.code == Code::UNIMPLEMENTED => return Ok((Dialect::Stock, None)),
        Err(status) => return Err(status),
    };
    if !config.identity.is_empty() && answer.identity != config.identity {
        let text = format!("the port belongs to {:?} now, not to {:?}", answer.identity, config.identity);
        return Err(Status::unavailable(text));
    }
    let agreed = answer.capabilities.iter().any(|capability| capability == SHM);
    Ok((Dialect::Native, side.filter(|_| agreed).map(|(_, exchange)| exchange)))
}

/// A small unary call, outside of the data path.
async fn unary(
    request: http::Request<()>,
    sender: SendRequest<FrameBuf>,
    message: &HandshakeRequest,
) -> Result<HandshakeResponse, Status> {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(message.encoded_len() as u32);
    framed.put_slice(&message.encode_to_vec());
    let mut sender = sender.ready().await?;
    let (response, mut stream) = sender.send_request(request, false)?;
    stream.send_data(FrameBuf::from(framed.freeze()), true)?;
    let response = response.await?;
    super::exchange::require_grpc(&response)?;
    if let Some(refused) = super::exchange::status_in_headers(response.headers()) {
        return Err(refused);
    }
    let mut body = response.into_body();
    let mut reader = MessageReader::new(config::MAX_HEADER_LIST_SIZE as usize);
    let mut messages = VecDeque::new();
    while let Some(data) = body.data().await {
        let data = data?;
        let _ = body.flow_control().release_capacity(data.len());
        reader.push(data, &mut messages)?;
    }
    let trailers = body.trailers().await?.unwrap_or_default();
    let status = super::exchange::status_of(&trailers);
    match (status.code, messages.pop_front()) {
        (Code::OK, Some(message)) => HandshakeResponse::decode(message.as_slice())
            .map_err(|error| Status::new(Code::INTERNAL, format!("answer cannot be read: {error}"))),
        (Code::OK, None) => Err(Status::new(Code::INTERNAL, "answer without a message")),
        _ => Err(status),
    }
}
