//! Lanes: what bytes travel on between two processes.

pub mod certificate;
pub mod exchange;
pub mod fds;
mod gate;
pub mod placement;
pub mod segment;
pub mod sys;
pub mod tls;
mod unix;

pub use gate::Gate;
pub use unix::{UnixPath, bind as bind_unix};

use std::fmt;
use std::io;
use std::io::IoSlice;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio_rustls::TlsStream;

/// Kernel buffers of a Unix-domain socket, bytes: a 1 MB message in one writev instead of five.
const UNIX_SOCKET_BUFFER: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Tcp,
    Unix,
}

impl Lane {
    pub fn name(self) -> &'static str {
        match self {
            Lane::Tcp => "tcp",
            Lane::Unix => "unix",
        }
    }
}

/// Where a peer listens: `tcp:host:port` (an IPv6 host in brackets) or `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Ok(Endpoint::Unix(PathBuf::from(path))),
            Some(("tcp", address)) if address.contains(':') => Ok(Endpoint::Tcp(address.to_owned())),
            _ => Err(format!("endpoint {text:?} is neither \"tcp:host:port\" nor \"unix:/path\"")),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => write!(f, "tcp:{address}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Endpoint {
    /// `tls` holds for TCP; a Unix-domain socket does not leave the node, and its peer is of this user.
    pub async fn connect(&self, tls: Option<&tls::Connector>) -> io::Result<Socket> {
        match self {
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect(address.as_str()).await?;
                stream.set_nodelay(true)?;
                Ok(Socket::new(match tls {
                    None => Stream::Tcp(stream),
                    Some(tls) => Stream::Tls(Box::new(tls.connect(address, stream).await?)),
                }))
            }
            Endpoint::Unix(path) => Socket::unix(UnixStream::connect(path).await?),
        }
    }
}

/// Where connections of one lane arrive.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Listener::Tcp(listener) => Accepted::Tcp(listener.accept().await?.0),
            Listener::Unix(listener) => Accepted::Unix(listener.accept().await?.0),
        })
    }
}

/// A connection as it was accepted: nothing is known of its peer yet.
#[derive(Debug)]
pub enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Accepted {
    pub fn lane(&self) -> Lane {
        match self {
            Accepted::Tcp(_) => Lane::Tcp,
            Accepted::Unix(_) => Lane::Unix,
        }
    }

    /// For logs.
    pub fn peer(&self) -> String {
        match self {
            Accepted::Tcp(stream) => stream.peer_addr().map_or("tcp".into(), |address| format!("tcp:{address}")),
            Accepted::Unix(stream) => match stream.peer_cred().ok().and_then(|credentials| credentials.pid()) {
                Some(pid) => format!("unix:pid {pid}"),
                None => "unix".into(),
            },
        }
    }

    /// The socket behind the lane's own checks: TLS where it is on, the peer's user.
    pub async fn secured(self, tls: Option<&tls::Acceptor>) -> io::Result<Socket> {
        match self {
            Accepted::Tcp(stream) => {
                stream.set_nodelay(true)?;
                Ok(Socket::new(match tls {
                    None => Stream::Tcp(stream),
                    Some(tls) => Stream::Tls(Box::new(tls.accept(stream).await?)),
                }))
            }
            Accepted::Unix(stream) => Socket::unix(stream),
        }
    }
}

/// A connected byte stream of any lane.
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    gate: Option<Arc<Gate>>,
    flushes: Arc<Flushes>,
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

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

impl Socket {
    fn new(stream: Stream) -> Socket {
        Socket { stream, gate: None, flushes: Arc::default() }
    }

    /// Refuses a peer that runs as another user (root excepted).
    pub fn unix(stream: UnixStream) -> io::Result<Socket> {
        unix::require_own_user(&stream)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        Ok(Socket::new(Stream::Unix(stream)))
    }

    /// What is read from here on comes through `gate`.
    /// Counts are kept in `flushes` from here on.
    #[must_use]
    pub fn counted(self, flushes: Arc<Flushes>) -> Socket {
        Socket { flushes, ..self }
    }

    #[must_use]
    pub fn gated(self, gate: Option<Arc<Gate>>) -> Socket {
        Socket { gate, ..self }
    }

    pub fn lane(&self) -> Lane {
        match self.stream {
            Stream::Tcp(_) | Stream::Tls(_) => Lane::Tcp,
            Stream::Unix(_) => Lane::Unix,
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Socket { stream, gate, .. } = self.get_mut();
        match gate {
            Some(gate) if !gate.is_open() => gate.poll_read(cx, buf, |cx, buf| Pin::new(stream).poll_read(cx, buf)),
            _ => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    // Without it h2 flattens every frame into its own buffer first.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Socket { stream, flushes, .. } = self.get_mut();
        let flushed = Pin::new(stream).poll_flush(cx);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            flushes.add();
        }
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_read_as_they_print() {
        for text in ["tcp:127.0.0.1:80", "tcp:[::1]:80", "unix:/run/a.sock"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_unknown_endpoint_is_named_in_the_error() {
        for text in ["http://x", "unix:relative", "tcp:nohost", ""] {
            assert!(text.parse::<Endpoint>().unwrap_err().contains(&format!("{text:?}")));
        }
    }
}
