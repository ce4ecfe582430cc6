//! A connected socket as HTTP/2 sees it: what it writes in one turn leaves together.

use super::stream::{Stream, UnixSocket};
use super::{Gate, Lane, unix};
use crate::executor;
use crate::keepalive::Signs;
use bytes::{Buf, BytesMut};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio_rustls::TlsStream;

/// Kernel buffers of a Unix-domain socket, bytes. The system's own take five writes for a message of 1 MB; larger ones
/// than this hold up the small messages behind big ones.
const UNIX_SOCKET_BUFFER: usize = 1 << 20;

/// A write of up to this many bytes is copied to those before it; a copy costs less than a system call, and a peer
/// that finds all of a turn's frames in one read wakes once.
const SMALL: usize = 16 << 10;
/// Bytes that are collected at most.
const MOST_COLLECTED: usize = 64 << 10;

/// A connected byte stream of any lane. Small writes leave at the end of a turn of its `Corked` task.
#[derive(Debug)]
pub struct Socket {
    cork: Arc<Cork>,
    gate: Option<Arc<Gate>>,
}

impl Socket {
    pub fn tcp(stream: TcpStream) -> Socket {
        Socket::new(Stream::Tcp(stream))
    }

    pub fn tls(stream: TlsStream<TcpStream>) -> Socket {
        Socket::new(Stream::Tls(Box::new(stream)))
    }

    /// Refuses a peer that runs as another user (root excepted).
    pub fn unix(stream: UnixStream) -> io::Result<Socket> {
        unix::require_own_user(&stream)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        Ok(Socket::new(Stream::Unix(UnixSocket::new(stream.into_std()?)?)))
    }

    fn new(stream: Stream) -> Socket {
        let lane = stream.lane();
        let signs = Arc::<Signs>::default();
        let stream = Watched { stream, signs: Arc::clone(&signs), waited: false };
        let state = Mutex::new(State { stream, collected: BytesMut::new(), is_blocked: false, failure: None });
        Socket { cork: Arc::new(Cork { lane, state, flushes: Arc::default(), signs }), gate: None }
    }

    /// What is read from here on comes through `gate`.
    #[must_use]
    pub fn gated(mut self, gate: Option<Arc<Gate>>) -> Socket {
        self.gate = gate;
        self
    }

    pub fn lane(&self) -> Lane {
        self.cork.lane
    }

    /// The socket closes with this end of it, whoever knows its cork.
    pub fn cork(&self) -> Weak<Cork> {
        Arc::downgrade(&self.cork)
    }

    pub fn flushes(&self) -> &Arc<Flushes> {
        &self.cork.flushes
    }

    pub fn signs(&self) -> &Arc<Signs> {
        &self.cork.signs
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Last words, where the kernel takes them at once.
        let _ = self.cork.state().poll_push(&mut Context::from_waker(Waker::noop()));
    }
}

/// Counts how often all that was to be written had been written: how somebody knows that a frame has left.
#[derive(Debug, Default)]
pub struct Flushes {
    count: AtomicU64,
    flushed: Notify,
}

impl Flushes {
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns after a flush that `count` did not count yet.
    pub async fn after(&self, count: u64) {
        loop {
            let flushed = self.flushed.notified();
            if self.count() > count {
                return;
            }
            flushed.await;
        }
    }

    fn add(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        self.flushed.notify_waiters();
    }
}

/// Holds back what is written until the task that writes ends its turn.
#[derive(Debug)]
pub struct Cork {
    lane: Lane,
    state: Mutex<State>,
    flushes: Arc<Flushes>,
    signs: Arc<Signs>,
}

/// A stream on which the peer's signs of life are counted.
#[derive(Debug)]
struct Watched {
    stream: Stream,
    signs: Arc<Signs>,
    /// A write waits for room.
    waited: bool,
}

impl Watched {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = self.stream.poll_read(cx, buf);
        if buf.filled().len() > before {
            self.signs.add();
        }
        polled
    }

    fn poll_write_vectored(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let polled = self.stream.poll_write_vectored(cx, bufs);
        if polled.is_ready() && self.waited {
            self.signs.add();
        }
        self.waited = polled.is_pending();
        polled
    }
}

#[derive(Debug)]
struct State {
    stream: Watched,
    collected: BytesMut,
    /// HTTP/2 has more to write, and waits for room.
    is_blocked: bool,
    /// Of a write at the end of a turn, for the next one.
    failure: Option<io::Error>,
}

