//! How the I/O thread tells somebody elsewhere that what they wait for has come.

use std::sync::Arc;

/// A place where waiters are told; Python's `Bridge` is one.
pub trait Signal: Send + Sync {
    /// The waiter of this token is done waiting. Called once at most for a token.
    fn fire(&self, token: usize);
    /// The waiter of this token will never be told. Called instead of `fire`.
    fn discard(&self, token: usize);
}

/// Somebody who waits. Dropped unfired, it tells its place to forget it.
pub struct Waiter {
    place: Option<Arc<dyn Signal>>,
    token: usize,
}

impl Waiter {
    pub fn new(place: Arc<dyn Signal>, token: usize) -> Self {
        Waiter { place: Some(place), token }
    }

    pub fn fire(mut self) {
        if let Some(place) = self.place.take() {
            place.fire(self.token);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.discard(self.token);
        }
    }
}
