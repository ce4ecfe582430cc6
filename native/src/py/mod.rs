//! The module `ray_serve_grpc._native`; `ray_serve_grpc/_native.pyi` is its specification.

mod bridge;
mod buffer;
mod client;
mod memory;
mod observe;
mod server;

use crate::error::Code;
use crate::lane::tls::{CredentialsError, Pem};
use crate::lane::{exchange, segment};
use crate::metrics::COUNTERS;
use crate::runtime;
use crate::service::{Dialect, Method};
use buffer::Exported;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

pub const DIALECT_NATIVE: u32 = 0;
pub const DIALECT_STOCK: u32 = 1;

pub fn dialect_number(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Native => DIALECT_NATIVE,
        Dialect::Stock => DIALECT_STOCK,
    }
}

pub fn method_of(index: usize) -> PyResult<Method> {
    Method::from_index(index).ok_or_else(|| PyValueError::new_err(format!("method {index} is not one of METHOD_*")))
}

/// (certificate chain, private key, certificate authorities), each in PEM.
pub type TlsFiles = (Vec<u8>, Vec<u8>, Vec<u8>);

pub fn tls_of<T>(
    files: Option<TlsFiles>,
    make: impl FnOnce(&Pem<'_>) -> Result<T, CredentialsError>,
) -> PyResult<Option<T>> {
    let Some((certificate, key, authorities)) = files else { return Ok(None) };
    make(&Pem { certificate: &certificate, key: &key, authorities: &authorities })
        .map(Some)
        .map_err(|error| PyValueError::new_err(format!("tls: {error}")))
}

pub fn counters_dict(
    py: Python<'_>,
    counters: impl IntoIterator<Item = (&'static str, u64)>,
) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

#[pyfunction]
fn statistics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let size = segment::pool().size();
    let sizes = [
        ("shm_pool_bytes", size.bytes as u64),
        ("shm_pool_segments", size.segments as u64),
        ("shm_pool_free", size.free as u64),
        ("shm_pool_leased", size.leased as u64),
    ];
    counters_dict(py, COUNTERS.snapshot().into_iter().chain(sizes))
}

#[pyfunction]
fn set_shm_limit(bytes: usize) {
    segment::pool().set_limit(bytes);
}

#[pyfunction]
fn secure<'py>(py: Python<'py>, buffer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    memory::sweep(py);
    let bytes = memory::to_bytes(buffer)?;
    let size = bytes.len();
    let copy = py.detach(|| exchange::secure(bytes)).ok_or_else(|| memory::none_left(size))?;
    memory::from_region(py, copy)
}

#[pyfunction]
fn snapshot<'py>(py: Python<'py>, buffer: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let exported = Exported::of(buffer)?;
    let region = py.detach(|| exchange::snapshot(exported.as_slice()));
    region.map(|region| memory::from_region(py, region)).transpose()
}

#[pyfunction]
fn to_bytes<'py>(py: Python<'py>, buffer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    buffer::new_bytes(py, Exported::of(buffer)?.as_slice())
}

#[pyfunction]
fn after_fork_in_child() {
    runtime::after_fork_in_child();
}

#[pymodule]
#[pyo3(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", crate::VERSION)?;
    for (index, name) in ["VALUE", "RAW", "ERROR", "ERROR_TEXT"].iter().enumerate() {
        module.add(format!("KIND_{name}"), index)?;
    }
    for (index, name) in ["UNARY", "STREAMING", "UNARY_REJECTION", "STREAMING_REJECTION"].iter().enumerate() {
        module.add(format!("METHOD_{name}"), index)?;
    }
    module.add("DIALECT_NATIVE", DIALECT_NATIVE)?;
    module.add("DIALECT_STOCK", DIALECT_STOCK)?;
    for (name, code) in [
        ("OK", Code::OK),
        ("CANCELLED", Code::CANCELLED),
        ("UNKNOWN", Code::UNKNOWN),
        ("INVALID_ARGUMENT", Code::INVALID_ARGUMENT),
        ("DEADLINE_EXCEEDED", Code::DEADLINE_EXCEEDED),
        ("RESOURCE_EXHAUSTED", Code::RESOURCE_EXHAUSTED),
        ("UNIMPLEMENTED", Code::UNIMPLEMENTED),
        ("INTERNAL", Code::INTERNAL),
        ("UNAVAILABLE", Code::UNAVAILABLE),
        ("UNAUTHENTICATED", Code::UNAUTHENTICATED),
    ] {
        module.add(format!("STATUS_{name}"), code.0)?;
    }
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<bridge::Bridge>()?;
    module.add_class::<client::Channel>()?;
    module.add_class::<client::Call>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<server::ServerCall>()?;
    module.add_function(wrap_pyfunction!(statistics, module)?)?;
    module.add_function(wrap_pyfunction!(set_shm_limit, module)?)?;
    module.add_function(wrap_pyfunction!(secure, module)?)?;
    module.add_function(wrap_pyfunction!(snapshot, module)?)?;
    module.add_function(wrap_pyfunction!(to_bytes, module)?)?;
    observe::add_to(module)?;
    let forked = wrap_pyfunction!(after_fork_in_child, module)?;
    let options = PyDict::new(module.py());
    options.set_item("after_in_child", forked)?;
    module.py().import("os")?.call_method("register_at_fork", (), Some(&options))?;
    Ok(())
}