impl Cork {
    /// The end of a turn.
    fn end_turn(&self, cx: &mut Context<'_>) {
        let mut state = self.state();
        match state.poll_push(cx) {
            Poll::Ready(Ok(())) => {
                let is_all = !state.is_blocked;
                drop(state);
                if is_all {
                    self.flushes.add();
                }
            }
            Poll::Ready(Err(error)) => {
                state.failure = Some(error);
                cx.waker().wake_by_ref();
            }
            Poll::Pending => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn poll_write(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if let Some(failure) = self.failure.take() {
            return Poll::Ready(Err(failure));
        }
        let size: usize = bufs.iter().map(|buf| buf.len()).sum();
        self.is_blocked = true;
        let written = if size > SMALL {
            ready!(self.poll_write_through(cx, bufs))?
        } else {
            if self.collected.len() + size > MOST_COLLECTED {
                ready!(self.poll_push(cx))?;
            }
            for buf in bufs {
                self.collected.extend_from_slice(buf);
            }
            size
        };
        self.is_blocked = written < size;
        Poll::Ready(Ok(written))
    }

    /// What was collected and `bufs` behind it, in one system call where the kernel takes it. Counts only `bufs`.
    fn poll_write_through(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        const MOST_PARTS: usize = 64;
        while !self.collected.is_empty() {
            let mut parts = [IoSlice::new(&[]); MOST_PARTS];
            parts[0] = IoSlice::new(&self.collected);
            let more = bufs.len().min(MOST_PARTS - 1);
            parts[1..=more].copy_from_slice(&bufs[..more]);
            let written = ready!(self.stream.poll_write_vectored(cx, &parts[..=more]))?;
            let of_collected = written.min(self.collected.len());
            require_progress(written)?;
            self.collected.advance(of_collected);
            if written > of_collected {
                return Poll::Ready(Ok(written - of_collected));
            }
        }
        self.stream.poll_write_vectored(cx, bufs)
    }

    fn poll_push(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.collected.is_empty() {
            let written = ready!(self.stream.poll_write_vectored(cx, &[IoSlice::new(&self.collected)]))?;
            require_progress(written)?;
            self.collected.advance(written);
        }
        self.stream.stream.poll_flush(cx)
    }
}

fn require_progress(written: usize) -> io::Result<()> {
    if written > 0 { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.cork.state();
        if executor::is_visiting() {
            if state.stream.stream.poll_read_ready(cx)?.is_ready() {
                executor::leave(cx.waker());
            }
            return Poll::Pending;
        }
        match &self.gate {
            Some(gate) if !gate.is_open() => gate.poll_read(cx, buf, |cx, buf| state.stream.poll_read(cx, buf)),
            _ => state.stream.poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.cork.state().poll_write(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.cork.state().poll_write(cx, bufs)
    }

    // Without it h2 flattens every frame into its own buffer first.
    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Nothing leaves before the turn's end: h2 flushes after every frame.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.cork.state();
        ready!(state.poll_push(cx))?;
        state.stream.stream.poll_shutdown(cx)
    }
}

/// The task of a connection: each time that it was polled, what it wrote leaves.
pub struct Corked<F> {
    task: Pin<Box<F>>,
    cork: Weak<Cork>,
}

impl<F: Future> Corked<F> {
    pub fn new(task: F, cork: Weak<Cork>) -> Self {
        Corked { task: Box::pin(task), cork }
    }
}

impl<F: Future> Future for Corked<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let polled = self.task.as_mut().poll(cx);
        if let Some(cork) = self.cork.upgrade() {
            cork.end_turn(cx);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;

    fn pair() -> (Socket, UnixStream) {
        let (one, other) = UnixStream::pair().unwrap();
        (Socket::unix(one).unwrap(), other)
    }

    fn in_runtime<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    async fn write(socket: &mut Socket, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = poll_fn(|cx| Pin::new(&mut *socket).poll_write(cx, bytes)).await.unwrap();
            bytes = &bytes[count..];
        }
    }

    #[test]
    fn small_writes_leave_together_at_the_end_of_a_turn() {
        in_runtime(async {
            let (mut socket, mut peer) = pair();
            let cork = socket.cork();
            let turn = async {
                write(&mut socket, b"one, ").await;
                write(&mut socket, b"two").await;
                assert_eq!(peer.try_read(&mut [0; 16]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            };
            Corked::new(turn, cork).await;
            let mut read = [0; 16];
            let count = peer.read(&mut read).await.unwrap();
            assert_eq!(&read[..count], b"one, two");
            assert_eq!(socket.flushes().count(), 1);
        });
    }

    #[test]
    fn big_and_small_writes_keep_their_order_when_the_peer_is_slow() {
        in_runtime(async {
            let (mut socket, mut peer) = pair();
            let cork = socket.cork();
            let sizes = [10, SMALL, 3 << 20, 5, SMALL + 1, 6 << 20, 1, SMALL, SMALL, SMALL, SMALL, 7];
            let sent: Vec<u8> = sizes.iter().enumerate().flat_map(|(i, size)| vec![i as u8; *size]).collect();
            let expected = sent.clone();
            let writer = async move {
                let mut rest = &sent[..];
                for size in sizes {
                    let (now, later) = rest.split_at(size);
                    write(&mut socket, now).await;
                    rest = later;
                }
                poll_fn(|cx| Pin::new(&mut socket).poll_shutdown(cx)).await.unwrap();
            };
            let writer = tokio::spawn(Corked::new(writer, cork));
            tokio::task::yield_now().await;
            let mut received = Vec::new();
            peer.read_to_end(&mut received).await.unwrap();
            writer.await.unwrap();
            assert!(received == expected);
        });
    }

    #[test]
    fn a_write_that_fails_at_the_end_of_a_turn_fails_the_next_one() {
        in_runtime(async {
            let (mut socket, peer) = pair();
            let cork = socket.cork();
            drop(peer);
            let task = async {
                write(&mut socket, b"lost").await;
                tokio::task::yield_now().await;
                poll_fn(|cx| Pin::new(&mut socket).poll_write(cx, b"more")).await
            };
            let ended = Corked::new(task, cork).await;
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        });
    }
}
