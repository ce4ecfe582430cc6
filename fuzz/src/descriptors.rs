//! A peer on the side socket of shared memory that says anything: records of any content, descriptors of any size and
//! seals, lease words of any value, messages that name any of it. What is opened can be read to its last byte.

use bytes::Bytes;
use ray_serve_grpc_native::lane::exchange::{self, Exchange};
use ray_serve_grpc_native::lane::fds;
use ray_serve_grpc_native::lane::sys::Region;
use ray_serve_grpc_native::wire::{Envelope, Payload, parse_call_request};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::future::poll_fn;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use tokio::net::UnixStream;

const HELLO: u32 = 1;
const SEGMENT: u32 = 2;
/// Of a control page: 1,024 leases and 4,096 admissions of four bytes.
const CONTROL_BYTES: u64 = 5120 * 4;
const MOST_RECORDS: usize = 12;

pub fn run(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(attack(Chance(data)));
}

/// The fuzzer's bytes, one decision after the other; zeros when they are used up.
struct Chance<'a>(&'a [u8]);

impl Chance<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> u64 {
        let shift = self.byte() % 48;
        (u64::from(self.byte()) << 8 | u64::from(self.byte())) << shift
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = usize::from(self.byte()).min(self.0.len());
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken.to_vec()
    }
}

async fn attack(mut chance: Chance<'_>) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    let found: Arc<Mutex<Option<Arc<Exchange>>>> = Arc::default();
    let register = {
        let found = Arc::clone(&found);
        move |_, exchange| *found.lock().expect("not poisoned") = Some(exchange)
    };
    let accepted = tokio::spawn(fds::accept(ours, register));
    let control = match chance.byte() {
        0 => memory(chance.number().min(1 << 20), chance.byte()),
        _ => memory(CONTROL_BYTES, 0),
    };
    send(&theirs, HELLO, 0, chance.number(), Some(&control));
    let mut segments: Vec<OwnedFd> = Vec::new();
    for _ in 0..chance.byte() as usize % MOST_RECORDS {
        match chance.byte() % 4 {
            0 => {
                let file = memory(4096 + (chance.number() & 0xf_ffff), 0);
                send(&theirs, SEGMENT, u32::from(chance.byte() % 4), 4096, Some(&file));
                segments.push(file);
            }
            1 => {
                let file = memory(chance.number(), chance.byte());
                send(&theirs, SEGMENT, u32::from(chance.byte() % 4), chance.number(), Some(&file));
                segments.push(file);
            }
            _ => send(&theirs, u32::from(chance.byte() % 8), u32::from(chance.byte()), chance.number(), None),
        }
    }
    let _ = accepted.await;
    let Some(exchange) = found.lock().expect("not poisoned").take() else { return };
    tokio::time::sleep(Duration::from_millis(1)).await;
    // What was announced can be cut off no more.
    for segment in &segments {
        let _ = ftruncate(segment, 0);
    }
    let mut held: Vec<Envelope> = Vec::new();
    while !chance.0.is_empty() && held.len() < 16 {
        if chance.byte().is_multiple_of(2) {
            let word = u64::from(chance.byte()) | u64::from(chance.byte() % 32) << 8;
            let _ = pwrite(&control, &u32::from(chance.byte()).to_le_bytes(), word * 4);
            continue;
        }
        let payload = Payload::Small(Bytes::from(chance.bytes()));
        let Ok(mut envelope) = parse_call_request(&payload) else { continue };
        exchange.take_admission(envelope.admission_word, u32::MAX);
        if envelope.require_size(1 << 24).is_err() || !opened(&exchange, &mut envelope).await {
            continue;
        }
        read_all(&envelope);
        held.push(envelope);
    }
    exchange.take_back(chance.byte().into());
    exchange.close();
    // What was received stays readable.
    held.iter().for_each(read_all);
}

/// False also when it would wait for a segment that was not announced.
async fn opened(exchange: &Arc<Exchange>, envelope: &mut Envelope) -> bool {
    let mut opening = std::pin::pin!(exchange::open(Some(exchange), envelope));
    poll_fn(|cx| Poll::Ready(matches!(opening.as_mut().poll(cx), Poll::Ready(Ok(()))))).await
}

fn read_all(envelope: &Envelope) {
    let buffers = envelope.buffers.iter().map(Region::as_slice);
    let sum: u64 = buffers.chain([envelope.body.as_slice()]).flatten().map(|byte| u64::from(*byte)).sum();
    std::hint::black_box(sum);
}

/// Sealed as it should be when `seals` is 0.
fn memory(size: u64, seals: u8) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memory file");
    let _ = ftruncate(&file, size);
    let mut wanted = SealFlags::empty();
    for (bit, seal) in [(1, SealFlags::SHRINK), (2, SealFlags::GROW), (4, SealFlags::FUTURE_WRITE)] {
        if seals & bit == 0 {
            wanted |= seal;
        }
    }
    if seals == 0 {
        wanted = SealFlags::SHRINK | SealFlags::GROW;
    }
    let _ = fcntl_add_seals(&file, wanted);
    file
}

fn send(socket: &UnixStream, kind: u32, id: u32, value: u64, file: Option<&OwnedFd>) {
    let mut record = Vec::with_capacity(16);
    record.extend(kind.to_le_bytes());
    record.extend(id.to_le_bytes());
    record.extend(value.to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.map(AsFd::as_fd).into_iter().collect();
    if !files.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
    }
    // Refused when the other end has hung up.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let _ = sendmsg(socket.as_fd(), &[IoSlice::new(&record)], &mut ancillary, flags);
}
