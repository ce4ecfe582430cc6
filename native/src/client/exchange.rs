//! One call from its request to its trailers.

use super::{Channel, Connection, Message, Request};
use crate::call::{Admission, CallState, QUEUE_MESSAGES};
use crate::config::ChannelConfig;
use crate::error::{self, Code, Status};
use crate::lane::exchange::{AdmissionWord, Exchange as SharedMemory, Grants};
use crate::lane::{self, placement};
use crate::metrics::COUNTERS;
use crate::outcomes::{self, Outcome};
use crate::runtime;
use crate::service::{self, Dialect};
use crate::timing::{self, STAGES};
use crate::wire::{self, Backlog, Envelope, FrameBuf, MessageReader, Payload, WireError};
use bytes::{Buf, Bytes};
use h2::RecvStream;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, header};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// Runs the call to its end, whichever comes first: the peer's, or the caller's cancel. Dropping the
/// exchange resets its stream.
pub async fn run(channel: &Arc<Channel>, call: &CallState, request: Request) {
    let (method, dialect, began) = (request.method, request.message.dialect(), timing::started());
    COUNTERS.client_calls_begun.increment();
    let ended = tokio::select! {
        biased;
        () = call.cancelled() => {
            COUNTERS.client_cancels.increment();
            Status::cancelled()
        }
        ended = exchange(channel, call, request) => ended.unwrap_or_else(|status| status),
    };
    let (lane, rejected, user_error) = call.summary();
    outcomes::CALLER.count(lane, dialect, method, Outcome::of(&ended, rejected, user_error));
    if method.is_streaming() { &STAGES.call_streaming } else { &STAGES.call_unary }.since(began);
    call.finish(ended);
}

async fn exchange(channel: &Arc<Channel>, call: &CallState, request: Request) -> Result<Status, Status> {
    let (connection, sender) = ready(channel).await?;
    if connection.dialect != request.message.dialect() {
        return Err(Status::unavailable("the replica's process was replaced by one of another kind"));
    }
    let exchanged = on_connection(channel, &connection, sender, call, request).await;
    exchanged.map_err(|status| connection.failure(status))
}

async fn on_connection(
    channel: &Channel,
    connection: &Connection,
    mut sender: SendRequest<FrameBuf>,
    call: &CallState,
    request: Request,
) -> Result<Status, Status> {
    // The peer takes the call, or finds that it was given up: when this returns at the latest.
    let mut word = connection.exchange.as_ref().and_then(SharedMemory::admission_word);
    // Taken back when this returns, unless the peer took it.
    let (frames, _grants) = encode(connection, request.message, word.as_ref()).await?;
    let size = frames.remaining();
    let mut head = http_request(&channel.config, request.method.uri(connection.dialect));
    if let Some(trace) = request.trace {
        head.headers_mut().insert(service::TRACE_HEADER, trace);
    }
    let (response, mut stream) = sender.send_request(head, false)?;
    call.mark_sent(connection.lane);
    COUNTERS.client_bytes_sent.add(size);
    service::client_calls(connection.dialect, connection.lane, request.method).increment();
    let mut unread = Unread { stream: stream.stream_id().as_u32(), exchange: connection.exchange.clone() };
    if let Some(word) = &mut word {
        word.open(unread.stream);
    }
    let lost = |error| refused_or_lost(call, error, word.as_ref());
    stream.send_data(frames, true).map_err(lost)?;
    let sent = timing::started();
    let response = response.await.map_err(lost)?;
    STAGES.wire.since(sent);
    require_grpc(&response)?;
    let (head, body) = response.into_parts();
    if let Some(status) = status_in_headers(&head.headers) {
        unread.exchange = None;
        return Ok(status);
    }
    let admission = admission_of(&head.headers);
    if admission.is_some_and(|admission| !admission.accepted) {
        COUNTERS.client_rejections.increment();
    }
    let mut response = Response { config: &channel.config, connection, call, body };
    let status = if request.method.is_streaming() {
        if let Some(admission) = admission {
            call.admit(admission);
        }
        response.stream().await?
    } else {
        response.unary(admission).await?
    };
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

async fn encode(
    connection: &Connection,
    message: Message,
    word: Option<&AdmissionWord>,
) -> Result<(FrameBuf, Grants), Status> {
    let word = word.map_or(0, AdmissionWord::name);
    match (message, &connection.exchange) {
        (Message::Stock(frames), _) => Ok((frames, Grants::default())),
        (Message::Native { metadata, content }, Some(exchange)) if placement::is_worth_it(&content) => {
            let (content, grants) = placement::place(exchange, content).await;
            Ok((wire::encode_call_request(metadata, content, word)?, grants))
        }
        (Message::Native { metadata, content }, _) => {
            Ok((wire::encode_call_request(metadata, content, word)?, Grants::default()))
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
                COUNTERS.client_retries.increment();
                last = Status::from(error);
            }
        }
    }
    Err(last)
}

/// What becomes of a call whose response never began. Where it has a word, the peer does not take it after this.
fn refused_or_lost(call: &CallState, error: h2::Error, word: Option<&AdmissionWord>) -> Status {
    if word.is_some_and(|word| !word.revoke()) {
        // It took the call and was lost before it could say so. How many others it had nobody knows.
        call.admit(Admission { accepted: true, num_ongoing_requests: 1 });
    } else if error::was_refused(&error) {
        call.mark_refused();
        return Status::unavailable("the replica takes no more calls: it is shutting down");
    }
    Status::from(error)
}

/// The part of a call after the response's headers.
struct Response<'a> {
    config: &'a ChannelConfig,
    connection: &'a Connection,
    call: &'a CallState,
    body: RecvStream,
}

