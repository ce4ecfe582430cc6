//! `Server` and `ServerCall`.

// pyo3 hands arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use super::bridge::{self, Bridge, Told};
use super::memory;
use crate::config::{DEFAULT_MAX_MESSAGE_SIZE, ServerConfig};
use crate::error::{Code, Status};
use crate::lane::tls::Acceptor;
use crate::runtime;
use crate::server;
use crate::service::{Dialect, is_user_error};
use crate::wire::{self, Content, Envelope, Kind};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Python's `on_call` and `on_notice`, reached through the bridge of its loop.
pub struct CallHandler {
    on_call: Py<PyAny>,
    on_notice: Option<Py<PyAny>>,
}

impl CallHandler {
    /// None when there is no memory for it: then the call is abandoned.
    pub fn handed(&self, py: Python<'_>, call: Arc<server::ServerCall>) -> Option<Told> {
        let made = ServerCall::new(py, Arc::clone(&call)).and_then(|call| PyTuple::new(py, [Bound::new(py, call)?]));
        match made {
            Ok(arguments) => Some((self.on_call.clone_ref(py), Some(arguments.unbind()))),
            Err(error) => {
                call.abandon();
                error.write_unraisable(py, Some(self.on_call.bind(py)));
                None
            }
        }
    }

    /// None when nobody wants to hear it.
    pub fn told(&self, py: Python<'_>, notice: &str) -> Option<Told> {
        let on_notice = self.on_notice.as_ref()?;
        Some((on_notice.clone_ref(py), Some(PyTuple::new(py, [notice]).ok()?.unbind())))
    }
}

struct ToBridge {
    handler: Arc<CallHandler>,
    bridge: Arc<bridge::Inner>,
}

impl server::Handler for ToBridge {
    fn incoming(&self, call: Arc<server::ServerCall>) {
        self.bridge.push_incoming(Arc::clone(&self.handler), call);
    }

    fn notice(&self, text: String) {
        self.bridge.push_notice(Arc::clone(&self.handler), text);
    }
}

/// See `_native.pyi`.
#[pyclass(frozen, module = "ray_serve_grpc._native")]
pub struct Server {
    server: server::Server,
    generation: u64,
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (
        bridge, on_call, *, host, port = 0, unix_path = None, identity = String::new(), authorization = None,
        tls = None, on_notice = None, max_message_size = DEFAULT_MAX_MESSAGE_SIZE, version = String::new(),
        reflection = false
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments in Python
    fn new(
        bridge: &Bridge,
        on_call: Py<PyAny>,
        host: &str,
        port: u16,
        unix_path: Option<PathBuf>,
        identity: String,
        authorization: Option<&str>,
        tls: Option<super::TlsFiles>,
        on_notice: Option<Py<PyAny>>,
        max_message_size: usize,
        version: String,
        reflection: bool,
    ) -> PyResult<Self> {
        let config = ServerConfig {
            identity,
            version,
            authorization: super::client::header_value(authorization)?,
            tls: super::tls_of(tls, Acceptor::new)?,
            max_message_size,
            reflection,
        };
        let handler =
            ToBridge { handler: Arc::new(CallHandler { on_call, on_notice }), bridge: Arc::clone(bridge.inner()) };
        let server = server::Server::bind(host, port, unix_path.as_deref(), config, Box::new(handler))?;
        Ok(Server { server, generation: runtime::generation() })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.server.port()
    }

    #[getter]
    fn unix_path(&self) -> Option<PathBuf> {
        self.server.unix_path().map(Into::into)
    }

    fn stop(&self, grace: f64, bridge: &Bridge, callback: Bound<'_, PyAny>) -> PyResult<()> {
        self.require_own_process()?;
        let grace = Duration::try_from_secs_f64(grace)
            .map_err(|_| PyValueError::new_err(format!("grace must be a number of seconds >= 0, not {grace}")))?;
        self.server.stop(grace, bridge.watch_callback(callback));
        Ok(())
    }

    fn close(&self) -> PyResult<()> {
        self.require_own_process()?;
        self.server.close();
        Ok(())
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts =
            [("connections", self.server.connections() as u64), ("ongoing_calls", self.server.ongoing_calls() as u64)];
        super::counters_dict(py, counts)
    }

    fn __repr__(&self) -> String {
        format!("<Server on port {} ({} connections)>", self.server.port(), self.server.connections())
    }
}

impl Server {
    fn require_own_process(&self) -> PyResult<()> {
        if self.generation == runtime::generation() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err("this server lives in the parent process; a forked child cannot stop it"))
    }
}

/// See `_native.pyi`.
#[pyclass(frozen, module = "ray_serve_grpc._native", weakref)]
pub struct ServerCall {
    call: Arc<server::ServerCall>,
    metadata: Py<PyTuple>,
    extra: Py<PyBytes>,
    request: Mutex<Option<Request>>,
}

/// The request's memory, until it is released.
struct Request {
    body: Py<PyAny>,
    buffers: Py<PyTuple>,
    fields: Py<PyTuple>,
}

