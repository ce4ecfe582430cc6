//! The core's `tracing` events, kept in a bounded queue until Python hands them to Serve's logger.
//!
//! No thread waits for it: an event of an I/O thread costs a lock that is held for a few instructions. Each place
//! in the code may speak `MOST_OF_A_KIND` times in `PERIOD`; the rest is counted, and told with the next one.

use crate::runtime::PerProcess;
use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

const MOST_OF_A_KIND: u32 = 10;
const PERIOD: Duration = Duration::from_secs(30);
/// Records that wait to be taken; beyond them they are counted only.
const MOST_RECORDS: usize = 256;
/// Libraries below us are heard from WARN on.
const OURS: &str = "ray_serve_grpc";

/// Least severe level that is kept, as Python numbers them; 0 before `set_level`: none is.
static LEVEL: AtomicU8 = AtomicU8::new(0);

static QUEUE: LazyLock<PerProcess<Mutex<Queue>>> = LazyLock::new(|| PerProcess::new(Mutex::default));

#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// As Python's `logging` numbers it.
    pub level: u8,
    pub time: SystemTime,
    pub text: String,
}

#[derive(Default)]
struct Queue {
    records: VecDeque<Record>,
    lost: u64,
    kinds: HashMap<Identifier, Kind>,
}

/// What one place in the code has said lately.
struct Kind {
    since: Instant,
    told: u32,
    suppressed: u32,
}

/// Keeps events of this severity and above from here on: 10 DEBUG, 20 INFO, 30 WARNING, 40 ERROR. What was told of
/// each kind before is forgotten.
pub fn set_level(level: u8) {
    LEVEL.store(level, Ordering::Relaxed);
    QUEUE.current().lock().unwrap_or_else(PoisonError::into_inner).kinds.clear();
    // Fails when it is set already.
    let _ = tracing::subscriber::set_global_default(Keeper);
    tracing::callsite::rebuild_interest_cache();
}

/// All that waits, oldest first.
pub fn take() -> Vec<Record> {
    let queue = QUEUE.current();
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    let mut records: Vec<Record> = queue.records.drain(..).collect();
    let lost = std::mem::take(&mut queue.lost);
    if lost > 0 {
        let text = format!("{lost} more messages of the native core were lost: they came too fast");
        records.push(Record { level: 30, time: SystemTime::now(), text });
    }
    records
}

impl Queue {
    fn push(&mut self, kind: Identifier, level: u8, text: impl FnOnce() -> String) {
        let now = Instant::now();
        let kind = self.kinds.entry(kind).or_insert(Kind { since: now, told: 0, suppressed: 0 });
        if now.duration_since(kind.since) >= PERIOD {
            kind.since = now;
            kind.told = 0;
        }
        if kind.told >= MOST_OF_A_KIND {
            kind.suppressed += 1;
            return;
        }
        kind.told += 1;
        if self.records.len() >= MOST_RECORDS {
            self.lost += 1;
            return;
        }
        let mut text = text();
        let suppressed = std::mem::take(&mut kind.suppressed);
        if suppressed > 0 {
            let _ = write!(text, " (and {suppressed} more of this kind before it)");
        }
        self.records.push_back(Record { level, time: SystemTime::now(), text });
    }
}

/// The subscriber: it keeps events and takes no spans.
struct Keeper;

fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level = number(*metadata.level());
        metadata.is_event()
            && level >= LEVEL.load(Ordering::Relaxed)
            && (level >= 30 || metadata.target().starts_with(OURS))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match LEVEL.load(Ordering::Relaxed) {
            0 => LevelFilter::OFF,
            1..=5 => LevelFilter::TRACE,
            6..=10 => LevelFilter::DEBUG,
            11..=20 => LevelFilter::INFO,
            21..=30 => LevelFilter::WARN,
            _ => LevelFilter::ERROR,
        })
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let queue = QUEUE.current();
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(metadata.callsite(), number(*metadata.level()), || {
            let mut text = Text::default();
            event.record(&mut text);
            text.0 + &text.1
        });
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The message, then the other fields as "; name: value".
#[derive(Default)]
struct Text(String, String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.1, "; {name}: {value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_kept_by_level_and_thinned_out() {
        set_level(30);
        tracing::info!("not severe enough");
        for number in 0..MOST_OF_A_KIND + 5 {
            tracing::warn!(number, peer = %"somebody", "again");
        }
        tracing::error!(target: "h2", "of a library");
        let records = take();
        let texts: Vec<&str> = records.iter().map(|record| record.text.as_str()).collect();
        assert_eq!(texts[0], "again; number: 0; peer: somebody");
        assert_eq!(texts.len(), MOST_OF_A_KIND as usize + 1, "{texts:?}");
        assert_eq!(records.last().map(|record| record.level), Some(40));
        set_level(10);
        tracing::debug!(target: "h2", "chatter");
        tracing::debug!("ours");
        assert_eq!(take().len(), 1);
        set_level(0);
        tracing::error!("nobody listens");
        assert_eq!(take(), []);
    }
}
