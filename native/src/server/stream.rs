//! One stream of a connection, from its headers to its trailers.

use super::{Connection, ServerCall, Shared};
use crate::config::ServerConfig;
use crate::error::{Code, Status};
use crate::lane::exchange::Grants;
use crate::lane::fds::Nonce;
use crate::lane::{self, Lane, placement};
use crate::metrics::COUNTERS;
use crate::outcomes::{self, Outcome};
use crate::security::{self, Event};
use crate::server::call::{Batch, Item};
use crate::service::{self, Dialect, HANDSHAKE_PATH, Method, NONCE_HEADER};
use crate::wire::{self, Envelope, FrameBuf, MessageReader, WireError};
use bytes::Buf;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, header};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub async fn serve(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    mut request: http::Request<RecvStream>,
    mut respond: SendResponse<FrameBuf>,
) {
    if let Err(status) = security::require_authorization(&shared.config, request.headers()) {
        shared.notice(Event::Unauthenticated, || connection.peer.to_string());
        return refuse(&mut respond, &status);
    }
    connection.trust();
    if let Err(status) = require_grpc(request.headers()) {
        return refuse(&mut respond, &status);
    }
    let Some((dialect, method)) = Method::of_path(request.uri().path()) else {
        if claim_exchange(shared, connection, &request) {
            request.extensions_mut().insert(SharedMemoryAgreed);
        }
        return shared.small.serve(request, respond).await;
    };
    let trace = request.headers_mut().remove(service::TRACE_HEADER);
    let envelope = tokio::select! {
        // The caller may give up before its request is complete.
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
        envelope = read_request(&shared.config, connection, dialect, request.into_body()) => envelope,
    };
    let envelope = match envelope {
        Ok(envelope) => envelope,
        Err(status) => return refuse(&mut respond, &status),
    };
    service::server_calls(dialect, connection.lane, method).increment();
    let (lane, peer) = (connection.lane, Arc::clone(&connection.peer));
    let exchange = connection.exchange.get().filter(|_| dialect == Dialect::Native).cloned();
    let stream = respond.stream_id().as_u32();
    let call =
        Arc::new(ServerCall::new(method, dialect, lane, peer, exchange, stream, trace, envelope, &connection.tasks));
    shared.calls.fetch_add(1, Ordering::Relaxed);
    shared.handler.incoming(Arc::clone(&call));
    COUNTERS.server_calls_begun.increment();
    let outcome = match answer(connection, &call, respond).await {
        Ok(outcome) => outcome,
        Err(End::Lost) => {
            COUNTERS.server_cancels.increment();
            call.mark_cancelled();
            Outcome::Cancelled
        }
    };
    outcomes::REPLICA.count(Some(lane), dialect, method, outcome);
    shared.calls.fetch_sub(1, Ordering::Relaxed);
}

/// Marks a Handshake whose connection has shared memory.
#[derive(Clone, Copy)]
pub struct SharedMemoryAgreed;

/// Joins the side socket that a Handshake names to its connection.
fn claim_exchange(shared: &Shared, connection: &Connection, request: &http::Request<RecvStream>) -> bool {
    if request.uri().path() != HANDSHAKE_PATH || connection.lane != Lane::Unix {
        return false;
    }
    let nonce = request.headers().get(NONCE_HEADER).and_then(|value| Nonce::from_text(value.to_str().ok()?));
    match nonce.and_then(|nonce| shared.claim(nonce)) {
        Some(exchange) => connection.exchange.set(exchange).is_ok(),
        None => false,
    }
}

fn require_grpc(headers: &HeaderMap) -> Result<(), Status> {
    let content_type = headers.get(header::CONTENT_TYPE).map_or(&[][..], HeaderValue::as_bytes);
    if !content_type.starts_with(b"application/grpc") {
        return Err(Status::new(Code::INVALID_ARGUMENT, "content-type is not application/grpc"));
    }
    match headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(()),
        Some(_) => Err(Status::from(WireError::Compressed)),
    }
}

