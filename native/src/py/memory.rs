//! Python objects as bytes to send, and received bytes as Python objects.

use super::bridge;
use super::buffer::{Buffer, Exported};
use crate::lane::sys::{AlignedBuf, Region};
use crate::runtime;
use crate::wire::{COPY_UP_TO, Slice};
use bytes::Bytes;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A received body of at most this size becomes `bytes`: its copy is cheaper than one more object's views.
const BYTES_UP_TO: usize = 64 << 10;

/// Views that the I/O thread is done with. It must not take the GIL to release them: the next caller that
/// holds it does. Bounded by what is in flight.
static RELEASED: Mutex<Vec<Exported>> = Mutex::new(Vec::new());

/// Where nothing calls any more, an event loop is woken to release them after this time.
const SWEPT_WITHIN: Duration = Duration::from_secs(1);
/// Of the process in which that will happen, counted from 1.
static SWEEP_DUE_IN: AtomicU64 = AtomicU64::new(0);

fn sweep_soon() {
    let here = runtime::generation() + 1;
    if SWEEP_DUE_IN.swap(here, Ordering::AcqRel) != here {
        runtime::handle().spawn(async {
            tokio::time::sleep(SWEPT_WITHIN).await;
            SWEEP_DUE_IN.store(0, Ordering::Release);
            if !released().is_empty() {
                bridge::wake_all();
            }
        });
    }
}

fn released() -> MutexGuard<'static, Vec<Exported>> {
    RELEASED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Releases what the I/O thread left. Called wherever Python comes into the core on the data path.
pub fn sweep(_py: Python<'_>) {
    let released = match RELEASED.try_lock() {
        Ok(mut released) if !released.is_empty() => std::mem::take(&mut *released),
        _ => return,
    };
    drop(released);
}

struct Owner(Option<Exported>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], Exported::as_slice)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(exported) = self.0.take() {
            released().push(exported);
            sweep_soon();
        }
    }
}

/// Small objects are copied, larger ones lent until they are written.
pub fn to_bytes(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        if bytes.len() <= COPY_UP_TO {
            return Ok(Bytes::copy_from_slice(bytes));
        }
    }
    let exported = Exported::of(object)?;
    if exported.as_slice().len() <= COPY_UP_TO {
        return Ok(Bytes::copy_from_slice(exported.as_slice()));
    }
    Ok(Bytes::from_owner(Owner(Some(exported))))
}

/// The parts of one value: a list's items, or the object itself.
pub fn to_parts(object: &Bound<'_, PyAny>) -> PyResult<Vec<Bytes>> {
    match object.cast::<PyList>() {
        Ok(list) => list.iter().map(|item| to_bytes(&item)).collect(),
        Err(_) => Ok(vec![to_bytes(object)?]),
    }
}

pub fn to_buffers(sequence: &Bound<'_, PyAny>) -> PyResult<Vec<Bytes>> {
    if let Ok(tuple) = sequence.cast::<PyTuple>() {
        return tuple.iter().map(|item| to_bytes(&item)).collect();
    }
    sequence.try_iter()?.map(|item| to_bytes(&item?)).collect()
}

pub fn from_slice<'py>(py: Python<'py>, slice: &Slice) -> PyResult<Bound<'py, PyAny>> {
    let bytes = slice.as_slice();
    if bytes.len() <= BYTES_UP_TO {
        return Ok(PyBytes::new(py, bytes).into_any());
    }
    let region = match slice {
        Slice::Region(region) => region.clone(),
        Slice::Bytes(bytes) => copy(bytes)?,
    };
    from_region(py, region)
}

pub fn from_region(py: Python<'_>, region: Region) -> PyResult<Bound<'_, PyAny>> {
    Ok(Bound::new(py, Buffer::new(region))?.into_any())
}

pub fn from_regions<'py>(py: Python<'py>, regions: &[Region]) -> PyResult<Bound<'py, PyTuple>> {
    if regions.is_empty() {
        return Ok(PyTuple::empty(py));
    }
    let buffers: Vec<_> = regions.iter().map(|region| from_region(py, region.clone())).collect::<PyResult<_>>()?;
    PyTuple::new(py, buffers)
}

pub fn strings<'py>(tuple: &'py Bound<'_, PyTuple>) -> PyResult<Vec<Bound<'py, PyString>>> {
    tuple.iter().map(|item| Ok(item.cast_into::<PyString>()?)).collect()
}

fn copy(bytes: &[u8]) -> PyResult<Region> {
    let mut buf = AlignedBuf::with_capacity(bytes.len()).ok_or_else(|| none_left(bytes.len()))?;
    buf.extend(bytes);
    Ok(buf.freeze())
}

pub fn none_left(size: usize) -> PyErr {
    PyMemoryError::new_err(format!("no memory for {size} bytes"))
}
