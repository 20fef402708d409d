//! A limit on the time of a scenario, so that a deadlock is a failure and not a hang.

use std::panic;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Runs `scenario` on a thread of its own, and panics if it has not ended when the time is over.
pub(crate) fn within<R: Send + 'static>(
    limit: Duration,
    scenario: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(scenario()));
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("still not over after {limit:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(payload) => panic::resume_unwind(payload),
            Ok(_) => unreachable!("a scenario that ends sends its result"),
        },
    }
}
