//! The byte streams that the lanes are made of.

use super::{Lane, sys};
use std::future::Future;
use std::io::{self, IoSlice, Write};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;
use tokio_rustls::TlsStream;

#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixSocket),
}

impl Stream {
    pub fn lane(&self) -> Lane {
        match self {
            Stream::Tcp(_) | Stream::Tls(_) => Lane::Tcp,
            Stream::Unix(_) => Lane::Unix,
        }
    }

    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Unix(socket) => socket.poll_read(cx, buf),
        }
    }

    /// Whether a read would bring something; if not, the task is woken when one would.
    pub fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Stream::Tcp(stream) => stream.poll_read_ready(cx),
            Stream::Tls(_) => Poll::Ready(Ok(())),
            Stream::Unix(socket) => socket.readable.poll_read_ready(cx).map_ok(drop),
        }
    }

    pub fn poll_write_vectored(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Unix(socket) => socket.poll_write_vectored(cx, bufs),
        }
    }

    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Unix(_) => Poll::Ready(Ok(())),
        }
    }

    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(socket) => Poll::Ready(socket.shutdown()),
        }
    }
}

/// A Unix-domain socket that asks to be told of room for writes only when it had none.
///
/// The kernel tells of room after each read of the peer, whether or not there was a lack of it: registered for both,
/// as tokio's own is, a socket wakes its thread up to three times a call for nothing.
#[derive(Debug)]
pub struct UnixSocket {
    readable: AsyncFd<UnixStream>,
    /// What a write waits for.
    room: Option<Room>,
}

#[derive(Debug)]
enum Room {
    /// The same socket, registered for writes.
    Told(AsyncFd<UnixStream>),
    /// Where no descriptor is left for that.
    Looked(Pin<Box<Sleep>>),
}

const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(1);

impl Room {
    fn of(socket: &UnixStream) -> Room {
        match socket.try_clone().and_then(|same| sys::watched(same, Interest::WRITABLE)) {
            Ok(writable) => Room::Told(writable),
            Err(_) => Room::Looked(Box::pin(tokio::time::sleep(LOOK_AGAIN_AFTER))),
        }
    }
}

impl UnixSocket {
    pub fn new(stream: UnixStream) -> io::Result<UnixSocket> {
        stream.set_nonblocking(true)?;
        Ok(UnixSocket { readable: sys::watched(stream, Interest::READABLE)?, room: None })
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.readable.poll_read_ready(cx))?;
            let room = buf.remaining();
            match guard.try_io(|socket| sys::receive(socket.get_ref(), buf)) {
                Ok(Ok(count)) => {
                    if count > 0 && count < room {
                        // There is no more; the next read would only find that out.
                        guard.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_would_block) => {}
            }
        }
    }

    fn poll_write_vectored(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            match &mut self.room {
                None => {}
                Some(Room::Told(writable)) => {
                    let mut guard = ready!(writable.poll_write_ready(cx))?;
                    match guard.try_io(|socket| socket.get_ref().write_vectored(bufs)) {
                        Ok(written) => {
                            self.room = None;
                            return Poll::Ready(written);
                        }
                        Err(_would_block) => continue,
                    }
                }
                Some(Room::Looked(later)) => ready!(later.as_mut().poll(cx)),
            }
            self.room = None;
            match self.readable.get_ref().write_vectored(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.room = Some(Room::of(self.readable.get_ref()));
                }
                written => return Poll::Ready(written),
            }
        }
    }

    fn shutdown(&self) -> io::Result<()> {
        match self.readable.get_ref().shutdown(std::net::Shutdown::Write) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
            _ => Ok(()),
        }
    }
}
