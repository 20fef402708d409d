//! What a forked child may touch: nothing that its parent made.
//!
//! `fork` copies the memory of locks that threads of the parent may hold, and no thread that would
//! let them go. So a child neither uses nor drops a cache of its parent.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

use super::error::ForkedError;

/// How often this process and its ancestors were forked.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// Marks all existing objects as the parent's. `kvspan` registers it with `os.register_at_fork`.
#[pyfunction]
#[pyo3(name = "_after_fork_in_child")]
pub(super) fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A value that only the process that made it uses and drops.
#[derive(Debug)]
pub(super) struct ProcessLocal<T> {
    generation: usize,
    /// Present until it is dropped.
    value: Option<T>,
}

impl<T> ProcessLocal<T> {
    pub(super) fn new(value: T) -> Self {
        Self { generation: GENERATION.load(Ordering::Relaxed), value: Some(value) }
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

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if !self.is_ours() {
            // Leaked on purpose: to drop it could wait for a lock that nobody will let go.
            std::mem::forget(self.value.take());
        }
    }
}

fn forked() -> PyErr {
    ForkedError::new_err((
        "this object was made before fork(): make caches in the process that uses them, or start \
         it with the multiprocessing method 'spawn' or 'forkserver'",
    ))
}
