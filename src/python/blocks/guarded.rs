//! A handle of the core that Python's threads share.

use std::time::{Duration, Instant};

use parking_lot::{RwLock, RwLockWriteGuard};
use pyo3::prelude::*;

use crate::error::Result;
use crate::python::fork::ProcessLocal;
use crate::python::patience;

/// A handle, used by many at a time or changed by one.
///
/// It is locked only detached, and let go before attaching again, so that nobody waits for the
/// interpreter with the lock in hand.
#[derive(Debug)]
pub(super) struct Guarded<H: Send>(ProcessLocal<RwLock<H>>);

impl<H: Send + Sync> Guarded<H> {
    pub(super) fn new(handle: H) -> Self {
        Self(ProcessLocal::with_long_drop(RwLock::new(handle)))
    }

    pub(super) fn is_ours(&self) -> bool {
        self.0.get().is_ok()
    }

    /// Calls `call` detached, beside others who do so.
    pub(super) fn read<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&H) -> Result<R> + Send,
    ) -> PyResult<R> {
        let (lock, mut call) = (self.0.get()?, Some(call));
        let done = patience::wait(py, |limit| {
            let handle = lock.try_read_for(limit)?;
            call.take().map(|call| call(&handle))
        });
        Ok(done??)
    }

    /// Calls `call` detached, and alone with the handle.
    pub(super) fn change<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut H) -> Result<R> + Send,
    ) -> PyResult<R> {
        let (lock, mut call) = (self.0.get()?, Some(call));
        let done = patience::wait(py, |limit| {
            let mut handle = lock.try_write_for(limit)?;
            call.take().map(|call| call(&mut handle))
        });
        Ok(done??)
    }

    /// Calls `call` detached, and alone with handles of which none is given twice, in that order.
    pub(super) fn change_all<'a, R: Send>(
        py: Python<'_>,
        all: impl Iterator<Item = &'a Self>,
        call: impl FnOnce(&mut [&mut H]) -> Result<R> + Send,
    ) -> PyResult<R>
    where
        H: 'a,
    {
        let locks = all.enumerate().map(|(place, handle)| Ok((place, handle.0.get()?)));
        let mut locks = locks.collect::<PyResult<Vec<_>>>()?;
        // All callers take them in one order, and so do not wait for each other in a circle.
        locks.sort_unstable_by_key(|(_, lock)| std::ptr::from_ref(*lock).addr());
        let mut call = Some(call);
        let done = patience::wait(py, |limit| {
            let mut guards = lock_all(&locks, limit)?;
            guards.sort_unstable_by_key(|&(place, _)| place);
            let mut handles = guards.iter_mut().map(|(_, guard)| &mut **guard).collect::<Vec<_>>();
            call.take().map(|call| call(&mut handles))
        });
        Ok(done??)
    }
}

/// All or none, after waiting for no longer than `limit`.
fn lock_all<'a, H>(
    locks: &[(usize, &'a RwLock<H>)],
    limit: Duration,
) -> Option<Vec<(usize, RwLockWriteGuard<'a, H>)>> {
    let end = Instant::now() + limit;
    locks.iter().map(|&(place, lock)| Some((place, lock.try_write_until(end)?))).collect()
}
