//! Decides what of a message goes through shared memory, and puts it there.

use super::exchange::{Exchange, Grants, are_at_hand};
use super::segment::MADE_AT_ONCE_FROM;
use crate::metrics::COUNTERS;
use crate::wire::Content;
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// From this size on a body, or the buffers together, are lent instead of sent.
pub const SHM_FROM: usize = 64 << 10;

/// What a stream may have lent and not got back. Flow control sees only the few bytes that name it, so what is
/// beyond goes by the socket, where the reader's pace holds it back.
pub const STREAM_LIMIT: usize = 16 << 20;

/// Whether any of it would be lent.
pub fn is_worth_it(content: &Content) -> bool {
    content.len() >= SHM_FROM
}

/// The content as it is to be encoded. Where there is no room it comes back as it was.
pub async fn place(exchange: &Arc<Exchange>, content: Content) -> (Content, Grants) {
    let body_len = content.body_len();
    let (with_body, with_buffers) = (body_len >= SHM_FROM, content.len() - body_len >= SHM_FROM);
    if !with_body && !with_buffers {
        return (content, Grants::default());
    }
    let bytes = content.len();
    let may_wait = bytes > MADE_AT_ONCE_FROM;
    // Copies up to that size are made where they are: handing them to another thread costs as much.
    let is_work = may_wait && (with_body || !are_at_hand(&content.buffers));
    let lender = Arc::clone(exchange);
    let run = move || {
        let buffers = if with_buffers { &content.buffers[..] } else { &[] };
        let placed = lender.place(with_body.then_some(&content.body[..]), buffers, may_wait);
        (content, placed)
    };
    let (content, placed) = if is_work { spawn_blocking(run).await.expect("placing does not panic") } else { run() };
    match placed {
        Some(placed) if exchange.has_confirmed(&placed.unconfirmed).await => {
            COUNTERS.shm_messages_sent.increment();
            COUNTERS.shm_bytes_sent.add(placed.bytes);
            let rest = Content {
                body: if with_body { Vec::new() } else { content.body },
                buffers: if with_buffers { Vec::new() } else { content.buffers },
                body_segment: placed.body,
                segments: placed.buffers,
            };
            (rest, placed.grants)
        }
        _ => (content, Grants::default()),
    }
}
