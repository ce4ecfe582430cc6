//! Brings completions from the I/O thread to one event loop: a queue, an eventfd and an armed flag.

use super::memory;
use super::server::CallHandler;
use crate::batch::Batch;
use crate::metrics::COUNTERS;
use crate::server::ServerCall;
use crate::signal::{Signal, Waiter};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use slab::Slab;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// See `_native.pyi`.
#[pyclass(frozen, module = "ray_serve_grpc._native")]
pub struct Bridge {
    inner: Arc<Inner>,
}

/// Whoever is told by this bridge.
enum Watched {
    Future(Py<PyAny>),
    Callback(Py<PyAny>),
}

/// What Python is to call, and its arguments; without any, a future that is to be resolved.
pub type Told = (Py<PyAny>, Option<Py<PyTuple>>);

impl Watched {
    fn told(self, py: Python<'_>) -> Told {
        match self {
            Watched::Future(future) => (future, None),
            Watched::Callback(callback) => (callback, Some(PyTuple::empty(py).unbind())),
        }
    }
}

enum Ready {
    Token(usize),
    Incoming(Arc<CallHandler>, Arc<ServerCall>),
    Notice(Arc<CallHandler>, String),
}

pub struct Inner {
    eventfd: OwnedFd,
    /// Bounded by what is watched and by the streams that peers may open.
    ready: Batch<Ready>,
    watched: Mutex<Slab<Watched>>,
    /// Forgotten objects, dropped where the GIL is held.
    forgotten: Mutex<Vec<Watched>>,
    wakeups: AtomicU64,
    completions: AtomicU64,
}

/// The bridges of this process.
static BRIDGES: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Has each event loop look at its bridge.
pub fn wake_all() {
    lock(&BRIDGES).iter().filter_map(Weak::upgrade).for_each(|inner| inner.wake());
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    pub fn push_incoming(&self, handler: Arc<CallHandler>, call: Arc<ServerCall>) {
        self.push(Ready::Incoming(handler, call));
    }

    pub fn push_notice(&self, handler: Arc<CallHandler>, text: String) {
        self.push(Ready::Notice(handler, text));
    }

    fn push(&self, ready: Ready) {
        match self.ready.push(ready) {
            Ok(false) => {}
            Ok(true) => self.wake(),
            Err(ready) => ready.abandon(),
        }
    }

    fn wake(&self) {
        // Fails only if the counter is full, and then the loop is awake.
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Ready> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.eventfd, &mut count);
        self.ready.take()
    }
}

impl Ready {
    /// Nobody will handle it.
    fn abandon(self) {
        if let Ready::Incoming(_, call) = self {
            call.abandon();
        }
    }
}

impl Signal for Inner {
    fn fire(&self, token: usize) {
        self.push(Ready::Token(token));
    }

    fn discard(&self, token: usize) {
        let watched = lock(&self.watched).try_remove(token);
        lock(&self.forgotten).extend(watched);
    }
}

impl Bridge {
    pub fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub fn watch_future(&self, future: Bound<'_, PyAny>) -> Waiter {
        self.watch(Watched::Future(future.unbind()))
    }

    pub fn watch_callback(&self, callback: Bound<'_, PyAny>) -> Waiter {
        self.watch(Watched::Callback(callback.unbind()))
    }

    fn watch(&self, watched: Watched) -> Waiter {
        let token = lock(&self.inner.watched).insert(watched);
        Waiter::new(Arc::clone(&self.inner) as Arc<dyn Signal>, token)
    }
}

#[pymethods]
impl Bridge {
    #[new]
    fn new() -> PyResult<Self> {
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let inner = Arc::new(Inner {
            eventfd,
            ready: Batch::default(),
            watched: Mutex::default(),
            forgotten: Mutex::default(),
            wakeups: AtomicU64::new(0),
            completions: AtomicU64::new(0),
        });
        let mut bridges = lock(&BRIDGES);
        bridges.retain(|bridge| bridge.strong_count() > 0);
        bridges.push(Arc::downgrade(&inner));
        Ok(Bridge { inner })
    }

    fn fileno(&self) -> i32 {
        self.inner.eventfd.as_raw_fd()
    }

    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let batch = self.inner.take();
        self.inner.wakeups.fetch_add(1, Ordering::Relaxed);
        self.inner.completions.fetch_add(batch.len() as u64, Ordering::Relaxed);
        COUNTERS.bridge_wakeups.increment();
        COUNTERS.bridge_completions.add(batch.len());
        let told = PyList::empty(py);
        for ready in batch {
            let told_next = match ready {
                Ready::Token(token) => {
                    let watched = lock(&self.inner.watched).try_remove(token);
                    watched.map(|watched| watched.told(py))
                }
                Ready::Incoming(handler, call) => handler.handed(py, call),
                Ready::Notice(handler, text) => handler.told(py, &text),
            };
            if let Some(told_next) = told_next {
                told.append(told_next)?;
            }
        }
        let forgotten = std::mem::take(&mut *lock(&self.inner.forgotten));
        drop(forgotten);
        memory::sweep(py);
        Ok(told)
    }

    fn close(&self) {
        self.inner.ready.close().into_iter().for_each(Ready::abandon);
        let watched = std::mem::take(&mut *lock(&self.inner.watched));
        drop(watched);
        let forgotten = std::mem::take(&mut *lock(&self.inner.forgotten));
        drop(forgotten);
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let watched = lock(&self.inner.watched).len() as u64;
        super::counters_dict(
            py,
            [
                ("wakeups", self.inner.wakeups.load(Ordering::Relaxed)),
                ("completions", self.inner.completions.load(Ordering::Relaxed)),
                ("watched", watched),
            ],
        )
    }
}
