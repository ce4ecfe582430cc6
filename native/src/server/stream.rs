//! One stream of a connection, from its headers to its trailers.

use super::{ServerCall, Shared};
use crate::config::ServerConfig;
use crate::error::{Code, Status};
use crate::lane::Lane;
use crate::metrics::COUNTERS;
use crate::server::call::Batch;
use crate::service::{self, Dialect, Method};
use crate::wire::{self, Envelope, FrameBuf, MessageReader, WireError};
use bytes::Buf;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, header};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use subtle::ConstantTimeEq;

pub async fn serve(
    shared: &Arc<Shared>,
    lane: Lane,
    peer: Arc<str>,
    request: http::Request<RecvStream>,
    mut respond: SendResponse<FrameBuf>,
) {
    let admitted =
        require_authorization(&shared.config, request.headers()).and_then(|()| require_grpc(request.headers()));
    if let Err(status) = admitted {
        return refuse(&mut respond, &status);
    }
    let Some((dialect, method)) = Method::of_path(request.uri().path()) else {
        return shared.small.serve(request, respond).await;
    };
    let envelope = tokio::select! {
        // The caller may give up before its request is complete.
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
        envelope = read_request(&shared.config, dialect, request.into_body()) => envelope,
    };
    let envelope = match envelope {
        Ok(envelope) => envelope,
        Err(status) => return refuse(&mut respond, &status),
    };
    service::server_calls(dialect, lane, method).increment();
    let call = Arc::new(ServerCall::new(method, dialect, lane, peer, envelope));
    shared.calls.fetch_add(1, Ordering::Relaxed);
    shared.handler.incoming(Arc::clone(&call));
    if let Err(End::Lost) = answer(&call, respond).await {
        COUNTERS.server_cancels.increment();
        call.mark_cancelled();
    }
    shared.calls.fetch_sub(1, Ordering::Relaxed);
}

/// Compares in constant time, before anything of the body is read.
fn require_authorization(config: &ServerConfig, headers: &HeaderMap) -> Result<(), Status> {
    let Some(expected) = &config.authorization else { return Ok(()) };
    let given = headers.get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
    if given.ct_eq(expected.as_bytes()).into() {
        return Ok(());
    }
    COUNTERS.server_unauthenticated.increment();
    Err(Status::new(Code::UNAUTHENTICATED, "Invalid or missing authentication token"))
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

async fn read_request(config: &ServerConfig, dialect: Dialect, mut body: RecvStream) -> Result<Envelope, Status> {
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
    Ok(match dialect {
        Dialect::Native => wire::parse_call_request(&payload)?,
        Dialect::Stock => wire::parse_fields(&payload)?,
    })
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

async fn answer(call: &ServerCall, mut respond: SendResponse<FrameBuf>) -> Result<(), End> {
    let mut stream: Option<SendStream<FrameBuf>> = None;
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
            return Ok(());
        }
        let open = match &mut stream {
            Some(open) => open,
            none => none.insert(respond.send_response(headers(batch.headers), false)?),
        };
        if let Some((false, _)) = batch.headers {
            COUNTERS.server_rejections.increment();
        }
        if batch.frames.has_remaining() {
            COUNTERS.server_bytes_sent.add(batch.frames.remaining());
            COUNTERS.server_messages_sent.add(batch.messages);
            let is_last = batch.end.is_some();
            open.send_data(batch.frames, false)?;
            if !is_last {
                flow(open).await?;
            }
            call.mark_written();
        }
        if let Some(status) = batch.end {
            open.send_trailers(trailers(&status))?;
            return Ok(());
        }
    }
}

/// A call that failed before it said anything needs no headers of its own.
fn trailers_only(batch: &Batch) -> Option<&Status> {
    let nothing_else = batch.headers.is_none() && !batch.frames.has_remaining();
    batch.end.as_ref().filter(|end| nothing_else && end.code != Code::OK)
}

/// Waits until the peer and the socket have taken enough that another message may follow.
async fn flow(stream: &mut SendStream<FrameBuf>) -> Result<(), End> {
    stream.reserve_capacity(1);
    let granted = poll_fn(|cx| {
        if stream.capacity() > 0 {
            return std::task::Poll::Ready(Some(Ok(1)));
        }
        stream.poll_capacity(cx)
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
    if !status.detail.is_empty() {
        if let Ok(message) = HeaderValue::from_str(&percent_encode(&status.detail)) {
            trailers.insert("grpc-message", message);
        }
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
