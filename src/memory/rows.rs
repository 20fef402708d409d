//! Rows in two planes: published ones that stay as they are, and a tail that grows.

#![expect(unsafe_code, reason = "slices of the shared buffer are made here, over claimed rows")]

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{RefUnwindSafe, UnwindSafe};
#[cfg(feature = "python")]
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::buffer::{Buffer, Source, Stored, StoredMut, Target};
use super::deadline::{Deadline, Patience};
use super::gate::{Exclusive, Gate};
use super::pins::{PinKey, Pins};
use crate::config::Geometry;
use crate::dtype::Element;
use crate::error::{KvError, Result};

/// How much memory is asked for between two looks at the clock: some milliseconds' worth.
const PREFAULT_STEP_BYTES: usize = 32 << 20;

/// The rows of a cache, shared by all who read and write them.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    geometry: Geometry,
    /// Allocated once, by whoever holds the tail.
    buffer: OnceLock<Buffer>,
    /// Rows `0..len` are published. It grows under the tail, and shrinks under gate and tail both.
    /// The release store that publishes rows pairs with the acquire load in [`Rows::len`].
    len: AtomicUsize,
    tail: Mutex<Tail>,
    gate: Gate,
    pins: Pins,
    _elements: PhantomData<T>,
}

// A panic in a visitor unwinds through guards only, and nothing here is changed while one runs.
impl<T> UnwindSafe for Rows<T> {}
impl<T> RefUnwindSafe for Rows<T> {}

/// What is known of the rows past the published ones.
#[derive(Debug, Default)]
struct Tail {
    /// Rows from here on have never been written and are zero.
    high_water: usize,
    /// Rows that a [`ReservedRows`] has for itself; it starts at `len`.
    reserved: Option<Range<usize>>,
}

/// One write: `rows` rows at row `at`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowWrite<'a, T: Element> {
    pub(crate) at: usize,
    pub(crate) rows: usize,
    pub(crate) keys: Source<'a, T>,
    pub(crate) values: Source<'a, T>,
}

/// Writes that were all found to fit the rows they are for, and that happen together.
///
/// # Invariants
///
/// `writes` yields the same writes each time it is cloned, and `hull` covers them all.
#[derive(Debug)]
pub(crate) struct Batch<'r, T, I> {
    rows: &'r Rows<T>,
    writes: I,
    /// From the first row written to one past the last.
    hull: Range<usize>,
}

impl<T: Element> Rows<T> {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            buffer: OnceLock::new(),
            len: AtomicUsize::new(0),
            tail: Mutex::default(),
            gate: Gate::default(),
            pins: Pins::default(),
            _elements: PhantomData,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Bytes allocated so far.
    pub(crate) fn nbytes(&self) -> usize {
        self.buffer.get().map_or(0, Buffer::nbytes)
    }

    // Growing

    /// Publishes zeros up to row `len`, or up to the capacity; never shrinks.
    pub(crate) fn initialize(&self, len: usize, deadline: Deadline) -> Result<()> {
        let mut tail = self.lock_tail(deadline)?;
        let buffer = self.allocated(&tail)?;
        let len = len.min(self.geometry.capacity);
        if len > self.len() {
            tail.check_unreserved()?;
            self.zero_left_behind(buffer, &tail, self.len()..len);
            self.publish(&mut tail, len);
        }
        Ok(())
    }

    /// Writes rows past the published ones and publishes them.
    pub(crate) fn append(
        &self,
        keys: Source<'_, T>,
        values: Source<'_, T>,
        deadline: Deadline,
    ) -> Result<Range<usize>> {
        let mut write = RowWrite { at: 0, rows: keys.len() / self.geometry.width, keys, values };
        self.check_width(&write)?;
        self.check_numbers(&write)?;
        let mut tail = self.lock_tail(deadline)?;
        write.at = self.len();
        let range = self.check_room(write.at, write.rows)?;
        if write.rows > 0 {
            tail.check_unreserved()?;
        }
        let buffer = self.allocated(&tail)?;
        // SAFETY: the rows are past the published ones and not reserved, and the tail is held.
        unsafe { self.copy_in(buffer, &write) };
        self.publish(&mut tail, range.end);
        Ok(range)
    }

