//! Counters of this process.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub const fn new() -> Self {
        Counter(AtomicU64::new(0))
    }

    pub fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub fn increment(&self) {
        self.add(1);
    }

    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Everything that is counted.
        #[derive(Debug)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter,)* }

        pub static COUNTERS: Counters = Counters { $($name: Counter::new(),)* };

        impl Counters {
            /// Names and values, in the order of declaration.
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.value()),)*]
            }
        }
    };
}

counters! {
    client_calls_unix_unary,
    client_calls_unix_streaming,
    client_calls_tcp_unary,
    client_calls_tcp_streaming,
    client_calls_stock_unary,
    client_calls_stock_streaming,
    client_bytes_sent,
    client_bytes_received,
    client_messages_received,
    client_cancels,
    client_rejections,
    /// Calls that were taken up; those that ended are in `outcomes::CALLER`.
    client_calls_begun,
    client_connections,
    /// Of those, that took the place of one that was lost or closed.
    client_reconnects,
    client_connections_ended,
    client_connections_lost,
    client_connect_failures,
    /// Calls that found their connection lost and took another one.
    client_retries,
    /// Connections over a later endpoint, since an earlier one could not be reached.
    client_lane_fallbacks,
    /// Times that a stream was read no further, since its caller was behind.
    client_queue_stalls,
    server_calls_unix_unary,
    server_calls_unix_streaming,
    server_calls_tcp_unary,
    server_calls_tcp_streaming,
    server_calls_stock_unary,
    server_calls_stock_streaming,
    server_bytes_received,
    server_bytes_sent,
    server_messages_sent,
    server_cancels,
    server_rejections,
    /// Calls that came to a replica when their caller had given them up, and were not run.
    server_calls_revoked,
    server_connections,
    server_connections_ended,
    server_calls_begun,
    /// Times that a writer waited for HTTP/2's window or the socket.
    server_window_stalls,
    /// Messages of user code after which it was told to wait.
    server_queue_stalls,
    /// Calls whose `authorization` was missing or wrong.
    server_unauthenticated,
    /// Connections that TLS, or the check of a Unix-domain socket's user, refused.
    server_handshake_failures,
    /// Messages whose buffers went through shared memory, and their bytes.
    shm_messages_sent,
    shm_bytes_sent,
    /// Of those, bytes that were passed on where they lay, without a copy.
    shm_bytes_forwarded,
    shm_messages_received,
    shm_bytes_received,
    /// Messages that found no warm segment and went by the socket.
    shm_fallbacks,
    shm_trimmed,
    /// Wake-ups of event loops, and what they brought: their ratio is the batch size.
    bridge_wakeups,
    bridge_completions,
}