/// A response that follows its admission within this time is told together with it, in one wake-up. Longer, and
/// the router would learn late that the replica took the call.
const ADMISSION_PATIENCE: Duration = Duration::from_millis(1);

impl Response<'_> {
    async fn unary(&mut self, mut admission: Option<Admission>) -> Result<Status, Status> {
        let ended = self.unary_message(&mut admission).await;
        match ended {
            Ok((envelopes, status)) => {
                self.call.complete(admission, envelopes, status.clone());
                Ok(status)
            }
            Err(status) => {
                if let Some(admission) = admission {
                    self.call.admit(admission);
                }
                Err(status)
            }
        }
    }

    async fn unary_message(&mut self, admission: &mut Option<Admission>) -> Result<(Vec<Envelope>, Status), Status> {
        let mut reader = MessageReader::new(self.config.max_message_size);
        let mut payloads = VecDeque::new();
        if admission.is_some() {
            // Nothing is lost when the time is over: whatever comes is read below.
            let first = poll_fn(|cx| self.body.poll_data(cx));
            match tokio::time::timeout(ADMISSION_PATIENCE, first).await {
                Ok(Some(data)) => self.read(data?, &mut reader, &mut payloads)?,
                Ok(None) => {}
                Err(_) => {
                    if let Some(admission) = admission.take() {
                        self.call.admit(admission);
                    }
                }
            }
        }
        while let Some(data) = self.body.data().await {
            self.read(data?, &mut reader, &mut payloads)?;
        }
        let envelopes = self.parse(&mut payloads).await?;
        Ok((envelopes, self.trailers(&reader).await?))
    }

    async fn stream(&mut self) -> Result<Status, Status> {
        let mut reader = MessageReader::new(self.config.max_message_size);
        let mut payloads = VecDeque::new();
        let mut ahead = Ahead::default();
        while let Some(mut data) = self.wanted(&mut ahead).await? {
            let size = data.len();
            let pushed = reader.push_up_to(QUEUE_MESSAGES, &mut data, &mut payloads);
            self.release(size - data.len());
            pushed.map_err(too_large_to_receive)?;
            ahead.backlog.put_back(data);
            if !payloads.is_empty() {
                let envelopes = self.parse(&mut payloads).await?;
                self.call.push(envelopes);
            }
        }
        self.trailers(&reader).await
    }

    /// The next bytes once there is room for them. Until then they stay charged to flow control, but not in frames.
    async fn wanted(&mut self, ahead: &mut Ahead) -> Result<Option<Bytes>, Status> {
        loop {
            tokio::select! {
                biased;
                () = self.call.room() => break,
                data = self.body.data(), if ahead.end.is_none() => ahead.add(data),
            }
        }
        if let Some(data) = ahead.backlog.pop() {
            return Ok(Some(data));
        }
        if ahead.end.is_none() {
            match self.body.data().await {
                Some(Ok(data)) => return Ok(Some(data)),
                ended => ahead.add(ended),
            }
        }
        ahead.end.clone().unwrap_or(Ok(())).map(|()| None)
    }

    fn release(&mut self, bytes: usize) {
        COUNTERS.client_bytes_received.add(bytes);
        let _ = self.body.flow_control().release_capacity(bytes);
    }

    fn read(
        &mut self,
        data: Bytes,
        reader: &mut MessageReader,
        payloads: &mut VecDeque<Payload>,
    ) -> Result<(), Status> {
        self.release(data.len());
        reader.push(data, payloads).map_err(too_large_to_receive)?;
        if payloads.len() > 1 {
            return Err(Status::new(Code::INTERNAL, "more than one message in the answer to a unary call"));
        }
        Ok(())
    }

    async fn parse(&self, payloads: &mut VecDeque<Payload>) -> Result<Vec<Envelope>, Status> {
        COUNTERS.client_messages_received.add(payloads.len());
        let mut envelopes = Vec::with_capacity(payloads.len());
        for payload in payloads.drain(..) {
            let mut envelope = match self.connection.dialect {
                Dialect::Native => wire::parse_call_response(&payload)?,
                Dialect::Stock => wire::parse_stock_response(&payload)?,
            };
            envelope.require_size(self.config.max_message_size).map_err(too_large_to_receive)?;
            if service::is_user_error(self.connection.dialect, envelope.kind) {
                self.call.mark_user_error();
            }
            lane::exchange::open(self.connection.exchange.as_ref(), &mut envelope).await?;
            envelopes.push(envelope);
        }
        Ok(envelopes)
    }

    async fn trailers(&mut self, reader: &MessageReader) -> Result<Status, Status> {
        match self.body.trailers().await? {
            Some(trailers) if reader.is_between_messages() => Ok(status_of(&trailers)),
            Some(_) => Err(Status::new(Code::INTERNAL, "the stream ended within a message")),
            None => Err(Status::new(Code::INTERNAL, "the stream ended without a status")),
        }
    }
}

/// What came of a stream before it was wanted, and how the stream ended if it did.
#[derive(Default)]
struct Ahead {
    backlog: Backlog,
    end: Option<Result<(), Status>>,
}

impl Ahead {
    fn add(&mut self, data: Option<Result<Bytes, h2::Error>>) {
        match data {
            Some(Ok(data)) => self.backlog.push(data),
            Some(Err(error)) => self.end = Some(Err(Status::from(error))),
            None => self.end = Some(Ok(())),
        }
    }
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

pub fn http_request(config: &ChannelConfig, uri: http::Uri) -> http::Request<()> {
    let mut request = http::Request::new(());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = uri;
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
