//! `Channel` and `Call`.

use super::bridge::Bridge;
use super::memory;
use crate::call::CallState;
use crate::client::{self, Message, Request};
use crate::config::{ChannelConfig, DEFAULT_MAX_MESSAGE_SIZE};
use crate::error::{Code, Status};
use crate::lane::tls::Connector;
use crate::lane::{Endpoint, Lane};
use crate::runtime::PerProcess;
use crate::service::Method;
use crate::wire::{self, Content, Envelope};
use http::HeaderValue;
use pyo3::exceptions::{PyConnectionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a blocked thread looks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// See `_native.pyi`.
#[pyclass(frozen, module = "ray_serve_grpc._native")]
pub struct Channel {
    endpoints: Vec<String>,
    channel: PerProcess<Arc<client::Channel>>,
}

/// See `_native.pyi`.
#[pyclass(frozen, module = "ray_serve_grpc._native", weakref)]
pub struct Call {
    state: Arc<CallState>,
}

pub fn header_value(text: Option<&str>) -> PyResult<Option<HeaderValue>> {
    let Some(text) = text else { return Ok(None) };
    let mut value = HeaderValue::from_str(text)
        .map_err(|_| PyValueError::new_err("authorization has characters that no HTTP header may have"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{name} must be a number of seconds >= 0, not {value}")))
}

#[pymethods]
impl Channel {
    #[new]
    #[pyo3(signature = (
        endpoints, *, identity = String::new(), authorization = None, tls = None,
        max_message_size = DEFAULT_MAX_MESSAGE_SIZE, connect_timeout = 5.0, keepalive_interval = 5.0,
        keepalive_timeout = 10.0
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments in Python
    fn new(
        endpoints: Vec<String>,
        identity: String,
        authorization: Option<&str>,
        tls: Option<super::TlsFiles>,
        max_message_size: usize,
        connect_timeout: f64,
        keepalive_interval: f64,
        keepalive_timeout: f64,
    ) -> PyResult<Self> {
        let parsed: Result<Vec<Endpoint>, String> = endpoints.iter().map(|endpoint| endpoint.parse()).collect();
        let config = ChannelConfig {
            endpoints: parsed.map_err(PyValueError::new_err)?,
            identity,
            authorization: header_value(authorization)?,
            tls: super::tls_of(tls, Connector::new)?,
            max_message_size,
            connect_timeout: seconds("connect_timeout", connect_timeout)?,
            keepalive_interval: seconds("keepalive_interval", keepalive_interval)?,
            keepalive_timeout: seconds("keepalive_timeout", keepalive_timeout)?,
        };
        let channel = PerProcess::new(move || Arc::new(client::Channel::new(config.clone())));
        Ok(Channel { endpoints, channel })
    }

    fn dialect(&self) -> Option<u32> {
        self.channel.current().dialect().map(super::dialect_number)
    }

    fn connect(&self) {
        self.channel.current().connect();
    }

    fn watch_ready(&self, bridge: &Bridge, callback: Bound<'_, PyAny>) {
        self.channel.current().watch_ready(bridge.watch_callback(callback));
    }

    fn failure(&self) -> Option<(u32, String)> {
        self.channel.current().failure().map(status_pair)
    }

    #[pyo3(signature = (method, metadata, extra, body, buffers, flush = true, traceparent = None))]
    #[allow(clippy::too_many_arguments)] // the parts of a request
    fn call(
        &self,
        py: Python<'_>,
        method: usize,
        metadata: &Bound<'_, PyTuple>,
        extra: &[u8],
        body: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        flush: bool,
        traceparent: Option<&str>,
    ) -> PyResult<Call> {
        memory::sweep(py);
        let method = super::method_of(method)?;
        let strings = memory::strings(metadata)?;
        let strings = strings.iter().map(|string| string.to_str()).collect::<PyResult<Vec<_>>>()?;
        let metadata = wire::encode_metadata(strings.into_iter(), extra).freeze();
        let content = Content::of(memory::to_parts(body)?, memory::to_buffers(buffers)?);
        // One that is no header text is left out: a call does not fail for its trace.
        let trace = traceparent.and_then(|text| HeaderValue::from_str(text).ok());
        Ok(self.start(method, Message::Native { metadata, content }, trace, flush))
    }

    fn call_stock(&self, py: Python<'_>, method: usize, fields: &Bound<'_, PyAny>) -> PyResult<Call> {
        memory::sweep(py);
        let method = super::method_of(method)?;
        let fields = fields.try_iter()?.map(|field| memory::to_parts(&field?)).collect::<PyResult<Vec<_>>>()?;
        match wire::encode_fields(fields) {
            Ok(frames) => Ok(self.start(method, Message::Stock(frames), None, true)),
            Err(error) => Ok(Call { state: client::Channel::failed(Status::from(error)) }),
        }
    }

    fn flush(&self) {
        self.channel.current().flush();
    }

    #[getter]
    fn quiet(&self) -> bool {
        self.channel.current().is_quiet()
    }

    #[getter]
    fn lane(&self) -> &'static str {
        self.channel.current().lane()
    }

    #[pyo3(signature = (timeout = 5.0))]
    fn ping(&self, py: Python<'_>, timeout: f64) -> PyResult<(f64, &'static str, String, bool)> {
        let patience = seconds("timeout", timeout)?;
        let answer = self.channel.current().ping(patience);
        // The ping has its own limit; a little later, its runtime did not get round to it.
        let answer = py.detach(move || answer.recv_timeout(patience.saturating_add(SIGNAL_INTERVAL)));
        match answer {
            Ok(Ok(pong)) => Ok((pong.round_trip.as_secs_f64(), pong.lane.name(), pong.version, pong.shared_memory)),
            Ok(Err(Status { detail, .. })) => Err(PyConnectionError::new_err(detail)),
            Err(_) => Err(PyConnectionError::new_err(format!("no answer within {timeout} s"))),
        }
    }

    fn close(&self) {
        self.channel.current().close();
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        super::counters_dict(py, [("in_flight", self.channel.current().in_flight() as u64)])
    }

    fn __repr__(&self) -> String {
        let channel = self.channel.current();
        let lane = channel.lane();
        let state = if lane.is_empty() { "not connected" } else { lane };
        format!("<Channel to {} ({state}, {} calls in flight)>", self.endpoints.join(", "), channel.in_flight())
    }
}

impl Channel {
    fn start(&self, method: Method, message: Message, trace: Option<HeaderValue>, flush: bool) -> Call {
        Call { state: self.channel.current().start(Request { method, message, trace }, flush) }
    }
}

fn status_pair(status: Status) -> (u32, String) {
    let Status { code: Code(code), detail } = status;
    (code, detail)
}

fn message<'py>(py: Python<'py>, envelope: &Envelope) -> PyResult<Bound<'py, PyTuple>> {
    let body = memory::from_slice(py, &envelope.body)?;
    let buffers = memory::from_regions(py, &envelope.buffers)?;
    (envelope.kind, body, buffers).into_pyobject(py)
}

