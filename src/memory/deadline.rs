//! How long a call is willing to wait.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// When to give up waiting for a lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deadline {
    /// Do not wait.
    Now,
    At(Instant),
    Never,
}

impl Deadline {
    /// A time so far away that the clock can not express it is never.
    pub(crate) fn after(timeout: Duration) -> Self {
        Instant::now().checked_add(timeout).map_or(Self::Never, Self::At)
    }

    /// Whether there was time to wait, and it is over.
    pub(crate) fn has_passed(self) -> bool {
        matches!(self, Self::At(instant) if instant <= Instant::now())
    }

    pub(crate) fn lock<T>(self, mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match self {
            Self::Now => mutex.try_lock(),
            Self::At(instant) => mutex.try_lock_until(instant),
            Self::Never => Some(mutex.lock()),
        }
    }
}

/// What a change of published rows may wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For closures that are reading, and for other writers.
    pub(crate) deadline: Deadline,
    /// Whether to wait for pins as well, until the same deadline. Otherwise they are an error.
    pub(crate) for_pins: bool,
}

impl Patience {
    /// Waits for closures, and refuses pinned rows at once.
    pub(crate) const CLOSURES: Self = Self { deadline: Deadline::Never, for_pins: false };

    /// Waits for closures and for pins.
    pub(crate) fn for_everything(timeout: Duration) -> Self {
        Self { deadline: Deadline::after(timeout), for_pins: true }
    }
}
