//! The core's own files, compiled with loom's atomics and locks in the place of the standard library's: its scheduler
//! goes through the orders in which the threads of a test can run, and the values that an atomic may show.

#[path = "../../src/lane/exchange/admission.rs"]
pub mod admission;
#[path = "../../src/batch.rs"]
pub mod batch;
#[path = "../../src/lane/exchange/lease.rs"]
pub mod lease;

mod sync {
    pub use loom::sync::*;
    pub use std::sync::PoisonError;
}

#[cfg(test)]
mod admissions;

#[cfg(test)]
mod tests {
    use super::batch::Batch;
    use super::lease;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Arc, Notify};
    use loom::thread;

    #[test]
    fn whatever_is_pushed_is_taken_by_a_taker_that_sleeps_until_it_is_woken() {
        let mut model = loom::model::Builder::new();
        // Of three threads; all orders take minutes.
        model.preemption_bound = Some(3);
        model.check(|| {
            let batch = Arc::new(Batch::default());
            let bell = Arc::new(Notify::new());
            let pushers: Vec<_> = (0..2)
                .map(|number| {
                    let (batch, bell) = (Arc::clone(&batch), Arc::clone(&bell));
                    thread::spawn(move || {
                        if batch.push(number).unwrap() {
                            bell.notify();
                        }
                    })
                })
                .collect();
            let mut taken = Vec::new();
            while taken.len() < 2 {
                bell.wait();
                taken.append(&mut batch.take());
            }
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
            for pusher in pushers {
                pusher.join().unwrap();
            }
        });
    }

    #[test]
    fn what_meets_a_closed_batch_comes_back() {
        loom::model(|| {
            let batch = Arc::new(Batch::default());
            let pusher = {
                let batch = Arc::clone(&batch);
                thread::spawn(move || batch.push(1).is_err())
            };
            let mut taken = batch.take();
            taken.append(&mut batch.close());
            let came_back = pusher.join().unwrap();
            assert_eq!(taken.len() + usize::from(came_back), 1);
            assert!(batch.push(2).is_err());
        });
    }

    /// Memory that loom watches: a read beside a write fails the test.
    struct Lent {
        word: AtomicU32,
        memory: UnsafeCell<u32>,
    }

    // SAFETY: access to the memory is what the tests below check.
    #[allow(unsafe_code)]
    unsafe impl Sync for Lent {}
    // SAFETY: as above.
    #[allow(unsafe_code)]
    unsafe impl Send for Lent {}

    impl Lent {
        fn granted() -> Arc<Lent> {
            let lent = Arc::new(Lent { word: AtomicU32::new(0), memory: UnsafeCell::new(0) });
            lent.write(7);
            lease::grant(&lent.word);
            lent
        }

        #[allow(unsafe_code)]
        fn write(&self, value: u32) {
            // SAFETY: loom fails the test when somebody else uses the cell meanwhile.
            self.memory.with_mut(|memory| unsafe { *memory = value });
        }

        #[allow(unsafe_code)]
        fn read(&self) -> u32 {
            // SAFETY: as above.
            self.memory.with(|memory| unsafe { *memory })
        }
    }

    #[test]
    fn memory_is_not_written_to_while_it_is_read() {
        loom::model(|| {
            let lent = Lent::granted();
            let reader = {
                let lent = Arc::clone(&lent);
                thread::spawn(move || {
                    if lease::take(&lent.word) {
                        assert_eq!(lent.read(), 7);
                        lease::give_back(&lent.word);
                    }
                })
            };
            if lease::take_back(&lent.word) || !lease::is_lent(&lent.word) {
                lent.write(8);
            }
            reader.join().unwrap();
        });
    }

    #[test]
    fn a_lease_that_two_want_goes_to_one() {
        loom::model(|| {
            let lent = Lent::granted();
            let taken = Arc::new(AtomicU32::new(0));
            let reader = {
                let (lent, taken) = (Arc::clone(&lent), Arc::clone(&taken));
                thread::spawn(move || {
                    if lease::take(&lent.word) {
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                })
            };
            if lease::take_back(&lent.word) {
                taken.fetch_add(1, Ordering::Relaxed);
            }
            reader.join().unwrap();
            assert_eq!(taken.load(Ordering::Relaxed), 1);
        });
    }
}
