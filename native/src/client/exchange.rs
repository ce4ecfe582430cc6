//! One call from its request to its trailers.

use super::{Channel, Connection, Message, Request};
use crate::call::{Admission, CallState};
use crate::config::ChannelConfig;
use crate::error::{self, Code, Status};
use crate::lane::exchange::{Exchange as SharedMemory, Grants};
use crate::lane::{self, placement};
use crate::metrics::COUNTERS;
use crate::runtime;
use crate::service::{self, Dialect};
use crate::wire::{self, Envelope, FrameBuf, MessageReader, Payload, WireError};
use bytes::Buf;
use h2::RecvStream;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, header};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Runs the call to its end, whichever comes first: the peer's, or the caller's cancel. Dropping the
/// exchange resets its stream.
pub async fn run(channel: &Arc<Channel>, call: &CallState, request: Request) {
    let ended = tokio::select! {
        biased;
        () = call.cancelled() => {
            COUNTERS.client_cancels.increment();
            Status::cancelled()
        }
        ended = exchange(channel, call, request) => ended.unwrap_or_else(|status| status),
    };
    call.finish(ended);
}

async fn exchange(channel: &Arc<Channel>, call: &CallState, request: Request) -> Result<Status, Status> {
    let (connection, mut sender) = ready(channel).await?;
    if connection.dialect != request.message.dialect() {
        return Err(Status::unavailable("the replica's process was replaced by one of another kind"));
    }
    // Taken back when this returns, unless the peer took it.
    let (frames, _grants) = encode(&connection, request.message).await?;
    let path = request.method.path(connection.dialect);
    let size = frames.remaining();
    let (response, mut stream) = sender.send_request(http_request(&channel.config, &path), false)?;
    call.mark_sent(connection.lane);
    COUNTERS.client_bytes_sent.add(size);
    service::client_calls(connection.dialect, connection.lane, request.method).increment();
    let mut unread = Unread { stream: stream.stream_id().as_u32(), exchange: connection.exchange.clone() };
    stream.send_data(frames, true).map_err(|error| refused_or_lost(call, error))?;
    let response = response.await.map_err(|error| refused_or_lost(call, error))?;
    require_grpc(&response)?;
    let (head, body) = response.into_parts();
    if let Some(status) = status_in_headers(&head.headers) {
        unread.exchange = None;
        return Ok(status);
    }
    if let Some(admission) = admission_of(&head.headers) {
        if !admission.accepted {
            COUNTERS.client_rejections.increment();
        }
        call.admit(admission);
    }
    let status = receive(&channel.config, &connection, call, body).await?;
    unread.exchange = None;
    Ok(status)
}

/// A response that may have memory lent with it which nobody will take.
struct Unread {
    stream: u32,
    exchange: Option<Arc<SharedMemory>>,
}

/// Until then the peer has seen the reset, or has finished: it lends no more with this response.
const ABANDON_AFTER: Duration = Duration::from_secs(1);

impl Drop for Unread {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            let stream = self.stream;
            runtime::handle().spawn(async move {
                tokio::time::sleep(ABANDON_AFTER).await;
                exchange.abandon(stream);
            });
        }
    }
}

async fn encode(connection: &Connection, message: Message) -> Result<(FrameBuf, Grants), Status> {
    match (message, &connection.exchange) {
        (Message::Stock(frames), _) => Ok((frames, Grants::default())),
        (Message::Native { metadata, content }, Some(exchange)) if placement::is_worth_it(&content) => {
            let (content, grants) = placement::place(exchange, content).await;
            Ok((wire::encode_call_request(metadata, content)?, grants))
        }
        (Message::Native { metadata, content }, _) => {
            Ok((wire::encode_call_request(metadata, content)?, Grants::default()))
        }
    }
}

/// A connection that takes a call. One that was lost while idle is made again, once.
async fn ready(channel: &Arc<Channel>) -> Result<(Connection, SendRequest<FrameBuf>), Status> {
    let mut last = Status::unavailable("connection lost");
    for _ in 0..2 {
        let connection = channel.connection().await?;
        match connection.sender.clone().ready().await {
            Ok(sender) => return Ok((connection, sender)),
            Err(error) => {
                connection.retire();
                last = Status::from(error);
            }
        }
    }
    Err(last)
}

