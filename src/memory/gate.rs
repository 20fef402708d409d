//! Who may look at published rows, and who may change them.

use std::cell::RefCell;
use std::time::Duration;

use parking_lot::{
    Mutex, MutexGuard, RecursiveRwLock, RecursiveRwLockReadGuard, RecursiveRwLockWriteGuard,
};

use super::deadline::Deadline;

/// How long a reader that finds an overwriter waiting lets it go first.
///
/// The lock itself prefers readers, so that a read inside a read can not hang behind a writer, on
/// whichever thread the inner one runs. Alone, that would let a crowd of readers keep a writer out
/// for good. This bounds the courtesy: closures shorter than it can not starve a writer, and a read
/// inside a read on another thread is late by no more than this.
const COURTESY: Duration = Duration::from_millis(2);

/// A reader-writer lock whose readers can nest on any thread.
#[derive(Debug, Default)]
pub(super) struct Gate {
    lock: RecursiveRwLock<()>,
    /// Held by an overwriter that had to wait, from then until it is done.
    turn: Mutex<()>,
}

/// Shared access, held for the length of a copy.
pub(super) type Shared<'a> = RecursiveRwLockReadGuard<'a, ()>;

/// Shared access on behalf of a caller's closure, which this thread remembers.
#[derive(Debug)]
pub(super) struct Visit<'a> {
    gate: &'a Gate,
    _shared: Shared<'a>,
}

/// Exclusive access.
#[derive(Debug)]
pub(super) struct Exclusive<'a> {
    _lock: RecursiveRwLockWriteGuard<'a, ()>,
    _turn: Option<MutexGuard<'a, ()>>,
}

thread_local! {
    /// Addresses of the gates that closures on this thread are inside, the innermost last.
    static VISITED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Gate {
    /// Waits, if at all, for a change that is being made; `None` if it is not over at `deadline`.
    pub(super) fn shared(&self, deadline: Deadline) -> Option<Shared<'_>> {
        if self.turn.is_locked() && !self.is_visited() {
            match deadline {
                Deadline::Now => return None,
                Deadline::At(_) | Deadline::Never => {
                    drop(self.turn.try_lock_for(COURTESY));
                }
            }
        }
        match deadline {
            Deadline::Now => self.lock.try_read(),
            Deadline::At(instant) => self.lock.try_read_until(instant),
            Deadline::Never => Some(self.lock.read()),
        }
    }

    /// Enters for a closure, so that [`Gate::exclusive`] on the same thread sees it.
    pub(super) fn visit(&self) -> Visit<'_> {
        let shared = self.shared(Deadline::Never).expect("a wait without a deadline ends well");
        // A thread that is so far in its exit that its locals are gone reads unremembered.
        let _ = VISITED.try_with(|visited| visited.borrow_mut().push(self.address()));
        Visit { gate: self, _shared: shared }
    }

    /// Waits until nobody is inside; `None` if somebody is at `deadline`.
    ///
    /// A thread that [visits](Self::is_visited) waits for itself: ask before the call.
    pub(super) fn exclusive(&self, deadline: Deadline) -> Option<Exclusive<'_>> {
        if let Some(lock) = self.lock.try_write() {
            return Some(Exclusive { _lock: lock, _turn: None });
        }
        let turn = deadline.lock(&self.turn)?;
        let lock = match deadline {
            Deadline::Now => None,
            Deadline::At(instant) => self.lock.try_write_until(instant),
            Deadline::Never => Some(self.lock.write()),
        };
        Some(Exclusive { _lock: lock?, _turn: Some(turn) })
    }

    /// Whether a closure on this thread is inside.
    pub(super) fn is_visited(&self) -> bool {
        VISITED.try_with(|visited| visited.borrow().contains(&self.address())).unwrap_or(false)
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let _ = VISITED.try_with(|visited| {
            let mut visited = visited.borrow_mut();
            let address = self.gate.address();
            if let Some(innermost) = visited.iter().rposition(|&gate| gate == address) {
                visited.remove(innermost);
            }
        });
    }
}
