//! The methods that a replica serves, and which messages they take.

use crate::lane::Lane;
use crate::metrics::{COUNTERS, Counter};
use std::sync::LazyLock;

/// Which service carries a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `ray_serve_grpc.v1.InterDeploymentService`.
    Native,
    /// `ray.serve.ASGIService`: Ray's own messages, for peers without the plugin.
    Stock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Unary,
    Streaming,
    UnaryRejection,
    StreamingRejection,
}

const METHODS: [(Method, &str); 4] = [
    (Method::Unary, "HandleRequest"),
    (Method::Streaming, "HandleRequestStreaming"),
    (Method::UnaryRejection, "HandleRequestWithRejection"),
    (Method::StreamingRejection, "HandleRequestWithRejectionStreaming"),
];

pub const HANDSHAKE_PATH: &str = "/ray_serve_grpc.v1.InterDeploymentService/Handshake";

/// Header of a Handshake that names the side socket of its connection.
pub const NONCE_HEADER: &str = "lane-nonce";
/// Capability: buffers may be lent as shared memory on this connection.
pub const SHM: &str = "shm";

/// Header of a call, of W3C Trace Context.
pub const TRACE_HEADER: &str = "traceparent";

/// Whether a message of this kind holds an exception of user code.
pub fn is_user_error(dialect: Dialect, kind: u32) -> bool {
    match dialect {
        Dialect::Native => kind >= FIRST_ERROR_KIND,
        Dialect::Stock => kind != 0,
    }
}

/// KIND_ERROR of the protocol; KIND_ERROR_TEXT follows it.
const FIRST_ERROR_KIND: u32 = 2;

impl Dialect {
    fn service(self) -> &'static str {
        match self {
            Dialect::Native => "/ray_serve_grpc.v1.InterDeploymentService/",
            Dialect::Stock => "/ray.serve.ASGIService/",
        }
    }
}

impl Method {
    pub fn from_index(index: usize) -> Option<Method> {
        METHODS.get(index).map(|(method, _)| *method)
    }

    pub fn index(self) -> usize {
        METHODS.iter().position(|(method, _)| *method == self).expect("every method is listed")
    }

    pub fn is_streaming(self) -> bool {
        matches!(self, Method::Streaming | Method::StreamingRejection)
    }

    /// Made once for each method: parsing one costs as much as all other headers of a call.
    pub fn uri(self, dialect: Dialect) -> http::Uri {
        static URIS: LazyLock<[[http::Uri; METHODS.len()]; 2]> = LazyLock::new(|| {
            [Dialect::Native, Dialect::Stock].map(|dialect| METHODS.map(|(method, _)| uri(&method.path(dialect))))
        });
        URIS[usize::from(dialect == Dialect::Stock)][self.index()].clone()
    }

    pub fn path(self, dialect: Dialect) -> String {
        format!("{}{}", dialect.service(), METHODS[self.index()].1)
    }

    pub fn of_path(path: &str) -> Option<(Dialect, Method)> {
        [Dialect::Native, Dialect::Stock].into_iter().find_map(|dialect| {
            let name = path.strip_prefix(dialect.service())?;
            METHODS.iter().find(|(_, known)| *known == name).map(|(method, _)| (dialect, *method))
        })
    }
}

pub fn uri(path: &str) -> http::Uri {
    let uri = http::Uri::builder().scheme("http").authority("localhost").path_and_query(path).build();
    uri.expect("paths are constants")
}

pub fn client_calls(dialect: Dialect, lane: Lane, method: Method) -> &'static Counter {
    match (dialect, lane, method.is_streaming()) {
        (Dialect::Stock, _, false) => &COUNTERS.client_calls_stock_unary,
        (Dialect::Stock, _, true) => &COUNTERS.client_calls_stock_streaming,
        (Dialect::Native, Lane::Unix, false) => &COUNTERS.client_calls_unix_unary,
        (Dialect::Native, Lane::Unix, true) => &COUNTERS.client_calls_unix_streaming,
        (Dialect::Native, Lane::Tcp, false) => &COUNTERS.client_calls_tcp_unary,
        (Dialect::Native, Lane::Tcp, true) => &COUNTERS.client_calls_tcp_streaming,
    }
}

pub fn server_calls(dialect: Dialect, lane: Lane, method: Method) -> &'static Counter {
    match (dialect, lane, method.is_streaming()) {
        (Dialect::Stock, _, false) => &COUNTERS.server_calls_stock_unary,
        (Dialect::Stock, _, true) => &COUNTERS.server_calls_stock_streaming,
        (Dialect::Native, Lane::Unix, false) => &COUNTERS.server_calls_unix_unary,
        (Dialect::Native, Lane::Unix, true) => &COUNTERS.server_calls_unix_streaming,
        (Dialect::Native, Lane::Tcp, false) => &COUNTERS.server_calls_tcp_unary,
        (Dialect::Native, Lane::Tcp, true) => &COUNTERS.server_calls_tcp_streaming,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_their_method() {
        for index in 0..4 {
            let method = Method::from_index(index).unwrap();
            for dialect in [Dialect::Native, Dialect::Stock] {
                assert_eq!(Method::of_path(&method.path(dialect)), Some((dialect, method)));
            }
        }
        assert_eq!(Method::of_path(HANDSHAKE_PATH), None);
        assert_eq!(Method::of_path("/ray.serve.ASGIService/"), None);
    }
}
