//! What Python asks for metrics and logs; it calls these about once a second.

use crate::log;
use crate::outcomes::{CALLER, REPLICA};
use crate::timing::{self, STAGES};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use std::time::{Duration, UNIX_EPOCH};

/// (stage, observations in each bucket, their sum in microseconds).
type Timing = (&'static str, Vec<u64>, u64);

/// (role, lane, kind, outcome, calls).
type Row = (&'static str, &'static str, &'static str, &'static str, u64);

#[pyfunction]
fn outcomes() -> Vec<Row> {
    [("caller", &CALLER), ("replica", &REPLICA)]
        .into_iter()
        .flat_map(|(role, table)| table.read().into_iter().map(move |row| (role, row.0, row.1, row.2, row.3)))
        .collect()
}

#[pyfunction]
fn timings() -> Vec<Timing> {
    let read = |(name, histogram): (&'static str, &timing::Histogram)| {
        let (counts, sum) = histogram.read();
        (name, counts, sum)
    };
    STAGES.all().into_iter().map(read).collect()
}

#[pyfunction]
fn observe(stage: &str, nanoseconds: u64) -> PyResult<()> {
    let histogram = STAGES.named(stage).ok_or_else(|| PyKeyError::new_err(stage.to_owned()))?;
    histogram.observe(Duration::from_nanos(nanoseconds));
    Ok(())
}

#[pyfunction]
fn time_calls(on: bool) {
    timing::time_calls(on);
}

#[pyfunction]
fn set_log_level(level: u8) {
    log::set_level(level);
}

/// (level, seconds since 1970, text).
#[pyfunction]
fn take_log_records() -> Vec<(u8, f64, String)> {
    let seconds = |record: &log::Record| record.time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    log::take().into_iter().map(|record| (record.level, seconds(&record), record.text)).collect()
}

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("TIMING_BOUNDS", timing::bounds().to_vec())?;
    module.add_function(wrap_pyfunction!(outcomes, module)?)?;
    module.add_function(wrap_pyfunction!(timings, module)?)?;
    module.add_function(wrap_pyfunction!(observe, module)?)?;
    module.add_function(wrap_pyfunction!(time_calls, module)?)?;
    module.add_function(wrap_pyfunction!(set_log_level, module)?)?;
    module.add_function(wrap_pyfunction!(take_log_records, module)?)
}
