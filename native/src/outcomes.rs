//! How calls ended, by what carried them and of which kind they were.

use crate::error::{Code, Status};
use crate::lane::Lane;
use crate::metrics::Counter;
use crate::service::{Dialect, Method};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With an answer.
    Ok,
    /// With an answer that is an exception of user code.
    UserError,
    /// The replica had no slot: the router asks another one.
    Rejected,
    Cancelled,
    /// The replica could not be reached, was lost or takes no more calls.
    Unavailable,
    /// The transport or the service failed in another way.
    Failed,
}

pub const OUTCOMES: [&str; 6] = ["ok", "user_error", "rejected", "cancelled", "unavailable", "failed"];
/// "none": the call was never sent.
pub const CARRIERS: [&str; 4] = ["none", "tcp", "unix", "stock"];
pub const KINDS: [&str; 2] = ["unary", "streaming"];

impl Outcome {
    /// Of an end with this status.
    pub fn of(status: &Status, rejected: bool, user_error: bool) -> Outcome {
        match status.code {
            Code::OK if rejected => Outcome::Rejected,
            Code::OK if user_error => Outcome::UserError,
            Code::OK => Outcome::Ok,
            Code::CANCELLED => Outcome::Cancelled,
            Code::UNAVAILABLE => Outcome::Unavailable,
            _ => Outcome::Failed,
        }
    }
}

/// One counter for each combination.
#[derive(Debug)]
pub struct Table([[[Counter; OUTCOMES.len()]; KINDS.len()]; CARRIERS.len()]);

pub static CALLER: Table = Table::new();
pub static REPLICA: Table = Table::new();

impl Table {
    const fn new() -> Self {
        Table([const { [const { [const { Counter::new() }; OUTCOMES.len()] }; KINDS.len()] }; CARRIERS.len()])
    }

    pub fn count(&self, lane: Option<Lane>, dialect: Dialect, method: Method, outcome: Outcome) {
        let carrier = match (lane, dialect) {
            (None, _) => 0,
            (Some(_), Dialect::Stock) => 3,
            (Some(Lane::Tcp), Dialect::Native) => 1,
            (Some(Lane::Unix), Dialect::Native) => 2,
        };
        self.0[carrier][usize::from(method.is_streaming())][outcome as usize].increment();
    }

    /// (lane, kind, outcome, calls) of what has occurred.
    pub fn read(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
        let mut rows = Vec::new();
        for (carrier, kinds) in CARRIERS.iter().zip(&self.0) {
            for (kind, outcomes) in KINDS.iter().zip(kinds) {
                for (outcome, counter) in OUTCOMES.iter().zip(outcomes) {
                    let calls = counter.value();
                    if calls > 0 {
                        rows.push((*carrier, *kind, *outcome, calls));
                    }
                }
            }
        }
        rows
    }
}
