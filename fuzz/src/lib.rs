//! What is fuzzed: one function a target, each of which panics when it finds a fault.
//!
//! `make fuzz` feeds them by libFuzzer; `native/tests/fuzz_corpus.rs` feeds them the corpus, in every test run.

pub mod certificates;
pub mod descriptors;
pub mod frames;
pub mod messages;
pub mod metadata;
