//! A handle of the core that Python's threads share.

use std::time::{Duration, Instant};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use pyo3::prelude::*;

use crate::error::Result;
use crate::python::fork::ProcessLocal;
use crate::python::patience;

/// A handle, used by many at a time or changed by one.
///
/// It is waited for only detached, and let go before attaching again, so that nobody waits for the
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

    /// Calls `call` attached, and alone with the handle, if nobody else uses it just now. It waits for
    /// nothing, and is short: to detach and attach again would cost more.
    pub(super) fn try_change<R>(&self, call: impl FnOnce(&mut H) -> R) -> Option<R> {
        self.0.get().ok()?.try_write().map(|mut handle| call(&mut handle))
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

    /// Calls `call` detached, beside others who do so, with many handles in the order given.
    pub(super) fn read_all<'a, R: Send>(
        py: Python<'_>,
        all: impl Iterator<Item = &'a Self>,
        call: impl FnOnce(&[RwLockReadGuard<'a, H>]) -> Result<R> + Send,
    ) -> PyResult<R>
    where
        H: 'a,
    {
        let locks = all.map(|handle| handle.0.get()).collect::<PyResult<Vec<_>>>()?;
        let mut call = Some(call);
        let mut try_call = |guards: Option<Vec<_>>| {
            let guards = guards?;
            call.take().map(|call| call(&guards))
        };
        // One that is given twice is locked twice.
        if let Some(done) = py.detach(|| try_call(try_all(&locks, RwLock::try_read))) {
            return Ok(done?);
        }
        let locks = in_order(locks);
        Ok(patience::wait(py, |limit| try_call(lock_all(&locks, limit, RwLock::try_read_until)))??)
    }

    /// Calls `call` detached, and alone with many handles, in the order given.
    ///
    /// `check_distinct` says that none is given twice; it is asked only if one can not be locked.
    pub(super) fn change_all<'a, R: Send>(
        py: Python<'_>,
        all: impl Iterator<Item = &'a Self>,
        check_distinct: impl FnOnce() -> PyResult<()>,
        call: impl FnOnce(&mut [RwLockWriteGuard<'a, H>]) -> Result<R> + Send,
    ) -> PyResult<R>
    where
        H: 'a,
    {
        let locks = all.map(|handle| handle.0.get()).collect::<PyResult<Vec<_>>>()?;
        let mut call = Some(call);
        let mut try_call = |guards: Option<Vec<_>>| {
            let mut guards = guards?;
            call.take().map(|call| call(&mut guards))
        };
        if let Some(done) = py.detach(|| try_call(try_all(&locks, RwLock::try_write))) {
            return Ok(done?);
        }
        check_distinct()?;
        let locks = in_order(locks);
        Ok(patience::wait(py, |limit| try_call(lock_all(&locks, limit, RwLock::try_write_until)))??)
    }
}

/// Locks all or none, without waiting.
fn try_all<'a, H, G>(
    locks: &[&'a RwLock<H>],
    lock: impl Fn(&'a RwLock<H>) -> Option<G>,
) -> Option<Vec<G>> {
    let mut guards = Vec::with_capacity(locks.len());
    for one in locks {
        guards.push(lock(one)?);
    }
    Some(guards)
}

/// The locks with their places, in the order in which all callers wait for them, so that none waits for
/// another in a circle.
fn in_order<H>(locks: Vec<&RwLock<H>>) -> Vec<(usize, &RwLock<H>)> {
    let mut locks = locks.into_iter().enumerate().collect::<Vec<_>>();
    locks.sort_unstable_by_key(|(_, lock)| std::ptr::from_ref(*lock).addr());
    locks
}

/// Locks all or none, after waiting for no longer than `limit`; returns them in the order of their
/// places.
fn lock_all<'a, H, G>(
    locks: &[(usize, &'a RwLock<H>)],
    limit: Duration,
    lock: impl Fn(&'a RwLock<H>, Instant) -> Option<G>,
) -> Option<Vec<G>> {
    let end = Instant::now() + limit;
    let guards = locks.iter().map(|&(place, one)| Some((place, lock(one, end)?)));
    let mut guards = guards.collect::<Option<Vec<_>>>()?;
    guards.sort_unstable_by_key(|&(place, _)| place);
    Some(guards.into_iter().map(|(_, guard)| guard).collect())
}
