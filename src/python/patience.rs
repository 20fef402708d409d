//! Waiting as a guest of the interpreter: never attached, and never deaf to Ctrl-C.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::{KvError, Result};
use crate::memory::{Deadline, Patience};

/// Up to this many bytes are copied attached: to detach and attach again costs as much as copying a
/// few KiB, and this much copies in the time of a few Python instructions.
const ATTACHED_COPY_BYTES: usize = 64 * 1024;

/// How long a wait goes on between two looks for signals.
pub(super) const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Whether so many bytes are copied detached.
pub(super) fn is_long_copy(bytes: usize) -> bool {
    bytes > ATTACHED_COPY_BYTES
}

/// Runs `call`, attached if it is short and need not wait.
///
/// `call` is given what it may wait for, and reports [`KvError::Timeout`] when that is over, having
/// changed nothing; it is called again until it does something else. With a `timeout` it waits for
/// views as well, and the last [`KvError::Timeout`] is the result.
#[inline]
pub(super) fn run<R: Send>(
    py: Python<'_>,
    bytes: usize,
    timeout: Option<Duration>,
    mut call: impl FnMut(Patience) -> Result<R> + Send,
) -> PyResult<R> {
    if !is_long_copy(bytes) {
        match call(Patience { deadline: Deadline::Now, for_pins: timeout.is_some() }) {
            Err(KvError::Timeout { .. }) => {}
            done => return Ok(done?),
        }
    }
    run_detached(py, timeout, call)
}

#[cold]
fn run_detached<R: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut call: impl FnMut(Patience) -> Result<R> + Send,
) -> PyResult<R> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let pause = Instant::now() + SIGNAL_INTERVAL;
        let last = end.is_some_and(|end| end <= pause);
        let deadline = Deadline::At(end.map_or(pause, |end| end.min(pause)));
        let patience = Patience { deadline, for_pins: timeout.is_some() };
        match py.detach(|| call(patience)) {
            Err(KvError::Timeout { .. }) if !last => py.check_signals()?,
            done => return Ok(done?),
        }
    }
}

/// Runs `attempt` detached, again and again, until it has a result. It is given how long it may wait.
pub(super) fn wait<R: Send>(
    py: Python<'_>,
    mut attempt: impl FnMut(Duration) -> Option<R> + Send,
) -> PyResult<R> {
    loop {
        match py.detach(|| attempt(SIGNAL_INTERVAL)) {
            Some(done) => return Ok(done),
            None => py.check_signals()?,
        }
    }
}
