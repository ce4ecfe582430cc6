//! How much a peer may send before it has shown who it is.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::io::ReadBuf;

/// Lets `allowance` bytes through until it is opened. More waits in the kernel, and so with its sender.
#[derive(Debug)]
pub struct Gate {
    is_open: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    allowance: usize,
    waiting: Option<Waker>,
}

impl Gate {
    pub fn new(allowance: usize) -> Self {
        Gate { is_open: AtomicBool::new(false), state: Mutex::new(State { allowance, waiting: None }) }
    }

    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    pub fn open(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_open.store(true, Ordering::Release);
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waker) = waiting {
            waker.wake();
        }
    }

    /// What `read` does, with as much room as is left of the allowance.
    pub fn poll_read(
        &self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        read: impl FnOnce(&mut Context<'_>, &mut ReadBuf<'_>) -> Poll<io::Result<()>>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_open() {
            drop(state);
            return read(cx, buf);
        }
        if state.allowance == 0 {
            state.waiting = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let room = state.allowance.min(buf.remaining());
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        let polled = read(cx, &mut part);
        let read = part.filled().len();
        state.allowance -= read;
        buf.advance(read);
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(gate: &Gate, room: usize) -> Poll<usize> {
        let mut memory = vec![0; room];
        let mut buf = ReadBuf::new(&mut memory);
        let mut cx = Context::from_waker(Waker::noop());
        let polled = gate.poll_read(&mut cx, &mut buf, |_, buf| {
            buf.put_slice(&vec![7; buf.remaining()]);
            Poll::Ready(Ok(()))
        });
        polled.map(|_| buf.filled().len())
    }

    #[test]
    fn the_allowance_is_all_that_comes_through_until_it_is_opened() {
        let gate = Gate::new(10);
        assert_eq!(read(&gate, 6), Poll::Ready(6));
        assert_eq!(read(&gate, 6), Poll::Ready(4));
        assert_eq!(read(&gate, 6), Poll::Pending);
        gate.open();
        assert_eq!(read(&gate, 6), Poll::Ready(6));
    }
}
