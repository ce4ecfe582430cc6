//! A call that its caller gives up while the replica may take it, and a word that serves another call meanwhile.

use super::admission;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

type Take = fn(&AtomicU32, u32) -> bool;
type Revoke = fn(&AtomicU32, u32) -> bool;

const FIRST: u32 = 1;
const SECOND: u32 = 3;

/// The caller gives up the call on one stream, and sends it elsewhere if the word says so. The word serves a call on
/// another stream, which is given up as well. The requests of both may be found by the replica at any time after they
/// were sent: the first one also when it has lain in a stopped replica's socket until the end.
fn each_call_runs_once(take: Take, revoke: Revoke) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let word = Arc::new(AtomicU32::new(0));
        let runs = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
        let sent = |stream: u32, runs: &Arc<AtomicU32>| {
            let (word, runs) = (Arc::clone(&word), Arc::clone(runs));
            thread::spawn(move || {
                if take(&word, stream) {
                    runs.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let mut replica = Vec::new();
        for (stream, runs) in [FIRST, SECOND].into_iter().zip(&runs) {
            admission::open(&word, stream);
            replica.push(sent(stream, runs));
            if revoke(&word, stream) {
                runs.fetch_add(1, Ordering::Relaxed);
            }
        }
        for request in replica {
            request.join().unwrap();
        }
        let counts = runs.map(|runs| runs.load(Ordering::Relaxed));
        assert_eq!(counts, [1, 1]);
    });
}

#[test]
fn a_call_that_is_given_up_runs_here_or_elsewhere() {
    each_call_runs_once(admission::take, admission::revoke);
}

#[test]
fn giving_a_call_up_twice_is_giving_it_up() {
    loom::model(|| {
        let word = AtomicU32::new(0);
        admission::open(&word, FIRST);
        assert!(admission::revoke(&word, FIRST) && admission::revoke(&word, FIRST));
        assert!(!admission::take(&word, FIRST));
    });
}

// What the model is good for: each of these is one of the ways in which a request ran twice, or never.

#[test]
#[should_panic(expected = "assertion")]
fn a_replica_that_only_notes_what_it_takes_is_caught() {
    each_call_runs_once(
        |word, stream| {
            word.store(stream, Ordering::Release);
            true
        },
        admission::revoke,
    );
}

#[test]
#[should_panic(expected = "assertion")]
fn a_caller_that_only_looks_is_caught() {
    each_call_runs_once(admission::take, |word, stream| word.load(Ordering::Acquire) != stream);
}

#[test]
#[should_panic(expected = "assertion")]
fn a_replica_that_takes_whatever_word_is_open_is_caught() {
    each_call_runs_once(
        |word, stream| {
            let found = word.load(Ordering::Acquire);
            found >> 31 == 1 && word.compare_exchange(found, stream, Ordering::AcqRel, Ordering::Acquire).is_ok()
        },
        admission::revoke,
    );
}