#[pymethods]
impl Call {
    fn admission(&self) -> Option<(bool, u32)> {
        self.state.admission().map(|admission| (admission.accepted, admission.num_ongoing_requests))
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.state.take().map(|envelope| message(py, &envelope)).transpose()
    }

    fn take_all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let messages = self.state.take_all();
        let messages = messages.iter().map(|envelope| message(py, envelope)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, messages)
    }

    fn status(&self) -> Option<(u32, String)> {
        self.state.status().map(status_pair)
    }

    #[getter]
    fn sent(&self) -> bool {
        self.state.was_sent()
    }

    #[getter]
    fn lane(&self) -> &'static str {
        self.state.lane().map_or("", Lane::name)
    }

    fn watch_admission(&self, bridge: &Bridge, future: Bound<'_, PyAny>) {
        self.state.watch_admission(bridge.watch_future(future));
    }

    fn watch_message(&self, bridge: &Bridge, future: Bound<'_, PyAny>) {
        self.state.watch_message(bridge.watch_future(future));
    }

    fn watch_done(&self, bridge: &Bridge, callback: Bound<'_, PyAny>) {
        self.state.watch_done(bridge.watch_callback(callback));
    }

    #[pyo3(signature = (timeout))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let until = match timeout {
            // A deadline beyond what the clock can tell is none.
            Some(timeout) => Duration::try_from_secs_f64(timeout.max(0.0))
                .ok()
                .and_then(|timeout| Instant::now().checked_add(timeout)),
            None => None,
        };
        loop {
            let slice = Instant::now() + SIGNAL_INTERVAL;
            let step = until.map_or(slice, |until| until.min(slice));
            if py.detach(|| self.state.wait(Some(step))) {
                return Ok(true);
            }
            py.check_signals()?;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
        }
    }

    fn cancel(&self) {
        self.state.cancel();
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.state.cancel();
    }
}
