//! What a forked child may touch: nothing that its parent made.
//!
//! `fork` copies the memory of locks that threads of the parent may hold, and no thread that would
//! let them go. So a child neither uses nor drops a cache of its parent. If there were such threads,
//! what locks share in a process may be held as well, and the child can not make caches of its own.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pyo3::prelude::*;

use super::error::ForkedError;

/// How often this process and its ancestors were forked.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// Whether other threads were running when this process was forked. What locks share in a process
/// may have been in their hands.
static HAD_THREADS: AtomicBool = AtomicBool::new(false);

/// Marks all existing objects as the parent's. `kvspan` registers it with `os.register_at_fork`.
#[pyfunction]
#[pyo3(name = "_after_fork_in_child")]
pub(super) fn after_fork_in_child(had_threads: bool) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    HAD_THREADS.fetch_or(had_threads, Ordering::Relaxed);
}

/// Refuses to make locks in a process where they could hang.
pub(super) fn check_process() -> PyResult<()> {
    if HAD_THREADS.load(Ordering::Relaxed) {
        return Err(ForkedError::new_err((
            "this process was forked while other threads were running, after which no lock can be \
             relied on: start it with the multiprocessing method 'spawn' or 'forkserver'",
        )));
    }
    Ok(())
}

/// A value that only the process that made it uses and drops.
#[derive(Debug)]
pub(super) struct ProcessLocal<T: Send> {
    generation: usize,
    drop_detached: bool,
    /// Present until it is dropped.
    value: Option<T>,
}

impl<T: Send> ProcessLocal<T> {
    pub(super) fn new(value: T) -> Self {
        Self::made_here(value, false)
    }

    /// Of a value whose destructor waits for locks, or takes long: wherever Python drops it, that
    /// happens detached. The value leads to no Python object.
    pub(super) fn with_long_drop(value: T) -> Self {
        Self::made_here(value, true)
    }

    fn made_here(value: T, drop_detached: bool) -> Self {
        Self { generation: GENERATION.load(Ordering::Relaxed), drop_detached, value: Some(value) }
    }

    pub(super) fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.is_ours() => Ok(value),
            _ => Err(forked()),
        }
    }

    fn is_ours(&self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }
}

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        let mut value = self.value.take();
        if !self.is_ours() {
            // Leaked on purpose: to drop it could wait for a lock that nobody will let go.
            std::mem::forget(value);
        } else if self.drop_detached {
            // If that can not be, as at exit, it is dropped below.
            Python::try_attach(|py| py.detach(|| drop(value.take())));
        }
    }
}

fn forked() -> PyErr {
    ForkedError::new_err((
        "this object was made before fork(): make caches in the process that uses them, or start \
         it with the multiprocessing method 'spawn' or 'forkserver'",
    ))
}