    /// Takes the next `rows` rows, zeroed, out of everybody else's reach.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        rows: usize,
        deadline: Deadline,
    ) -> Result<ReservedRows<T>> {
        let mut tail = self.lock_tail(deadline)?;
        let range = self.check_room(self.len(), rows)?;
        tail.check_unreserved()?;
        let buffer = self.allocated(&tail)?;
        self.zero_left_behind(buffer, &tail, range.clone());
        tail.high_water = tail.high_water.max(range.end);
        tail.reserved = Some(range.clone());
        Ok(ReservedRows { rows: Arc::clone(self), range, commits: false })
    }

    /// Has the system provide all pages of the buffer now.
    ///
    /// What was provided when the deadline passes stays, so that another call goes on from there.
    pub(crate) fn prefault(&self, deadline: Deadline) -> Result<()> {
        let buffer = self.allocated(&*self.lock_tail(deadline)?)?;
        for start in (0..buffer.nbytes()).step_by(PREFAULT_STEP_BYTES) {
            if deadline.has_passed() {
                return Err(busy(&(0..self.geometry.capacity)));
            }
            if !buffer.populate(start, PREFAULT_STEP_BYTES)? {
                return self.touch(buffer);
            }
        }
        Ok(())
    }

    /// Does the same where the system knows no way: zeros over rows that are zero, and that nobody
    /// can see, touch their pages. Step by step, so that nobody waits for the tail for long.
    fn touch(&self, buffer: &Buffer) -> Result<()> {
        let capacity = self.geometry.capacity;
        let step = (PREFAULT_STEP_BYTES / self.geometry.row_bytes()).max(1);
        for start in (0..capacity).step_by(step) {
            let tail = self.lock_tail(Deadline::Never)?;
            let untouched = start.max(tail.high_water)..start.saturating_add(step).min(capacity);
            if !untouched.is_empty() {
                // SAFETY: the rows were never handed out, and the tail is held.
                unsafe { self.zero(buffer, &untouched) };
            }
        }
        Ok(())
    }

    // Reading

    /// Calls `visitor` with the keys and the values of published rows, which stay as they are until
    /// it returns.
    pub(crate) fn visit<R>(
        &self,
        start: usize,
        end: Option<usize>,
        visitor: impl FnOnce(Stored<'_, T>, Stored<'_, T>) -> R,
    ) -> Result<R> {
        let _visit = self.gate.visit();
        let range = self.published(start, end)?;
        // SAFETY: the rows are published, and the gate is held shared until this function ends,
        // which the borrows can not outlive.
        let [keys, values] = unsafe { self.stored(&range) };
        Ok(visitor(keys, values))
    }

    /// Copies published rows to the start of two buffers.
    pub(crate) fn copy_out(
        &self,
        range: Range<usize>,
        keys: &mut Target<'_, T>,
        values: &mut Target<'_, T>,
        deadline: Deadline,
    ) -> Result<()> {
        check_order(&range)?;
        let wanted = range.len().saturating_mul(self.geometry.width);
        for (plane, given) in [("keys", keys.len()), ("values", values.len())] {
            if given < wanted {
                return Err(KvError::OutputTooShort { plane, given, wanted });
            }
        }
        let _shared = self.gate.shared(deadline).ok_or_else(|| busy(&range))?;
        self.check_published(&range)?;
        let Some(buffer) = self.buffer.get() else { return Ok(()) };
        let [keys_at, values_at] = self.geometry.places(&range);
        // SAFETY: the rows are published, and the gate is held shared.
        unsafe { buffer.read(&keys_at, keys) };
        // SAFETY: likewise.
        unsafe { buffer.read(&values_at, values) };
        Ok(())
    }

    /// Keeps published rows as they are for as long as the result lives.
    pub(crate) fn pin(
        self: &Arc<Self>,
        start: usize,
        end: Option<usize>,
        deadline: Deadline,
    ) -> Result<PinnedRows<T>> {
        let _shared =
            self.gate.shared(deadline).ok_or_else(|| busy(&(start..end.unwrap_or(start))))?;
        let range = self.published(start, end)?;
        // No row can change, so there is nothing to register.
        let key = (!range.is_empty()).then(|| self.pins.pin(range.clone()));
        Ok(PinnedRows { rows: Arc::clone(self), range, key })
    }

    // Changing what is published

    /// Checks `writes` one by one, and tells the position of the first that does not fit.
    pub(crate) fn batch<'r, 'a, I>(&'r self, writes: I) -> Result<Batch<'r, T, I>, (usize, KvError)>
    where
        I: Iterator<Item = RowWrite<'a, T>> + Clone,
    {
        let mut hull = None::<Range<usize>>;
        for (position, write) in writes.clone().enumerate() {
            let range = self
                .check_width(&write)
                .and_then(|()| self.check_room(write.at, write.rows))
                .and_then(|range| self.check_numbers(&write).map(|()| range))
                .map_err(|error| (position, error))?;
            if range.is_empty() {
                continue;
            }
            hull = Some(hull.map_or(range.clone(), |hull| {
                hull.start.min(range.start)..hull.end.max(range.end)
            }));
        }
        Ok(Batch { rows: self, writes, hull: hull.unwrap_or(0..0) })
    }

    /// Makes `len` the new length.
    pub(crate) fn truncate(&self, len: usize, patience: Patience) -> Result<()> {
        self.check_published(&(len..len))?;
        if len == self.len() {
            return Ok(());
        }
        // Up to the capacity, for rows may be appended and pinned before the claim succeeds.
        let given_up = len..self.geometry.capacity;
        let _exclusive = self.claim(&std::iter::once(given_up.clone()), &given_up, patience)?;
        let tail = self.lock_tail(patience.deadline)?;
        tail.check_unreserved()?;
        self.check_published(&(len..len))?;
        self.len.store(len, Ordering::Release);
        Ok(())
    }

    /// Waits for closures, and as `patience` says for pins, until `ranges` are free to change.
    fn claim(
        &self,
        ranges: &(impl Iterator<Item = Range<usize>> + Clone),
        hull: &Range<usize>,
        patience: Patience,
    ) -> Result<Exclusive<'_>> {
        let published =
            |range: Range<usize>| range.start..range.end.min(self.len()).max(range.start);
        // The usual case takes the gate at once and looks at the pins once. A closure on this
        // thread is among those who can keep it from that.
        let mut exclusive = self.gate.exclusive(Deadline::Now);
        if exclusive.is_none() && self.gate.is_visited() {
            return Err(KvError::WouldDeadlock);
        }
        loop {
            if patience.for_pins && exclusive.is_none() {
                let left = self.pins.wait_until_clear(ranges, hull, patience.deadline);
                if let Some((range, pins)) = left {
                    return Err(KvError::Timeout { range: published(range), pins });
                }
            } else if let Some((range, pins)) = self.pins.conflict(ranges.clone(), hull) {
                if !patience.for_pins {
                    return Err(KvError::Pinned { range: published(range), pins });
                }
                exclusive = None;
                continue;
            } else if let Some(exclusive) = exclusive {
                return Ok(exclusive);
            }
            let waited = self.gate.exclusive(patience.deadline);
            exclusive = Some(waited.ok_or_else(|| busy(&published(hull.clone())))?);
        }
    }

    // What the above are made of

    fn lock_tail(&self, deadline: Deadline) -> Result<MutexGuard<'_, Tail>> {
        deadline.lock(&self.tail).ok_or_else(|| busy(&(self.len()..self.geometry.capacity)))
    }

    /// The buffer, allocated by the first who needs it.
    fn allocated(&self, _tail: &Tail) -> Result<&Buffer> {
        if let Some(buffer) = self.buffer.get() {
            return Ok(buffer);
        }
        let buffer = Buffer::zeroed(self.geometry.num_bytes)?;
        Ok(self.buffer.get_or_init(|| buffer))
    }

    /// Zeroes those rows of an unpublished `range` that hold what was truncated or discarded.
    fn zero_left_behind(&self, buffer: &Buffer, tail: &Tail, range: Range<usize>) {
        let dirty = range.start..range.end.min(tail.high_water);
        if !dirty.is_empty() {
            // SAFETY: the rows are past the published ones and not reserved, and the tail is held.
            unsafe { self.zero(buffer, &dirty) };
        }
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the rows meanwhile.
    unsafe fn zero(&self, buffer: &Buffer, range: &Range<usize>) {
        for place in self.geometry.places(range) {
            // SAFETY: the caller's promise.
            unsafe { buffer.zero::<T>(&place) };
        }
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the rows meanwhile.
    unsafe fn copy_in(&self, buffer: &Buffer, write: &RowWrite<'_, T>) {
        let places = self.geometry.places(&(write.at..write.at + write.rows));
        for (place, source) in places.iter().zip([&write.keys, &write.values]) {
            // SAFETY: the caller's promise.
            unsafe { buffer.write(place, source) };
        }
    }

    /// # Safety
    ///
    /// Nobody writes to the rows while the borrows live.
    #[inline]
    unsafe fn stored(&self, range: &Range<usize>) -> [Stored<'_, T>; 2] {
        let Some(buffer) = self.buffer.get() else { return [Stored::EMPTY; 2] };
        let [keys_at, values_at] = self.geometry.places(range);
        // SAFETY: the caller's promise.
        let keys = unsafe { buffer.rows(&keys_at) };
        // SAFETY: likewise.
        let values = unsafe { buffer.rows(&values_at) };
        [keys, values]
    }

    fn check_width(&self, write: &RowWrite<'_, T>) -> Result<()> {
        let (keys, values, width) = (write.keys.len(), write.values.len(), self.geometry.width);
        if keys != values {
            return Err(KvError::LengthMismatch { keys, values });
        }
        if write.rows.checked_mul(width) != Some(keys) {
            return Err(KvError::WidthMismatch { given: keys, width });
        }
        Ok(())
    }

    fn check_numbers(&self, write: &RowWrite<'_, T>) -> Result<()> {
        let shape = self.geometry.token_shape();
        write.keys.check("keys", shape)?;
        write.values.check("values", shape)
    }

    fn check_room(&self, at: usize, rows: usize) -> Result<Range<usize>> {
        let (range, capacity) = (at..at.saturating_add(rows), self.geometry.capacity);
        if range.end > capacity || at.checked_add(rows).is_none() {
            return Err(KvError::CapacityExceeded { range, capacity });
        }
        Ok(range)
    }

    /// The range from `start` to `end`, or to the length, which can not shrink before the range is
    /// used because the caller holds the gate.
    fn published(&self, start: usize, end: Option<usize>) -> Result<Range<usize>> {
        let range = start..end.unwrap_or_else(|| self.len().max(start));
        check_order(&range)?;
        self.check_published(&range)?;
        Ok(range)
    }

    /// Says whether all of a range is published now.
    #[cfg(feature = "python")]
    pub(crate) fn check_stored(&self, start: usize, end: usize) -> Result<()> {
        self.published(start, Some(end)).map(drop)
    }

    fn check_published(&self, range: &Range<usize>) -> Result<()> {
        let len = self.len();
        if range.end > len {
            return Err(KvError::RangeOutOfBounds { start: range.start, end: range.end, len });
        }
        Ok(())
    }
}

impl<T> Rows<T> {
    fn publish(&self, tail: &mut Tail, len: usize) {
        tail.high_water = tail.high_water.max(len);
        self.len.store(len, Ordering::Release);
    }
}

impl<'a, T: Element, I: Iterator<Item = RowWrite<'a, T>> + Clone> Batch<'_, T, I> {
    /// Makes all writes, which readers see all or none of. Rows between the old length and the new
    /// one that no write covers read as zeros.
    pub(crate) fn write(self, patience: Patience) -> Result<()> {
        if self.hull.is_empty() {
            return Ok(());
        }
        let rows = self.rows;
        let buffer = rows.buffer.get().ok_or(KvError::NotInitialized)?;
        if self.hull.start >= rows.len() {
            let tail = rows.lock_tail(patience.deadline)?;
            if self.hull.start >= rows.len() {
                return self.extend(buffer, tail);
            }
        }
        let ranges = self.writes.clone().map(|write| write.at..write.at + write.rows);
        let _exclusive = rows.claim(&ranges, &self.hull, patience)?;
        // With the gate held the length can not shrink, so what is below it stays published.
        if self.hull.end > rows.len() {
            let tail = rows.lock_tail(patience.deadline)?;
            return self.extend(buffer, tail);
        }
        // SAFETY: the rows are published, the gate is held, and no pin overlaps them.
        unsafe { self.copy_in(buffer) };
        Ok(())
    }

    /// Writes with the tail held, and with the gate held as well if any write is below the length.
    fn extend(&self, buffer: &Buffer, mut tail: MutexGuard<'_, Tail>) -> Result<()> {
        let rows = self.rows;
        let len = rows.len().max(self.hull.end);
        if len > rows.len() {
            tail.check_unreserved()?;
            rows.zero_left_behind(buffer, &tail, rows.len()..len);
        }
        // SAFETY: rows below the length are claimed as the summary says; those above it are not
        // reserved, and the tail is held.
        unsafe { self.copy_in(buffer) };
        rows.publish(&mut tail, len);
        Ok(())
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the rows meanwhile.
    unsafe fn copy_in(&self, buffer: &Buffer) {
        for write in self.writes.clone() {
            // SAFETY: the caller's promise.
            unsafe { self.rows.copy_in(buffer, &write) };
        }
    }
}

impl Tail {
    fn check_unreserved(&self) -> Result<()> {
        match &self.reserved {
            Some(range) => Err(KvError::Reserved { range: range.clone() }),
            None => Ok(()),
        }
    }
}

fn check_order(range: &Range<usize>) -> Result<()> {
    if range.start > range.end {
        return Err(KvError::InvertedRange { start: range.start, end: range.end });
    }
    Ok(())
}

/// The error of a call that waited for a closure or for another writer until its deadline.
fn busy(range: &Range<usize>) -> KvError {
    KvError::Timeout { range: range.clone(), pins: 0 }
}

/// Published rows that do not change, and whose memory stays, while this lives.
#[derive(Debug)]
pub(crate) struct PinnedRows<T> {
    rows: Arc<Rows<T>>,
    range: Range<usize>,
    /// `None` for no rows.
    key: Option<PinKey>,
}

impl<T: Element> PinnedRows<T> {
    pub(crate) fn geometry(&self) -> &Geometry {
        self.rows.geometry()
    }

    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// The keys and the values.
    pub(crate) fn stored(&self) -> [Stored<'_, T>; 2] {
        // SAFETY: who writes published rows, or makes them unpublished, finds no pin on them first.
        unsafe { self.rows.stored(&self.range) }
    }
}

impl<T> Drop for PinnedRows<T> {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            self.rows.pins.unpin(key);
        }
    }
}

