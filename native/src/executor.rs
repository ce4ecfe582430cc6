//! The tasks of one connection. The I/O thread runs them; while it sleeps, a thread that has something small to send
//! runs them itself, which spares the wake-up that handing it over would cost.

use crate::runtime;
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// Tasks that the I/O thread runs before it looks after other connections, and that another thread runs at most.
const TURN: usize = 256;
const VISIT: usize = 16;

/// Bytes that another thread sends at most: more would keep it from its own work.
const SMALL: usize = 256 << 10;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Of one connection.
pub struct Tasks {
    /// Held by whoever runs them.
    running: Mutex<Slab<Running>>,
    /// New and woken ones. Bounded by the tasks that there are, each of which is in it once.
    ready: Mutex<Ready>,
    /// Somebody found them being run: they are to be run again.
    missed: AtomicBool,
    /// Whether other threads may run them.
    open_to_visits: bool,
    generation: u64,
}

#[derive(Default)]
struct Ready {
    queue: VecDeque<Entry>,
    /// Of the task of the runtime that runs these.
    runner: Option<Waker>,
    ended: bool,
}

enum Entry {
    New(Task),
    Woken(usize),
}

struct Running {
    task: Task,
    handle: Arc<Handle>,
}

/// Puts a task into the queue when it is woken.
struct Handle {
    key: usize,
    tasks: Weak<Tasks>,
    queued: AtomicBool,
}

impl Wake for Handle {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel)
            && let Some(tasks) = self.tasks.upgrade()
        {
            tasks.push(Entry::Woken(self.key));
        }
    }
}

thread_local! {
    /// Address of the `Tasks` that this thread runs: their wakes call nobody.
    static HERE: Cell<usize> = const { Cell::new(0) };
    static VISITING: Cell<bool> = const { Cell::new(false) };
    /// Tasks that found something which a visitor leaves to the I/O thread.
    static LEFT: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread only has something to send: what came in is for the I/O thread.
pub fn is_visiting() -> bool {
    VISITING.get()
}

/// Has the I/O thread go on with a task that a visitor may not.
pub fn leave(waker: &Waker) {
    LEFT.with_borrow_mut(|left| left.push(waker.clone()));
}

impl Tasks {
    /// Runs the task that `first` makes, and those that it adds, until none is left.
    pub fn start<F>(open_to_visits: bool, first: impl FnOnce(&Arc<Tasks>) -> F) -> Arc<Tasks>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = Arc::new(Tasks {
            running: Mutex::default(),
            ready: Mutex::default(),
            missed: AtomicBool::new(false),
            open_to_visits,
            generation: runtime::generation(),
        });
        tasks.spawn(first(&tasks));
        runtime::handle().spawn(Runner(Arc::clone(&tasks)));
        tasks
    }

    pub fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(Entry::New(task)) = self.push(Entry::New(Box::pin(task))) {
            runtime::handle().spawn(task);
        }
    }

    /// Runs `cause`, which wakes or adds tasks, and has them run: here when they have few `bytes` to send and the I/O
    /// thread sleeps. Nothing in the child of a fork, which shares the parent's socket.
    pub fn visit(self: &Arc<Self>, bytes: usize, cause: impl FnOnce()) {
        if self.generation != runtime::generation() {
            return;
        }
        if bytes > SMALL || !self.open_to_visits || HERE.get() != 0 || !runtime::is_asleep() {
            return cause();
        }
        let runtime = runtime::handle();
        let _entered = runtime.enter();
        HERE.set(self.address());
        cause();
        if let Some(mut running) = self.try_running() {
            VISITING.set(true);
            self.turn(&mut running, VISIT);
            VISITING.set(false);
        }
        HERE.set(0);
        LEFT.take().into_iter().for_each(Waker::wake);
        if self.missed.swap(false, Ordering::SeqCst) || !self.ready().queue.is_empty() {
            self.call_runner();
        }
    }

    /// Gives the entry back where nobody will run it.
    fn push(self: &Arc<Self>, entry: Entry) -> Option<Entry> {
        let mut ready = self.ready();
        if ready.ended {
            return Some(entry);
        }
        ready.queue.push_back(entry);
        let runner = if HERE.get() == self.address() { None } else { ready.runner.clone() };
        drop(ready);
        if let Some(runner) = runner {
            runner.wake();
        }
        None
    }

    fn call_runner(&self) {
        let runner = self.ready().runner.clone();
        if let Some(runner) = runner {
            runner.wake();
        }
    }

    /// Runs up to `most` of those that are ready.
    fn turn(self: &Arc<Self>, running: &mut Slab<Running>, most: usize) {
        for _ in 0..most {
            let Some(entry) = self.ready().queue.pop_front() else { return };
            let key = match entry {
                Entry::Woken(key) => key,
                Entry::New(task) => {
                    let vacant = running.vacant_entry();
                    let key = vacant.key();
                    let handle = Handle { key, tasks: Arc::downgrade(self), queued: AtomicBool::new(true) };
                    vacant.insert(Running { task, handle: Arc::new(handle) });
                    key
                }
            };
            // One that has ended may have been woken before.
            let Some(one) = running.get_mut(key) else { continue };
            if one.has_ended() {
                drop_quietly(running.remove(key));
            }
        }
    }

    fn try_running(&self) -> Option<MutexGuard<'_, Slab<Running>>> {
        match self.running.try_lock() {
            Ok(running) => Some(running),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn ready(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }
}