impl ServerCall {
    fn new(py: Python<'_>, call: Arc<server::ServerCall>) -> PyResult<Self> {
        call.mark_taken_up();
        let envelope = call.take_request().unwrap_or_default();
        let Envelope { metadata, body, buffers, fields, .. } = envelope;
        let fields = fields.iter().map(|field| memory::from_slice(py, field)).collect::<PyResult<Vec<_>>>()?;
        let request = Request {
            body: memory::from_slice(py, &body)?.unbind(),
            buffers: memory::from_regions(py, &buffers)?.unbind(),
            fields: PyTuple::new(py, fields)?.unbind(),
        };
        Ok(ServerCall {
            call,
            metadata: PyTuple::new(py, metadata.strings)?.unbind(),
            extra: PyBytes::new(py, &metadata.extra).unbind(),
            request: Mutex::new(Some(request)),
        })
    }

    fn request(&self) -> MutexGuard<'_, Option<Request>> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl ServerCall {
    #[getter]
    fn method(&self) -> usize {
        self.call.method.index()
    }

    #[getter]
    fn dialect(&self) -> u32 {
        super::dialect_number(self.call.dialect)
    }

    /// None also where it is no text.
    #[getter]
    fn traceparent(&self) -> Option<&str> {
        self.call.trace.as_ref().and_then(|value| value.to_str().ok())
    }

    #[getter]
    fn metadata(&self, py: Python<'_>) -> Py<PyTuple> {
        self.metadata.clone_ref(py)
    }

    #[getter]
    fn extra(&self, py: Python<'_>) -> Py<PyBytes> {
        self.extra.clone_ref(py)
    }

    #[getter]
    fn body(&self, py: Python<'_>) -> Py<PyAny> {
        match &*self.request() {
            Some(request) => request.body.clone_ref(py),
            None => PyBytes::new(py, &[]).into_any().unbind(),
        }
    }

    #[getter]
    fn buffers(&self, py: Python<'_>) -> Py<PyTuple> {
        self.request().as_ref().map_or_else(|| PyTuple::empty(py).unbind(), |request| request.buffers.clone_ref(py))
    }

    #[getter]
    fn fields(&self, py: Python<'_>) -> Py<PyTuple> {
        self.request().as_ref().map_or_else(|| PyTuple::empty(py).unbind(), |request| request.fields.clone_ref(py))
    }

    #[getter]
    fn peer(&self) -> &str {
        &self.call.peer
    }

    #[getter]
    fn lane(&self) -> &'static str {
        self.call.lane.name()
    }

    fn release(&self) {
        let request = self.request().take();
        // Dropping Python objects may run Python: not under the lock.
        drop(request);
    }

    #[pyo3(signature = (accepted, num_ongoing_requests, flush = true))]
    fn admit(&self, accepted: bool, num_ongoing_requests: u32, flush: bool) -> bool {
        self.call.admit(accepted, num_ongoing_requests, flush)
    }

    fn claim(&self) -> bool {
        self.call.claim()
    }

    #[getter]
    fn admission_safe(&self) -> bool {
        self.call.is_admission_safe()
    }

    fn watch_admission_safe(&self, bridge: &Bridge, future: Bound<'_, PyAny>) {
        self.call.watch_admission_safe(bridge.watch_future(future));
    }

    #[pyo3(signature = (kind, body, buffers = None, flush = true))]
    fn send(
        &self,
        py: Python<'_>,
        kind: u32,
        body: &Bound<'_, PyAny>,
        buffers: Option<&Bound<'_, PyAny>>,
        flush: bool,
    ) -> PyResult<bool> {
        memory::sweep(py);
        let body = memory::to_parts(body)?;
        let buffers = buffers.map(memory::to_buffers).transpose()?.unwrap_or_default();
        if is_user_error(self.call.dialect, kind) {
            self.call.mark_user_error();
        }
        let queued = match self.call.dialect {
            Dialect::Native => self.call.send(Kind(kind), Content::of(body, buffers), flush),
            Dialect::Stock if buffers.is_empty() => {
                wire::encode_stock_response(kind != 0, body).and_then(|frames| self.call.send_frames(frames, flush))
            }
            Dialect::Stock => return Err(PyValueError::new_err("a stock peer takes no out-of-band buffers")),
        };
        queued.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn flush(&self) {
        self.call.flush();
    }

    fn watch_writable(&self, bridge: &Bridge, future: Bound<'_, PyAny>) {
        self.call.watch_writable(bridge.watch_future(future));
    }

    #[pyo3(signature = (status = 0, detail = String::new(), flush = true))]
    fn finish(&self, status: u32, detail: String, flush: bool) {
        self.call.finish(Status::new(Code(status), detail), flush);
    }

    fn watch_cancel(&self, bridge: &Bridge, callback: Bound<'_, PyAny>) {
        self.call.watch_cancel(bridge.watch_callback(callback));
    }

    #[getter]
    fn cancelled(&self) -> bool {
        self.call.is_cancelled()
    }
}

impl Drop for ServerCall {
    fn drop(&mut self) {
        self.call.abandon();
    }
}