async fn read_request(
    config: &ServerConfig,
    connection: &Connection,
    dialect: Dialect,
    mut body: RecvStream,
) -> Result<Envelope, Status> {
    let mut reader = MessageReader::new(config.max_message_size);
    let mut messages = VecDeque::new();
    while let Some(data) = body.data().await {
        let data = data?;
        COUNTERS.server_bytes_received.add(data.len());
        let _ = body.flow_control().release_capacity(data.len());
        reader.push(data, &mut messages).map_err(too_large_to_receive)?;
        if messages.len() > 1 {
            return Err(Status::new(Code::INVALID_ARGUMENT, "more than one message in a request"));
        }
    }
    let payload = messages.pop_front().filter(|_| reader.is_between_messages());
    let payload = payload.ok_or_else(|| Status::new(Code::INVALID_ARGUMENT, "the request has no whole message"))?;
    let mut envelope = match dialect {
        Dialect::Native => wire::parse_call_request(&payload)?,
        Dialect::Stock => return Ok(wire::parse_fields(&payload)?),
    };
    envelope.require_size(config.max_message_size).map_err(too_large_to_receive)?;
    lane::exchange::open(connection.exchange.get(), &mut envelope).await?;
    Ok(envelope)
}

fn too_large_to_receive(error: WireError) -> Status {
    match error {
        WireError::TooLarge { size, limit } => Status::new(
            Code::RESOURCE_EXHAUSTED,
            format!(
                "the request has {size} bytes, more than the {limit} bytes that \
                 RAY_SERVE_GRPC_MAX_MESSAGE_SIZE allows at the replica"
            ),
        ),
        other => other.into(),
    }
}

/// Why a call was not answered to its end.
enum End {
    Lost,
}

impl From<h2::Error> for End {
    fn from(_: h2::Error) -> Self {
        End::Lost
    }
}

/// Writes to HTTP/2 before the socket has to have taken them. Its window counts the bytes of a frame; a frame of
/// one byte costs some hundred until it is written.
const UNFLUSHED_WRITES: usize = 64;

async fn answer(
    connection: &Connection,
    call: &ServerCall,
    mut respond: SendResponse<FrameBuf>,
) -> Result<Outcome, End> {
    let mut rejected = false;
    let mut stream: Option<SendStream<FrameBuf>> = None;
    // Taken back when the caller is lost before it took them.
    let mut lent = Grants::default();
    let flushes = &connection.flushes;
    let (mut unflushed, mut unflushed_since) = (0, flushes.count());
    loop {
        let batch = match &mut stream {
            None => tokio::select! {
                biased;
                batch = call.next_batch() => batch,
                _ = poll_fn(|cx| respond.poll_reset(cx)) => return Err(End::Lost),
            },
            Some(stream) => tokio::select! {
                biased;
                batch = call.next_batch() => batch,
                _ = poll_fn(|cx| stream.poll_reset(cx)) => return Err(End::Lost),
            },
        };
        if let (None, Some(end)) = (&stream, trailers_only(&batch)) {
            refuse(&mut respond, end);
            return Ok(Outcome::of(end, rejected, false));
        }
        let before = flushes.count();
        let open = match &mut stream {
            Some(open) => open,
            none => none.insert(respond.send_response(headers(batch.headers), false)?),
        };
        if batch.is_bare_admission() && !call.is_admission_safe() {
            tokio::select! {
                () = flushes.after(before) => call.mark_admission_safe(),
                _ = poll_fn(|cx| open.poll_reset(cx)) => return Err(End::Lost),
            }
        }
        if let Some((false, _)) = batch.headers {
            COUNTERS.server_rejections.increment();
            rejected = true;
        }
        let is_last = batch.end.is_some();
        let mut failure = None;
        for item in batch.items {
            let frames = match encode(call, item, open.stream_id().as_u32(), &mut lent).await {
                Ok(frames) => frames,
                Err(status) => {
                    failure = Some(status);
                    break;
                }
            };
            COUNTERS.server_bytes_sent.add(frames.remaining());
            open.send_data(frames, false)?;
            if !is_last {
                flow(open).await?;
            }
        }
        COUNTERS.server_messages_sent.add(batch.messages);
        unflushed += 1;
        if unflushed == UNFLUSHED_WRITES && !is_last {
            tokio::select! {
                () = flushes.after(unflushed_since) => {}
                _ = poll_fn(|cx| open.poll_reset(cx)) => return Err(End::Lost),
            }
            (unflushed, unflushed_since) = (0, flushes.count());
        }
        call.mark_written();
        if let Some(status) = failure.or(batch.end) {
            open.send_trailers(trailers(&status))?;
            lent.settle();
            return Ok(Outcome::of(&status, rejected, call.has_user_error()));
        }
    }
}