fn refused_or_lost(call: &CallState, error: h2::Error) -> Status {
    if error::was_refused(&error) {
        call.mark_refused();
        return Status::unavailable("the replica takes no more calls: it is shutting down");
    }
    Status::from(error)
}

async fn receive(
    config: &ChannelConfig,
    connection: &Connection,
    call: &CallState,
    mut body: RecvStream,
) -> Result<Status, Status> {
    let mut reader = MessageReader::new(config.max_message_size);
    let mut payloads = VecDeque::new();
    loop {
        call.room().await;
        let Some(data) = body.data().await else { break };
        let data = data?;
        COUNTERS.client_bytes_received.add(data.len());
        let _ = body.flow_control().release_capacity(data.len());
        reader.push(data, &mut payloads).map_err(too_large_to_receive)?;
        if !payloads.is_empty() {
            COUNTERS.client_messages_received.add(payloads.len());
            let mut envelopes = Vec::with_capacity(payloads.len());
            for payload in payloads.drain(..) {
                envelopes.push(parse(config, connection, &payload).await?);
            }
            call.push(envelopes.into_iter());
        }
    }
    let trailers = body.trailers().await?;
    match trailers {
        Some(trailers) if reader.is_between_messages() => Ok(status_of(&trailers)),
        Some(_) => Err(Status::new(Code::INTERNAL, "the stream ended within a message")),
        None => Err(Status::new(Code::INTERNAL, "the stream ended without a status")),
    }
}

async fn parse(config: &ChannelConfig, connection: &Connection, payload: &Payload) -> Result<Envelope, Status> {
    let mut envelope = match connection.dialect {
        Dialect::Native => wire::parse_call_response(payload)?,
        Dialect::Stock => return Ok(wire::parse_stock_response(payload)?),
    };
    envelope.require_size(config.max_message_size).map_err(too_large_to_receive)?;
    lane::exchange::open(connection.exchange.as_ref(), &mut envelope).await?;
    Ok(envelope)
}

fn too_large_to_receive(error: WireError) -> Status {
    match error {
        WireError::TooLarge { size, limit } => Status::new(
            Code::RESOURCE_EXHAUSTED,
            format!(
                "the response has a message of {size} bytes, more than the {limit} bytes that \
                 RAY_SERVE_GRPC_MAX_MESSAGE_SIZE allows here"
            ),
        ),
        other => other.into(),
    }
}

pub fn http_request(config: &ChannelConfig, path: &str) -> http::Request<()> {
    let mut request = http::Request::new(());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::builder()
        .scheme("http")
        .authority("localhost")
        .path_and_query(path)
        .build()
        .expect("paths are constants");
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(authorization) = &config.authorization {
        headers.insert(header::AUTHORIZATION, authorization.clone());
    }
    request
}

pub fn require_grpc(response: &http::Response<RecvStream>) -> Result<(), Status> {
    if response.status() == http::StatusCode::OK {
        return Ok(());
    }
    Err(Status::new(Code::UNKNOWN, format!("the peer answered with HTTP status {}", response.status())))
}

fn admission_of(headers: &HeaderMap) -> Option<Admission> {
    let number = |name| headers.get(name)?.to_str().ok()?.parse::<u32>().ok();
    Some(Admission { accepted: number("accepted")? != 0, num_ongoing_requests: number("num_ongoing_requests")? })
}

/// The status of a response that has no message: its headers are its trailers.
pub fn status_in_headers(headers: &HeaderMap) -> Option<Status> {
    headers.contains_key("grpc-status").then(|| status_of(headers))
}

pub fn status_of(headers: &HeaderMap) -> Status {
    let code = headers.get("grpc-status").and_then(|value| value.to_str().ok()?.parse().ok());
    let detail = headers.get("grpc-message").map(|value| percent_decode(value.as_bytes())).unwrap_or_default();
    match code {
        Some(code) => Status::new(Code(code), detail),
        None => Status::new(Code::INTERNAL, "the stream ended without a status"),
    }
}

fn percent_decode(bytes: &[u8]) -> String {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        match escaped {
            Some(byte) => {
                out.push(byte);
                rest = &tail[2..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    (digit as char).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_status_are_percent_decoded() {
        assert_eq!(percent_decode(b"50%25 of %C3%A9%"), "50% of é%");
    }
}
