//! Who may speak: the token of each call, and how long a peer may stay without having shown one.

use crate::config::ServerConfig;
use crate::error::{Code, Status};
use crate::lane::Gate;
use crate::metrics::COUNTERS;
use http::{HeaderMap, HeaderValue, header};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;
use tokio::sync::Notify;

/// Bytes that a peer may send before its first call with the token: a Handshake or a call's headers are far below.
const STRANGER_BYTES: usize = 256 << 10;
/// Connections of strangers at a time. The oldest goes for a newer one: who has the token shows it in milliseconds.
const MAX_STRANGERS: usize = 256;
/// Between two notices of one kind.
const NOTICE_INTERVAL: Duration = Duration::from_secs(30);

/// Compares in constant time, before anything of the body is read.
pub fn require_authorization(config: &ServerConfig, headers: &HeaderMap) -> Result<(), Status> {
    let Some(expected) = &config.authorization else { return Ok(()) };
    let given = headers.get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
    if given.ct_eq(expected.as_bytes()).into() {
        return Ok(());
    }
    COUNTERS.server_unauthenticated.increment();
    Err(Status::new(Code::UNAUTHENTICATED, "Invalid or missing authentication token"))
}

/// The connections whose peer has not shown the token yet.
#[derive(Default)]
pub struct Strangers {
    /// In the order in which they came.
    present: Mutex<Present>,
}

#[derive(Default)]
struct Present {
    next: u64,
    by_age: BTreeMap<u64, Arc<Notify>>,
}

/// One connection from its acceptance on.
pub struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    gate: Arc<Gate>,
    expelled: Arc<Notify>,
    arrived: tokio::time::Instant,
}

impl Strangers {
    pub fn arrived(self: &Arc<Self>) -> Stranger {
        let expelled = Arc::new(Notify::new());
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        if present.by_age.len() >= MAX_STRANGERS
            && let Some((_, oldest)) = present.by_age.pop_first()
        {
            oldest.notify_one();
        }
        let number = present.next;
        present.next += 1;
        present.by_age.insert(number, Arc::clone(&expelled));
        drop(present);
        let (gate, arrived) = (Arc::new(Gate::new(STRANGER_BYTES)), tokio::time::Instant::now());
        Stranger { strangers: Arc::clone(self), number, gate, expelled, arrived }
    }

    fn forget(&self, number: u64) {
        self.present.lock().unwrap_or_else(PoisonError::into_inner).by_age.remove(&number);
    }
}

impl Stranger {
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// It has shown the token.
    pub fn trust(&self) {
        if !self.gate.is_open() {
            self.gate.open();
            self.strangers.forget(self.number);
        }
    }

    /// Returns when it has to go: others came, or `patience` is over and it is a stranger still.
    pub async fn overstayed(&self, patience: Duration) {
        tokio::select! {
            () = self.expelled.notified() => {}
            () = tokio::time::sleep_until(self.arrived + patience) => {}
        }
        if self.gate.is_open() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.forget(self.number);
    }
}

/// What an operator is told about, however often it happens: once in a while, with a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Unauthenticated,
    TlsFailed,
    NotAccepted,
}

impl Event {
    const COUNT: usize = 3;

    fn text(self) -> &'static str {
        match self {
            Event::Unauthenticated => "calls without the right authentication token were refused",
            Event::TlsFailed => "connections failed in their TLS handshake",
            Event::NotAccepted => "connections could not be accepted",
        }
    }
}

/// Thins out notices.
#[derive(Default)]
pub struct Notices {
    kinds: Mutex<[Thinned; Event::COUNT]>,
}

#[derive(Clone, Copy, Default)]
struct Thinned {
    last: Option<Instant>,
    untold: u64,
}

impl Notices {
    /// The text to tell now, or None when this kind was told a short while ago. `detail` is of the last one, and
    /// made only when it is told.
    pub fn note(&self, event: Event, detail: impl FnOnce() -> String) -> Option<String> {
        self.note_at(event, Instant::now(), detail)
    }

    fn note_at(&self, event: Event, now: Instant, detail: impl FnOnce() -> String) -> Option<String> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let thinned = &mut kinds[event as usize];
        thinned.untold += 1;
        if thinned.last.is_some_and(|last| now.duration_since(last) < NOTICE_INTERVAL) {
            return None;
        }
        let count = std::mem::take(&mut thinned.untold);
        thinned.last = Some(now);
        drop(kinds);
        Some(format!("{count} {}; the last: {}", event.text(), detail()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_stranger_goes_for_a_newer_one() {
        let strangers = Arc::new(Strangers::default());
        let peers: Vec<_> = (0..=MAX_STRANGERS).map(|_| strangers.arrived()).collect();
        let present = strangers.present.lock().unwrap();
        assert_eq!(present.by_age.len(), MAX_STRANGERS);
        assert!(!present.by_age.contains_key(&peers[0].number));
    }

    #[test]
    fn the_trusted_and_the_gone_are_no_strangers() {
        let strangers = Arc::new(Strangers::default());
        let (trusted, gone) = (strangers.arrived(), strangers.arrived());
        trusted.trust();
        drop(gone);
        assert!(trusted.gate().is_open());
        assert!(strangers.present.lock().unwrap().by_age.is_empty());
    }

    #[test]
    fn a_flood_of_events_is_told_once_with_its_count() {
        let notices = Notices::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let note = |seconds| notices.note_at(Event::Unauthenticated, at(seconds), || "tcp:1.2.3.4:5".into());
        assert!(note(0).unwrap().starts_with("1 calls"));
        for _ in 0..10_000 {
            assert_eq!(note(1), None);
        }
        assert!(notices.note_at(Event::TlsFailed, at(1), String::new).is_some());
        assert!(note(31).unwrap().starts_with("10001 calls"));
    }
}
