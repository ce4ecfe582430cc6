//! Lanes: what bytes travel on between two processes.

pub mod exchange;
pub mod fds;
pub mod placement;
pub mod segment;
pub mod sys;
mod unix;

pub use unix::{UnixPath, bind as bind_unix};

use std::fmt;
use std::io;
use std::io::IoSlice;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

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
    pub async fn connect(&self) -> io::Result<Socket> {
        match self {
            Endpoint::Tcp(address) => Socket::tcp(TcpStream::connect(address.as_str()).await?),
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
    pub async fn accept(&self) -> io::Result<Socket> {
        match self {
            Listener::Tcp(listener) => Socket::tcp(listener.accept().await?.0),
            Listener::Unix(listener) => Socket::unix(listener.accept().await?.0),
        }
    }
}

/// A connected byte stream of any lane.
#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub fn tcp(stream: TcpStream) -> io::Result<Socket> {
        stream.set_nodelay(true)?;
        Ok(Socket::Tcp(stream))
    }

    /// Refuses a peer that runs as another user (root excepted).
    pub fn unix(stream: UnixStream) -> io::Result<Socket> {
        unix::require_own_user(&stream)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&stream, UNIX_SOCKET_BUFFER)?;
        Ok(Socket::Unix(stream))
    }

    pub fn lane(&self) -> Lane {
        match self {
            Socket::Tcp(_) => Lane::Tcp,
            Socket::Unix(_) => Lane::Unix,
        }
    }

    pub fn peer(&self) -> String {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().map_or_else(|_| "tcp".into(), |address| format!("tcp:{address}")),
            Socket::Unix(stream) => match stream.peer_cred().ok().and_then(|credentials| credentials.pid()) {
                Some(pid) => format!("unix:pid {pid}"),
                None => "unix".into(),
            },
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Socket::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Socket::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Socket::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    // Without it h2 flattens every frame into its own buffer first.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Socket::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Socket::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
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
