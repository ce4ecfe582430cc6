//! What many threads leave for one, which is woken once for all of it.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, PoisonError};

/// Whoever pushes the first item of a batch wakes the taker.
pub struct Batch<T> {
    /// Set by the push that wakes; cleared before the items are taken, so that what comes later wakes again.
    armed: AtomicBool,
    items: Mutex<Items<T>>,
}

struct Items<T> {
    waiting: Vec<T>,
    is_closed: bool,
}

impl<T> Default for Batch<T> {
    fn default() -> Self {
        Batch { armed: AtomicBool::new(false), items: Mutex::new(Items { waiting: Vec::new(), is_closed: false }) }
    }
}

impl<T> Batch<T> {
    /// Whether the taker has to be woken. Gives the item back when there is no taker any more.
    pub fn push(&self, item: T) -> Result<bool, T> {
        let mut items = self.items();
        if items.is_closed {
            return Err(item);
        }
        items.waiting.push(item);
        drop(items);
        Ok(!self.armed.swap(true, Ordering::AcqRel))
    }

    /// All that waits. The taker has been woken, or looks by itself.
    pub fn take(&self) -> Vec<T> {
        self.armed.store(false, Ordering::Release);
        std::mem::take(&mut self.items().waiting)
    }

    /// What waits, for the last time.
    pub fn close(&self) -> Vec<T> {
        let mut items = self.items();
        items.is_closed = true;
        std::mem::take(&mut items.waiting)
    }

    fn items(&self) -> MutexGuard<'_, Items<T>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
