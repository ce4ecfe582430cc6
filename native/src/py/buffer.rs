//! Gives received memory to the interpreter: the second and last file with unsafe code.
#![allow(unsafe_code)]
// pyo3 hands arguments over by value; no memory is larger than isize::MAX.
#![allow(clippy::needless_pass_by_value, clippy::cast_possible_wrap)]

use crate::lane::sys::{Blank, Region};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::os::raw::c_int;

/// Received memory, private to this process and writable.
#[pyclass(frozen, module = "ray_serve_grpc._native")]
pub struct Buffer {
    region: Region,
}

impl Buffer {
    pub fn new(region: Region) -> Self {
        Buffer { region }
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.region.len()
    }

    // SAFETY: called by the interpreter with a valid `view`. The exported memory is owned by `region`, which
    // `slf` keeps alive, and `view.obj` keeps `slf` alive until the view is released. The core gave the
    // region up when it made this object (see `Region`), so the interpreter may write to it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("view is null"));
        }
        let region = &slf.get().region;
        let writable = 0;
        // SAFETY: `view` is not null and points to a Py_buffer of the interpreter; the pointer and the length
        // describe initialised memory that outlives the view, as argued above.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                region.as_mut_ptr().cast(),
                region.len() as ffi::Py_ssize_t,
                writable,
                flags,
            )
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Copies below this size are made faster than the GIL is given up and taken again.
const COPIED_ALONE_FROM: usize = 1 << 20;

/// A `bytes` object with a copy of what is in `bytes`.
pub fn new_bytes<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    if bytes.len() < COPIED_ALONE_FROM {
        return Ok(PyBytes::new(py, bytes));
    }
    // SAFETY: without a source the interpreter makes an object of that size, whose bytes are not initialised, and
    // gives us the only reference to it, or sets an error.
    let made = unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyBytes_FromStringAndSize(std::ptr::null(), bytes.len() as ffi::Py_ssize_t),
        )?
    };
    // SAFETY: it is a `bytes` object, so this is where its memory starts.
    let start = unsafe { ffi::PyBytes_AsString(made.as_ptr()) }.cast::<u8>();
    // SAFETY: as many bytes as `bytes` has, of which nobody else knows before this function returns `made`.
    let memory = unsafe { Blank::new(start, bytes.len()) };
    py.detach(|| memory.fill(bytes));
    Ok(made.cast_into()?)
}

/// Memory of a Python object that exports a contiguous buffer, readable without the GIL.
pub struct Exported {
    _view: pyo3::buffer::PyBuffer<u8>,
    start: *const u8,
    length: usize,
}

// SAFETY: the view pins the exporter's memory until it is released, whichever thread holds it; releasing it
// takes the GIL, which `memory::Owner` sees to.
unsafe impl Send for Exported {}
// SAFETY: the memory is only read. Its owner promised not to change it before it is sent (`_native.pyi`).
unsafe impl Sync for Exported {}

impl Exported {
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = pyo3::buffer::PyBuffer::<u8>::get(object)?;
        if !view.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not C-contiguous"));
        }
        let (start, length) = (view.buf_ptr().cast::<u8>().cast_const(), view.len_bytes());
        Ok(Exported { _view: view, start, length })
    }

    pub fn as_slice(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the view guarantees `length` readable bytes at `start` for as long as it lives.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}