/// Rows past the published ones that nobody else can reach. Dropping them gives them up.
///
/// # Invariants
///
/// While this lives, `tail.reserved` is `range`, which keeps the length at `range.start`.
#[derive(Debug)]
pub(crate) struct ReservedRows<T> {
    rows: Arc<Rows<T>>,
    range: Range<usize>,
    /// Whether to publish the rows at the end.
    commits: bool,
}

impl<T: Element> ReservedRows<T> {
    pub(crate) fn geometry(&self) -> &Geometry {
        self.rows.geometry()
    }

    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// The keys and the values.
    pub(crate) fn stored(&self) -> [Stored<'_, T>; 2] {
        // SAFETY: nobody but this object's borrowers reaches the rows, and writing takes `&mut`.
        unsafe { self.rows.stored(&self.range) }
    }

    /// Where the keys and the values are, and their scales, for whoever shares this object to read and
    /// write. Whoever uses them makes no slices of the same rows meanwhile.
    #[cfg(feature = "python")]
    pub(crate) fn pointers(&self) -> [(NonNull<T>, NonNull<T::Scale>); 2] {
        let Some(buffer) = self.rows.buffer.get() else {
            return [(NonNull::dangling(), NonNull::dangling()); 2];
        };
        self.rows.geometry.places(&self.range).map(|place| buffer.pointer(&place))
    }

    /// The keys and the values, to be written.
    pub(crate) fn stored_mut(&mut self) -> [StoredMut<'_, T>; 2] {
        let Some(buffer) = self.rows.buffer.get() else { return Default::default() };
        self.rows.geometry.places(&self.range).map(|place| {
            // SAFETY: nobody else reaches the rows, and the two planes do not overlap.
            unsafe { buffer.rows_mut(&place) }
        })
    }

    /// Publishes the rows.
    pub(crate) fn commit(mut self) {
        self.commits = true;
    }
}

impl<T> Drop for ReservedRows<T> {
    /// Ends the reservation and publishes its rows, if at all, in one step for all others.
    fn drop(&mut self) {
        let mut tail = self.rows.tail.lock();
        tail.reserved = None;
        if self.commits {
            self.rows.publish(&mut tail, self.range.end);
        }
    }
}
