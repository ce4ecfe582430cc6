//! The side socket of a Unix-domain connection: passes the descriptors of shared memory.
//!
//! Records of 16 bytes, each with at most one descriptor. The first one of each side is HELLO, with its
//! control page; the client's carries the nonce that its HTTP/2 connection names in the Handshake.

use super::exchange::{Control, Exchange, Peer};
use super::shortage::{self, Cause};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, recvmsg, sendmsg, shutdown,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

const RECORD: usize = 16;
const HELLO: u32 = 1;
const SEGMENT: u32 = 2;
const FORGET: u32 = 3;
const ABANDON: u32 = 4;
const CONFIRM: u32 = 5;
const REFUSE: u32 = 6;
const RETURN: u32 = 7;

const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// What ties a side socket to its HTTP/2 connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nonce(u64);

impl Nonce {
    pub fn random() -> io::Result<Nonce> {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok(Nonce(u64::from_le_bytes(bytes)))
    }

    pub fn to_text(self) -> String {
        format!("{:016x}", self.0)
    }

    pub fn from_text(text: &str) -> Option<Nonce> {
        u64::from_str_radix(text, 16).ok().map(Nonce)
    }
}

/// Where the side socket of a server listens.
pub fn path_of(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".fds");
    PathBuf::from(path)
}

pub struct Record {
    kind: u32,
    id: u32,
    value: u64,
}

impl Record {
    fn to_bytes(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; RECORD]) -> Record {
        let [k0, k1, k2, k3, i0, i1, i2, i3, value @ ..] = bytes;
        Record {
            kind: u32::from_le_bytes([k0, k1, k2, k3]),
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            value: u64::from_le_bytes(value),
        }
    }
}

/// Sends records from any thread. Never waits: what does not fit into the socket's buffer is refused.
#[derive(Debug)]
pub struct Sender(Arc<UnixStream>);

impl Sender {
    pub fn segment(&self, id: u32, size: u64, file: BorrowedFd<'_>) -> io::Result<()> {
        send(&self.0, &Record { kind: SEGMENT, id, value: size }, Some(file))
    }

    pub fn hello(&self, record: &Record, control: &Control) -> io::Result<()> {
        send(&self.0, record, Some(control.file()))
    }

    pub fn forget(&self, id: u32) -> io::Result<()> {
        send(&self.0, &Record { kind: FORGET, id, value: 0 }, None)
    }

    /// Whether the segment's descriptor arrived.
    pub fn answer(&self, id: u32, has: bool) -> io::Result<()> {
        send(&self.0, &Record { kind: if has { CONFIRM } else { REFUSE }, id, value: 0 }, None)
    }

    pub fn abandon(&self, stream: u32) -> io::Result<()> {
        send(&self.0, &Record { kind: ABANDON, id: stream, value: 0 }, None)
    }

    pub fn returned(&self, slot: u32) -> io::Result<()> {
        send(&self.0, &Record { kind: RETURN, id: slot, value: 0 }, None)
    }

    pub fn close(&self) {
        let _ = shutdown(&*self.0, Shutdown::Both);
    }
}

fn send(socket: &UnixStream, record: &Record, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = record.to_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    if sent == RECORD {
        return Ok(());
    }
    // Half a record cannot be taken back: the peer would misread all that follows.
    let _ = shutdown(socket, Shutdown::Both);
    Err(io::ErrorKind::WriteZero.into())
}

/// None at the end of the stream.
async fn receive(socket: &UnixStream) -> io::Result<Option<(Record, Option<OwnedFd>)>> {
    let mut bytes = [0; RECORD];
    let mut have = 0;
    let mut file = None;
    while have < RECORD {
        let part = &mut bytes[have..];
        let got = socket
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
                let mut ancillary = RecvAncillaryBuffer::new(&mut space);
                let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
                let received = recvmsg(socket.as_fd(), &mut [IoSliceMut::new(part)], &mut ancillary, flags)?;
                for message in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(files) = message {
                        file = files.last().or(file.take());
                    }
                }
                Ok(received.bytes)
            })
            .await?;
        if got == 0 {
            return Ok(None);
        }
        have += got;
    }
    Ok(Some((Record::from_bytes(bytes), file)))
}

/// The client's end: both sides say HELLO.
pub async fn connect(path: &Path, nonce: Nonce) -> io::Result<Arc<Exchange>> {
    let socket = UnixStream::connect(path).await?;
    super::unix::require_own_user(&socket)?;
    let control = Control::new()?;
    send(&socket, &Record { kind: HELLO, id: 0, value: nonce.0 }, Some(control.file()))?;
    let (_, peer_control) = timeout(HELLO_TIMEOUT, hello(&socket)).await??;
    start(socket, control, peer_control)
}

/// The server's end. The exchange is registered before the client hears of it: its Handshake comes next.
pub async fn accept(socket: UnixStream, register: impl FnOnce(Nonce, Arc<Exchange>)) -> io::Result<()> {
    super::unix::require_own_user(&socket)?;
    let (nonce, peer_control) = timeout(HELLO_TIMEOUT, hello(&socket)).await??;
    let control = Control::new()?;
    let greeting = Record { kind: HELLO, id: 0, value: nonce.0 };
    let exchange = start(socket, control, peer_control)?;
    register(nonce, Arc::clone(&exchange));
    exchange.greet(&greeting)
}

async fn hello(socket: &UnixStream) -> io::Result<(Nonce, Control)> {
    match receive(socket).await? {
        Some((Record { kind: HELLO, value, .. }, Some(file))) => Ok((Nonce(value), Control::of_peer(file)?)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the peer did not say HELLO")),
    }
}

fn start(socket: UnixStream, control: Control, peer_control: Control) -> io::Result<Arc<Exchange>> {
    let pid = socket.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or_default();
    let socket = Arc::new(socket);
    let exchange = Exchange::new(control, peer_control, Sender(Arc::clone(&socket)), Peer::new(pid));
    tokio::spawn(read(socket, Arc::downgrade(&exchange)));
    Ok(exchange)
}

/// Takes in what the peer announces, until either end goes.
async fn read(socket: Arc<UnixStream>, exchange: Weak<Exchange>) {
    while let Ok(Some((record, file))) = receive(&socket).await {
        let Some(exchange) = exchange.upgrade() else { return };
        match (record.kind, file) {
            (SEGMENT, Some(file)) => {
                if let Err(error) = exchange.add_borrowed(record.id, record.value, file) {
                    tracing::warn!(%error, "a peer's shared memory was refused");
                    break;
                }
                exchange.answer(record.id, true);
            }
            // The system had no room for it in this process's table.
            (SEGMENT, None) => {
                shortage::tell(Cause::Descriptor);
                exchange.answer(record.id, false);
            }
            (CONFIRM, _) => exchange.answered(record.id, true),
            (REFUSE, _) => exchange.answered(record.id, false),
            (FORGET, _) => exchange.forget_borrowed(record.id),
            (ABANDON, _) => exchange.take_back(record.id),
            (RETURN, _) => exchange.collect(),
            _ => {}
        }
    }
    if let Some(exchange) = exchange.upgrade() {
        exchange.close();
    }
}
