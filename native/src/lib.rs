//! The Rust core of ray_serve_grpc: gRPC calls between the deployments of a Ray Serve app, off the GIL.
//!
//! # Layout
//! - `wire`: the protocol without I/O: frames, messages, the bytes they are made of
//! - `lane`: what bytes travel on: TCP, Unix-domain sockets; `lane::sys` owns the memory (unsafe)
//! - `call`, `client`: a call as its maker sees it; a channel, its connection, its exchanges
//! - `server`: accepts, hands requests to a handler, answers, drains
//! - `security`: tokens, strangers, notices; TLS is in `lane::tls`
//! - `service`: the methods and the two dialects
//! - `proto`: generated from protos/inter_deployment.proto
//! - `metrics`, `outcomes`, `timing`, `log`: what is counted, timed and told
//! - `keepalive`: how a connection finds out that its peer is gone
//! - `signal`, `runtime`, `config`, `error`: what the others share
//! - `py`: everything of pyo3, behind the feature `python`; `py::buffer` exports memory (unsafe)

pub mod batch;
pub mod call;
pub mod client;
pub mod config;
pub mod error;
mod executor;
pub mod keepalive;
pub mod lane;
pub mod log;
pub mod metrics;
pub mod outcomes;
pub mod runtime;
pub mod security;
pub mod server;
pub mod service;
pub mod signal;
pub mod timing;
pub mod wire;

#[allow(clippy::all, clippy::pedantic)]
pub mod proto {
    include!("proto/ray_serve_grpc.v1.rs");
}

/// What `native/model` replaces in the files that it tests.
mod sync {
    pub use std::sync::*;
}

#[cfg(feature = "python")]
mod py;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