impl Running {
    /// Lets it go on. A task that panics ends, and no other with it.
    fn has_ended(&mut self) -> bool {
        self.handle.queued.store(false, Ordering::Release);
        let waker = Waker::from(Arc::clone(&self.handle));
        let polled = catch_unwind(AssertUnwindSafe(|| self.task.as_mut().poll(&mut Context::from_waker(&waker))));
        !matches!(polled, Ok(Poll::Pending))
    }
}

fn drop_quietly(task: Running) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(task)));
}

/// The task of the runtime.
struct Runner(Arc<Tasks>);

impl Future for Runner {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let tasks = &self.0;
        {
            let mut ready = tasks.ready();
            if !ready.runner.as_ref().is_some_and(|runner| runner.will_wake(cx.waker())) {
                ready.runner = Some(cx.waker().clone());
            }
        }
        // First: whoever runs them now looks at it after that.
        tasks.missed.store(true, Ordering::SeqCst);
        let Some(mut running) = tasks.try_running() else { return Poll::Pending };
        tasks.missed.store(false, Ordering::SeqCst);
        HERE.set(tasks.address());
        tasks.turn(&mut running, TURN);
        HERE.set(0);
        let mut ready = tasks.ready();
        if !ready.queue.is_empty() {
            cx.waker().wake_by_ref();
        } else if running.is_empty() {
            ready.ended = true;
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::{Duration, Instant};
    use tokio::sync::Notify;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn until(mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "it never came true");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Tasks of which the first one lives until it is told to end.
    fn open_ended(open_to_visits: bool) -> (Arc<Tasks>, Arc<Notify>) {
        let end = Arc::new(Notify::new());
        let ended = Arc::clone(&end);
        (Tasks::start(open_to_visits, |_| async move { ended.notified().await }), end)
    }

    /// Asks again until the visit was made on this thread: the I/O thread need not sleep yet.
    fn visited(tasks: &Arc<Tasks>, bytes: usize) -> bool {
        let here = thread::current().id();
        for _ in 0..50 {
            let ran_on = Arc::new(Mutex::new(None));
            let noted = Arc::clone(&ran_on);
            tasks.visit(bytes, || {
                tasks.spawn(async move { *noted.lock().unwrap() = Some((thread::current().id(), is_visiting())) });
            });
            until(|| ran_on.lock().unwrap().is_some());
            if *ran_on.lock().unwrap() == Some((here, true)) {
                return true;
            }
            thread::sleep(Duration::from_millis(2));
        }
        false
    }

    #[test]
    fn a_visitor_runs_what_is_small_and_only_where_visits_are_allowed() {
        let (open, end) = open_ended(true);
        assert!(visited(&open, SMALL));
        assert!(!visited(&open, SMALL + 1));
        end.notify_one();
        let (closed, end) = open_ended(false);
        assert!(!visited(&closed, 0));
        end.notify_one();
    }

    #[test]
    fn what_a_visitor_leaves_is_done_by_the_io_thread() {
        let (tasks, end) = open_ended(true);
        let done_by_other = Arc::new(AtomicBool::new(false));
        for _ in 0..200 {
            let (done, finished) = (Arc::clone(&done_by_other), Arc::new(AtomicBool::new(false)));
            let told = Arc::clone(&finished);
            tasks.visit(0, || {
                tasks.spawn(async move {
                    std::future::poll_fn(|cx| {
                        if is_visiting() {
                            leave(cx.waker());
                            done.store(true, Ordering::Release);
                            return Poll::Pending;
                        }
                        Poll::Ready(())
                    })
                    .await;
                    told.store(true, Ordering::Release);
                });
            });
            until(|| finished.load(Ordering::Acquire));
        }
        assert!(done_by_other.load(Ordering::Acquire), "no visit was made");
        end.notify_one();
    }

    #[test]
    fn no_wake_is_lost_between_visitors_and_the_io_thread() {
        const VISITORS: usize = 4;
        const WAKES: usize = 3000;
        let (tasks, end) = open_ended(true);
        let visitors: Vec<_> = (0..VISITORS)
            .map(|_| {
                let tasks = Arc::clone(&tasks);
                thread::spawn(move || {
                    let (nudge, count) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
                    let (nudged, counted) = (Arc::clone(&nudge), Arc::clone(&count));
                    tasks.spawn(async move {
                        for _ in 0..WAKES {
                            nudged.notified().await;
                            counted.fetch_add(1, Ordering::AcqRel);
                        }
                    });
                    for sent in 0..WAKES {
                        tasks.visit(if sent % 3 > 0 { 0 } else { SMALL + 1 }, || nudge.notify_one());
                        until(|| count.load(Ordering::Acquire) > sent);
                    }
                })
            })
            .collect();
        for visitor in visitors {
            visitor.join().unwrap();
        }
        end.notify_one();
        until(|| tasks.ready().ended);
    }

    #[test]
    fn a_task_that_panics_ends_alone_and_a_late_one_runs_all_the_same() {
        let (tasks, end) = open_ended(true);
        tasks.spawn(async { panic!("on purpose") });
        assert!(visited(&tasks, 0));
        end.notify_one();
        until(|| tasks.ready().ended);
        let ran = Arc::new(AtomicBool::new(false));
        let late = Arc::clone(&ran);
        tasks.visit(0, || tasks.spawn(async move { late.store(true, Ordering::Release) }));
        until(|| ran.load(Ordering::Acquire));
    }
}
