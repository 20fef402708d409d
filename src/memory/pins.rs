//! The ranges that must not change while views of them live.

use std::ops::Range;
use std::sync::atomic::Ordering;

use slab::Slab;

use super::deadline::Deadline;
use crate::sync::{AtomicUsize, Condvar, Mutex};

/// A register of pinned row ranges.
///
/// To pin and to unpin cost O(1), for they happen with every view; to look for overlaps costs
/// O(pins), for it happens only before published rows change.
#[derive(Debug, Default)]
pub(super) struct Pins {
    register: Mutex<Register>,
    /// Pins in the register. Written under its lock, and read without it by those who can be sure
    /// that no pin is being made, for they have the gate.
    alive: AtomicUsize,
    unpinned: Condvar,
}

#[derive(Debug, Default)]
struct Register {
    held: Slab<Range<usize>>,
    /// Callers in `wait_until_clear`, so that an unpin that nobody waits for notifies nobody.
    waiting: usize,
}

/// What names one pin until it is given back.
#[derive(Debug)]
pub(super) struct PinKey(usize);

impl Pins {
    /// Pins `range`. The caller holds the gate shared, which is why no change of the range can be
    /// going on.
    pub(super) fn pin(&self, range: Range<usize>) -> PinKey {
        let mut register = self.register.lock();
        let key = register.held.insert(range);
        self.alive.store(register.held.len(), Ordering::Relaxed);
        PinKey(key)
    }

    pub(super) fn unpin(&self, key: &PinKey) {
        let mut register = self.register.lock();
        register.held.remove(key.0);
        // Pairs with the load in `conflict`: whoever sees no pins may change what was read under
        // the last one.
        self.alive.store(register.held.len(), Ordering::Release);
        if register.waiting > 0 {
            self.unpinned.notify_all();
        }
    }

    /// The first of `ranges` that a pin overlaps, and how many do.
    ///
    /// `hull` covers them all. Of pins that are made meanwhile it may know nothing.
    pub(super) fn conflict(
        &self,
        ranges: impl Iterator<Item = Range<usize>>,
        hull: &Range<usize>,
    ) -> Option<(Range<usize>, usize)> {
        if self.alive.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.register.lock().conflict(ranges, hull)
    }

    /// Waits until no pin overlaps any of `ranges`; returns the conflict that is left at `deadline`.
    pub(super) fn wait_until_clear(
        &self,
        ranges: &(impl Iterator<Item = Range<usize>> + Clone),
        hull: &Range<usize>,
        deadline: Deadline,
    ) -> Option<(Range<usize>, usize)> {
        let mut register = self.register.lock();
        let mut timed_out = false;
        loop {
            let conflict = register.conflict(ranges.clone(), hull)?;
            if timed_out {
                return Some(conflict);
            }
            register.waiting += 1;
            match deadline {
                Deadline::Now => timed_out = true,
                Deadline::At(instant) => {
                    timed_out = self.unpinned.wait_until(&mut register, instant).timed_out();
                }
                Deadline::Never => self.unpinned.wait(&mut register),
            }
            register.waiting -= 1;
        }
    }
}

impl Register {
    /// Costs O(pins) if none is in `hull`; otherwise it sorts those that are, and looks each of
    /// `ranges` up in them.
    fn conflict(
        &self,
        mut ranges: impl Iterator<Item = Range<usize>>,
        hull: &Range<usize>,
    ) -> Option<(Range<usize>, usize)> {
        let (mut starts, mut ends): (Vec<_>, Vec<_>) = self
            .held
            .iter()
            .filter(|(_, held)| held.start < hull.end && hull.start < held.end)
            .map(|(_, held)| (held.start, held.end))
            .unzip();
        if starts.is_empty() {
            return None;
        }
        starts.sort_unstable();
        ends.sort_unstable();
        ranges.find_map(|range| {
            // Those that begin before its end, but for those that end before it begins.
            let pins = starts.partition_point(|&start| start < range.end)
                - ends.partition_point(|&end| end <= range.start);
            (pins > 0).then_some((range, pins))
        })
    }
}

#[cfg(all(test, shuttle))]
mod schedules {
    use std::sync::Arc;

    use shuttle::thread;

    use super::*;

    #[test]
    fn who_waits_for_pins_is_told_when_the_last_one_goes() {
        shuttle::check_random(
            || {
                let pins = Arc::new(Pins::default());
                let unpins = [0..2, 1..3, 5..6].map(|range| {
                    let (pins, key) = (Arc::clone(&pins), pins.pin(range));
                    move || pins.unpin(&key)
                });
                let threads = unpins.map(thread::spawn);
                let ranges = std::iter::once(1..4);
                assert_eq!(pins.wait_until_clear(&ranges, &(1..4), Deadline::Never), None);
                assert_eq!(pins.conflict(ranges, &(1..4)), None);
                for thread in threads {
                    thread.join().expect("it is well");
                }
                assert_eq!(pins.conflict(std::iter::once(0..9), &(0..9)), None);
            },
            2_000,
        );
    }
}
