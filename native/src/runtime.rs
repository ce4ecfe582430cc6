//! The tokio runtime of this process, made on first use.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::runtime::{Builder, Handle, Runtime};

/// How many forks lie between the process that loaded the core and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Runtimes are leaked, never dropped: dropping one would join its thread, and a child of fork has no such thread.
static RUNTIME: Mutex<Option<(u64, &'static Runtime)>> = Mutex::new(None);

/// Whether threads and connections made in `generation` exist in this process.
pub fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// To be called in the child of a fork, before it uses anything else of the core.
pub fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

pub fn handle() -> Handle {
    let now = generation();
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    match *runtime {
        Some((made_in, runtime)) if made_in == now => runtime.handle().clone(),
        _ => {
            let fresh = Box::leak(Box::new(build()));
            *runtime = Some((now, fresh));
            fresh.handle().clone()
        }
    }
}

static ASLEEP: AtomicBool = AtomicBool::new(false);

/// Whether the I/O thread waits for something to happen.
pub fn is_asleep() -> bool {
    ASLEEP.load(Ordering::Relaxed)
}

fn build() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("ray-serve-grpc")
        .on_thread_park(|| ASLEEP.store(true, Ordering::Relaxed))
        .on_thread_unpark(|| ASLEEP.store(false, Ordering::Relaxed))
        .enable_all()
        .build()
        .expect("a thread and an epoll instance for the I/O of ray_serve_grpc")
}

/// Something that must not be used across a fork: the child gets a fresh one.
pub struct PerProcess<T> {
    current: Mutex<(u64, Arc<T>)>,
    make: Box<dyn Fn() -> T + Send + Sync>,
}

impl<T> PerProcess<T> {
    pub fn new(make: impl Fn() -> T + Send + Sync + 'static) -> Self {
        PerProcess { current: Mutex::new((generation(), Arc::new(make()))), make: Box::new(make) }
    }

    pub fn current(&self) -> Arc<T> {
        let now = generation();
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != now {
            let abandoned = std::mem::replace(&mut *current, (now, Arc::new((self.make)())));
            // Its locks may be held by threads that stayed in the parent.
            std::mem::forget(abandoned);
        }
        Arc::clone(&current.1)
    }
}
