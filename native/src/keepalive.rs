//! How a connection finds out that its peer is gone.

use h2::{Ping, PingPong};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Counts how often the peer showed that it lives: bytes came from it, or it took some that had waited for it. What
/// the kernel takes at once shows nothing.
#[derive(Debug, Default)]
pub struct Signs(AtomicU64);

impl Signs {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Silent,
    Gone,
}

/// Pings when `interval` has passed since the last answer. Returns when nothing has come for `patience` after a ping,
/// or the connection has ended. An answer may come late, since it waits behind all else that travels.
pub async fn watch(mut ping_pong: PingPong, signs: &Signs, interval: Duration, patience: Duration) -> Peer {
    loop {
        tokio::time::sleep(interval).await;
        let mut answer = pin!(ping_pong.ping(Ping::opaque()));
        let (mut last, mut seen) = (Instant::now(), signs.count());
        loop {
            match timeout(patience / 4, answer.as_mut()).await {
                Ok(Ok(_)) => break,
                Ok(Err(_)) => return Peer::Gone,
                Err(_) if signs.count() != seen => (last, seen) = (Instant::now(), signs.count()),
                Err(_) if last.elapsed() >= patience => return Peer::Silent,
                Err(_) => {}
            }
        }
    }
}
