//! How long the stages of calls took, in buckets that a thread may read at any time.
//!
//! Off until `time_calls(true)`: then a stage costs two readings of the clock and two additions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Upper bound of the first bucket is 2^5 µs; each next one is twice as wide, up to 2^24 µs (17 s). The last one,
/// after these, holds what took longer.
const FIRST_POWER: u32 = 5;
pub const BOUNDS: usize = 20;

static ON: AtomicBool = AtomicBool::new(false);

/// Whether calls are timed from here on.
pub fn time_calls(on: bool) {
    ON.store(on, Ordering::Relaxed);
}

/// The present, if calls are timed.
pub fn started() -> Option<Instant> {
    ON.load(Ordering::Relaxed).then(Instant::now)
}

#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    const fn new() -> Self {
        Histogram { buckets: [const { AtomicU64::new(0) }; BOUNDS + 1], microseconds: AtomicU64::new(0) }
    }

    /// Counts the time since `started`; nothing where that was not noted.
    pub fn since(&self, started: Option<Instant>) {
        if let Some(started) = started {
            self.observe(started.elapsed());
        }
    }

    pub fn observe(&self, duration: Duration) {
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(microseconds)].fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }

    /// (observations in each bucket, the sum of all in microseconds).
    pub fn read(&self) -> (Vec<u64>, u64) {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        (counts, self.microseconds.load(Ordering::Relaxed))
    }
}

/// The first whose upper bound is not below `microseconds`.
fn bucket(microseconds: u64) -> usize {
    let power = u64::BITS - microseconds.saturating_sub(1).leading_zeros();
    (power.saturating_sub(FIRST_POWER) as usize).min(BOUNDS)
}

/// Upper bounds of all buckets but the last, in microseconds.
pub fn bounds() -> [u64; BOUNDS] {
    std::array::from_fn(|index| 1 << (FIRST_POWER as usize + index))
}

macro_rules! stages {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug)]
        pub struct Stages { $($(#[$doc])* pub $name: Histogram,)* }

        pub static STAGES: Stages = Stages { $($name: Histogram::new(),)* };

        impl Stages {
            /// Names and histograms, in the order of declaration.
            pub fn all(&self) -> Vec<(&'static str, &Histogram)> {
                vec![$((stringify!($name), &self.$name),)*]
            }

            pub fn named(&self, name: &str) -> Option<&Histogram> {
                self.all().into_iter().find_map(|(known, histogram)| (known == name).then_some(histogram))
            }
        }
    };
}

stages! {
    /// At the caller: from the I/O thread taking the call up to its end.
    call_unary,
    call_streaming,
    /// At the caller: from the request written to the response's headers.
    wire,
    /// At the replica: from the whole request received to Python taking it up.
    queue,
    /// At the replica: from the admission to the end of the answer.
    user_code,
    /// Both ends, in Python: values to bytes and back.
    serialise,
    deserialise,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_is_not_over_its_bound() {
        let bounds = bounds();
        for (index, bound) in bounds.iter().enumerate() {
            assert_eq!(bucket(*bound), index);
            assert_eq!(bucket(bound + 1), index + 1);
        }
        assert_eq!(bucket(0), 0);
        assert_eq!(bucket(u64::MAX), BOUNDS);
    }

    #[test]
    fn nothing_is_counted_while_timing_is_off() {
        let histogram = Histogram::new();
        histogram.since(None);
        assert_eq!(histogram.read().0.iter().sum::<u64>(), 0);
        histogram.observe(Duration::from_micros(33));
        let (counts, sum) = histogram.read();
        assert_eq!((counts[1], sum), (1, 33));
    }
}
