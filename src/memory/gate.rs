//! Who may look at published rows, and who may change them.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

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
///
/// It lives in one stack frame, so that those of a thread end in the reverse order.
#[derive(Debug)]
pub(super) struct Visit<'a> {
    /// What `INNERMOST` was before.
    outer: usize,
    _shared: Shared<'a>,
}

/// Exclusive access.
#[derive(Debug)]
pub(super) struct Exclusive<'a> {
    _lock: RecursiveRwLockWriteGuard<'a, ()>,
    _turn: Option<MutexGuard<'a, ()>>,
}

thread_local! {
    /// Address of the gate that the innermost closure on this thread is inside, or 0. Of its own,
    /// since a closure inside another is rare, and this is as cheap as a thread-local can be.
    static INNERMOST: Cell<usize> = const { Cell::new(0) };
    /// Those of the closures around it.
    static OUTER: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Gate {
    /// Waits, if at all, for a change that is being made; `None` if it is not over at `deadline`.
    #[inline]
    pub(super) fn shared(&self, deadline: Deadline) -> Option<Shared<'_>> {
        if self.turn.is_locked() {
            self.let_overwriter_go_first(deadline)?;
        }
        match deadline {
            Deadline::Now => self.lock.try_read(),
            Deadline::At(instant) => self.lock.try_read_until(instant),
            Deadline::Never => Some(self.lock.read()),
        }
    }

    /// Waits for it a little, unless it waits for a closure on this thread.
    #[cold]
    fn let_overwriter_go_first(&self, deadline: Deadline) -> Option<()> {
        if self.is_visited() {
            return Some(());
        }
        let courtesy = Instant::now() + COURTESY;
        let until = match deadline {
            Deadline::Now => return None,
            Deadline::At(instant) => instant.min(courtesy),
            Deadline::Never => courtesy,
        };
        drop(self.turn.try_lock_until(until));
        Some(())
    }

    /// Enters for a closure, so that [`Gate::is_visited`] on the same thread sees it.
    #[inline]
    pub(super) fn visit(&self) -> Visit<'_> {
        let shared = self.shared(Deadline::Never).expect("a wait without a deadline ends well");
        let outer = INNERMOST.replace(self.address());
        if outer != 0 {
            remember(outer);
        }
        Visit { outer, _shared: shared }
    }

    /// Waits until nobody is inside; `None` if somebody is at `deadline`.
    ///
    /// A thread that [visits](Self::is_visited) waits for itself: ask before a call that waits.
    pub(super) fn exclusive(&self, deadline: Deadline) -> Option<Exclusive<'_>> {
        if let Some(lock) = self.lock.try_write() {
            return Some(Exclusive { _lock: lock, _turn: None });
        }
        if matches!(deadline, Deadline::Now) {
            return None;
        }
        let turn = deadline.lock(&self.turn)?;
        let lock = if let Deadline::At(instant) = deadline {
            self.lock.try_write_until(instant)?
        } else {
            self.lock.write()
        };
        Some(Exclusive { _lock: lock, _turn: Some(turn) })
    }

    /// Whether a closure on this thread is inside.
    pub(super) fn is_visited(&self) -> bool {
        let (innermost, this) = (INNERMOST.get(), self.address());
        let among = |gates: &RefCell<Vec<usize>>| gates.borrow().contains(&this);
        innermost == this || innermost != 0 && OUTER.try_with(among).unwrap_or(false)
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl Drop for Visit<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.outer != 0 {
            forget();
        }
        INNERMOST.set(self.outer);
    }
}

// Out of the way of the closures that are in no other, which are nearly all.
#[cold]
fn remember(outer: usize) {
    // A thread so far in its exit that its locals are gone forgets this one.
    let _ = OUTER.try_with(|gates| gates.borrow_mut().push(outer));
}

#[cold]
fn forget() {
    let _ = OUTER.try_with(|gates| gates.borrow_mut().pop());
}
