//! The locks whose schedules are tested: those of blocks and of pins.
//!
//! Built with `--cfg shuttle` they hand each step to a scheduler, which tries one order of the threads
//! after the other. `tests/schedules.rs` alone can run such a build.

#[cfg(not(shuttle))]
pub(crate) use parking_lot::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
#[cfg(not(shuttle))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize};

#[cfg(shuttle)]
pub(crate) use scheduled::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicUsize};

/// The scheduler's locks with as much of `parking_lot`'s interface as is used.
#[cfg(shuttle)]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, PoisonError};
    use std::time::Instant;

    use shuttle::sync;
    pub(crate) use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard};

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    /// `None` only while it waits.
    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>);

    #[derive(Debug, Default)]
    pub(crate) struct RwLock<T>(sync::RwLock<T>);

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(sync::Condvar);

    #[derive(Debug)]
    pub(crate) struct TimedOut(bool);

    fn unpoisoned<G>(result: LockResult<G>) -> G {
        result.unwrap_or_else(PoisonError::into_inner)
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(unpoisoned(self.0.lock())))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect("it does not wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("it does not wait")
        }
    }

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            unpoisoned(self.0.read())
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            unpoisoned(self.0.write())
        }
    }

    impl Condvar {
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = guard.0.take().map(|held| unpoisoned(self.0.wait(held)));
        }

        /// Takes as long as it must: there is no time.
        pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> TimedOut {
            self.wait(guard);
            TimedOut(false)
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    impl TimedOut {
        pub(crate) fn timed_out(&self) -> bool {
            self.0
        }
    }
}