/// One message, or several small ones that were encoded when they were queued.
async fn encode(call: &ServerCall, item: Item, stream: u32, lent: &mut Grants) -> Result<FrameBuf, Status> {
    let (kind, content) = match item {
        Item::Frames(frames) => return Ok(frames),
        Item::Value(kind, content) => (kind, content),
    };
    let exchange = call.exchange.as_ref();
    let exchange = exchange.filter(|_| !call.method.is_streaming() || lent.outstanding() < placement::STREAM_LIMIT);
    let content = match exchange {
        Some(exchange) => {
            let (content, grants) = placement::place(exchange, content).await;
            grants.belong_to(stream);
            lent.append(grants);
            content
        }
        None => content,
    };
    Ok(wire::encode_call_response(kind, content)?)
}

/// A call that failed before it said anything needs no headers of its own.
fn trailers_only(batch: &Batch) -> Option<&Status> {
    let nothing_else = batch.headers.is_none() && batch.items.is_empty();
    batch.end.as_ref().filter(|end| nothing_else && end.code != Code::OK)
}

/// Waits until the peer and the socket have taken enough that another message may follow.
async fn flow(stream: &mut SendStream<FrameBuf>) -> Result<(), End> {
    stream.reserve_capacity(1);
    let mut stalled = false;
    let granted = poll_fn(|cx| {
        if stream.capacity() > 0 {
            return std::task::Poll::Ready(Some(Ok(1)));
        }
        let granted = stream.poll_capacity(cx);
        if granted.is_pending() && !std::mem::replace(&mut stalled, true) {
            COUNTERS.server_window_stalls.increment();
        }
        granted
    });
    match granted.await {
        Some(Ok(_)) => Ok(()),
        Some(Err(_)) | None => Err(End::Lost),
    }
}

fn headers(admission: Option<(bool, u32)>) -> http::Response<()> {
    let mut response = http::Response::new(());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if let Some((accepted, num_ongoing_requests)) = admission {
        headers.insert("accepted", HeaderValue::from_static(if accepted { "1" } else { "0" }));
        headers.insert("num_ongoing_requests", HeaderValue::from(num_ongoing_requests));
    }
    response
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert("grpc-status", HeaderValue::from(status.code.0));
    if !status.detail.is_empty()
        && let Ok(message) = HeaderValue::from_str(&percent_encode(&status.detail))
    {
        trailers.insert("grpc-message", message);
    }
    trailers
}

fn refuse(respond: &mut SendResponse<FrameBuf>, status: &Status) {
    let mut response = headers(None);
    response.headers_mut().extend(trailers(status));
    // Fails when the peer has gone: then there is nobody to tell. What still comes of the request is not
    // read: h2 resets the stream when its handles are dropped, after the response.
    let _ = respond.send_response(response, true);
}

fn percent_encode(text: &str) -> String {
    use std::fmt::Write;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            out.push(byte as char);
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_become_header_text() {
        assert_eq!(percent_encode("50% é\n"), "50%25 %C3%A9%0A");
    }
}
