//! One allocation, and the few things that are done to it through raw pointers.

#![expect(unsafe_code, reason = "the cache's bytes are shared between threads row by row")]
#![expect(
    clippy::inline_always,
    reason = "where it is inlined says for which vectors it is compiled"
)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use bytemuck::Pod;
use fearless_simd::{Level, dispatch};
use memmap2::{MmapMut, MmapRaw};

use crate::config::Place;
#[cfg(feature = "python")]
use crate::dtype::DType;
use crate::dtype::{Element, Transfer, largest};
use crate::error::{KvError, Result};

/// Zeroed bytes at an address that never changes.
///
/// The memory comes page by page from the system when it is first touched, in huge pages where the
/// system gives them.
///
/// # Invariants
///
/// * `bytes` points to `len` bytes that live as long as `map`, which nothing else looks into. It is
///   aligned to a page, and so for any element type.
/// * No reference to the whole is ever made. Who may touch which bytes when is for the caller to
///   settle; each method says what it relies on.
pub(super) struct Buffer {
    bytes: NonNull<u8>,
    len: usize,
    map: MmapRaw,
}

/// Rows of one plane as they are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a, T: Element> {
    pub(crate) data: &'a [T],
    /// What they are multiplied by, if anything: one a head.
    pub(crate) scales: &'a [T::Scale],
}

/// The same for writing.
#[derive(Debug)]
pub(crate) struct StoredMut<'a, T: Element> {
    pub(crate) data: &'a mut [T],
    pub(crate) scales: &'a mut [T::Scale],
}

impl<T: Element> Stored<'_, T> {
    pub(super) const EMPTY: Self = Self { data: &[], scales: &[] };

    /// Copies the elements to the start of `target`, which has room for them.
    pub(crate) fn copy_to(&self, target: &mut Target<'_, T>) {
        match target {
            Target::Elements(space) => space.fill(0, self.data),
            Target::Numbers(space) => self.widen(space),
        }
    }

    // Out of the way of those who copy.
    #[inline(never)]
    fn widen(&self, space: &mut Space<'_, f32>) {
        dispatch!(Level::new(), _simd => self.widen_in_vectors(space));
    }

    #[inline(always)]
    fn widen_in_vectors(&self, space: &mut Space<'_, f32>) {
        let group = group::<T>(self.data.len(), self.scales.len());
        let (mut done, mut scratch) = (0, [0.0; SCRATCH]);
        for (elements, scale) in self.data.chunks(group).zip(self.scales) {
            for part in elements.chunks(SCRATCH) {
                let numbers = &mut scratch[..part.len()];
                T::widen(part, *scale, numbers);
                space.fill(done, numbers);
                done += part.len();
            }
        }
    }
}

impl<T: Element> StoredMut<'_, T> {
    /// Makes the elements those nearest to `numbers`, of which there are as many.
    ///
    /// They are read again after [`Source::check`], and for the scale of a long head once more. If others
    /// write to them in between, what holds is this: a scale is finite whatever it is made of, what is
    /// too large for it by now is clamped, and NaN becomes 0. So what is stored is finite, and no more
    /// than its scale allows.
    // Out of the way of those who copy.
    #[inline(never)]
    fn round(self, numbers: Run<'_, f32>) {
        dispatch!(Level::new(), _simd => self.round_in_vectors(numbers));
    }

    #[inline(always)]
    fn round_in_vectors(self, numbers: Run<'_, f32>) {
        let group = group::<T>(self.data.len(), self.scales.len());
        let mut scratch = [0.0; SCRATCH];
        let groups = self.data.chunks_mut(group).zip(self.scales);
        for ((elements, scale), numbers) in groups.zip(numbers.chunks(group)) {
            if T::DTYPE.has_scales() {
                if numbers.len <= SCRATCH {
                    let numbers = numbers.copy(&mut scratch);
                    *scale = T::scale(largest(0.0, numbers));
                    T::narrow(numbers, *scale, elements);
                    continue;
                }
                *scale = T::scale(numbers.largest(&mut scratch));
            }
            for (part, numbers) in elements.chunks_mut(SCRATCH).zip(numbers.chunks(SCRATCH)) {
                T::narrow(numbers.copy(&mut scratch), *scale, part);
            }
        }
    }
}

impl<T: Element> Default for StoredMut<'_, T> {
    /// No rows.
    fn default() -> Self {
        Self { data: &mut [], scales: &mut [] }
    }
}

/// How many elements have one scale: those of a head, or all of them if there are no scales.
fn group<T: Element>(num_elements: usize, num_scales: usize) -> usize {
    let num_groups = if T::DTYPE.has_scales() { num_scales.max(1) } else { 1 };
    (num_elements / num_groups).max(1)
}

// SAFETY: a `Buffer` owns its memory and hands out nothing without an unsafe call that must prove
// the access free of races.
unsafe impl Send for Buffer {}

// SAFETY: as above; every method that touches the bytes is unsafe for just this reason.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `len` zeros. The caller has checked that they fit `isize`.
    pub(super) fn zeroed(len: usize) -> Result<Self> {
        let out_of_memory = KvError::OutOfMemory { bytes: len };
        // Raw, for what looks like a look at its length would be a reference to all its bytes.
        let map = MmapMut::map_anon(len).map_err(|_| out_of_memory.clone())?;
        let map = MmapRaw::from(map);
        #[cfg(target_os = "linux")]
        {
            // Advice only: a system without huge pages refuses it, and nothing else changes.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let bytes = NonNull::new(map.as_mut_ptr()).ok_or(out_of_memory)?;
        Ok(Self { bytes, len, map })
    }

    /// Bytes allocated.
    pub(super) fn nbytes(&self) -> usize {
        self.map.len()
    }

    /// Asks the system to provide `num_bytes` from `start` on now, without changing any; false if it
    /// knows no way.
    ///
    /// # Errors
    ///
    /// `OutOfMemory` if there are not as many pages.
    #[cfg(target_os = "linux")]
    pub(super) fn populate(&self, start: usize, num_bytes: usize) -> Result<bool> {
        let num_bytes = num_bytes.min(self.nbytes().saturating_sub(start));
        match self.map.advise_range(memmap2::Advice::PopulateWrite, start, num_bytes) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::OutOfMemory => {
                Err(KvError::OutOfMemory { bytes: self.nbytes() })
            }
            Err(_) => Ok(false),
        }
    }

    /// This system knows no way.
    ///
    /// # Errors
    ///
    /// None.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn populate(&self, _start: usize, _num_bytes: usize) -> Result<bool> {
        Ok(false)
    }

    /// The address of `len` values, `offset` bytes in; of values without bytes, any that is aligned.
    #[inline]
    fn at<U>(&self, offset: usize, len: usize) -> NonNull<U> {
        if size_of::<U>() == 0 {
            // What has no bytes is anywhere. This is what scales of the floats cost: nothing.
            return NonNull::dangling();
        }
        let end = len.checked_mul(size_of::<U>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.len), "rows are inside the buffer");
        assert!(offset.is_multiple_of(align_of::<U>()), "rows are aligned");
        // SAFETY: the assertion keeps the result inside the allocation, or one past its end.
        unsafe { self.bytes.add(offset) }.cast()
    }

    /// The addresses of the elements and of the scales of some rows, for use while the caller's claim
    /// on them lasts.
    #[cfg(feature = "python")]
    pub(super) fn pointer<T: Element>(&self, place: &Place) -> (NonNull<T>, NonNull<T::Scale>) {
        let data = self.at(place.data_at, place.num_elements);
        (data, self.at(place.scales_at, place.num_scales))
    }

    /// Borrows rows.
    ///
    /// # Safety
    ///
    /// Their elements are of this type, and nobody writes to them while the borrow lives.
    pub(super) unsafe fn rows<T: Element>(&self, place: &Place) -> Stored<'_, T> {
        Stored {
            // SAFETY: the caller's promise.
            data: unsafe { self.slice(place.data_at, place.num_elements) },
            // SAFETY: likewise.
            scales: unsafe { self.slice(place.scales_at, place.num_scales) },
        }
    }

    /// # Safety
    ///
    /// Nobody writes to the values while the borrow lives.
    unsafe fn slice<U: Pod>(&self, offset: usize, len: usize) -> &[U] {
        let values = self.at(offset, len);
        // SAFETY: `at` proved the range inside the allocation, whose bytes are always initialized
        // and valid for `U`, or the values have no bytes; the caller keeps writers away.
        unsafe { NonNull::slice_from_raw_parts(values, len).as_ref() }
    }

    /// Borrows rows for writing.
    ///
    /// # Safety
    ///
    /// Their elements are of this type, and nobody else reads or writes them while the borrow lives.
    pub(super) unsafe fn rows_mut<T: Element>(&self, place: &Place) -> StoredMut<'_, T> {
        StoredMut {
            // SAFETY: the caller's promise; elements and scales do not overlap.
            data: unsafe { self.slice_mut(place.data_at, place.num_elements) },
            // SAFETY: likewise.
            scales: unsafe { self.slice_mut(place.scales_at, place.num_scales) },
        }
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the values while the borrow lives.
    #[expect(clippy::mut_from_ref, reason = "what is exclusive is the caller's claim on the range")]
    unsafe fn slice_mut<U: Pod>(&self, offset: usize, len: usize) -> &mut [U] {
        let values = self.at(offset, len);
        // SAFETY: as in `slice`; the caller keeps everybody else away.
        unsafe { NonNull::slice_from_raw_parts(values, len).as_mut() }
    }

    /// Writes all of `source`, which has as many elements as the rows.
    ///
    /// # Safety
    ///
    /// Their elements are of this type, and nobody else reads or writes them meanwhile.
    pub(super) unsafe fn write<T: Element>(&self, place: &Place, source: &Source<'_, T>) {
        assert!(source.len() == place.num_elements, "the source has as many elements as the rows");
        match source {
            Source::Elements(elements) => {
                // SAFETY: the caller's promise.
                unsafe { self.copy_in(place.data_at, *elements) };
            }
            Source::Stored(stored) => {
                // SAFETY: the caller's promise.
                unsafe { self.copy_in(place.data_at, stored.data.into()) };
                // SAFETY: likewise.
                unsafe { self.copy_in(place.scales_at, stored.scales.into()) };
            }
            Source::Numbers(numbers) => {
                // SAFETY: the caller's promise.
                unsafe { self.rows_mut::<T>(place) }.round(*numbers);
            }
        }
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the values meanwhile.
    unsafe fn copy_in<U: Pod>(&self, offset: usize, run: Run<'_, U>) {
        let values = self.at(offset, run.len);
        // SAFETY: the run is readable by its invariant, the target by `at`; the caller keeps
        // everybody else away. The two may overlap.
        unsafe { values.copy_from(run.values, run.len) }
    }

    /// Copies rows to the start of `target`, which has room for them.
    ///
    /// # Safety
    ///
    /// Their elements are of this type, and nobody writes to them meanwhile.
    pub(super) unsafe fn read<T: Element>(&self, place: &Place, target: &mut Target<'_, T>) {
        // SAFETY: the caller's promise.
        unsafe { self.rows::<T>(place) }.copy_to(target);
    }

    /// Zeroes rows.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them meanwhile.
    pub(super) unsafe fn zero<T: Element>(&self, place: &Place) {
        // SAFETY: the caller's promise.
        unsafe { self.zero_values::<T>(place.data_at, place.num_elements) };
        // SAFETY: likewise.
        unsafe { self.zero_values::<T::Scale>(place.scales_at, place.num_scales) };
    }

    /// # Safety
    ///
    /// Nobody else reads or writes the values meanwhile.
    unsafe fn zero_values<U: Pod>(&self, offset: usize, len: usize) {
        let values = self.at::<U>(offset, len);
        // SAFETY: `at` proved the range; all bytes zero is a `U`; the caller keeps everybody away.
        unsafe { values.write_bytes(0, len) }
    }

    /// Zeroes `num_bytes` from `offset` on.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them meanwhile.
    pub(super) unsafe fn zero_bytes(&self, offset: usize, num_bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.zero_values::<u8>(offset, num_bytes) }
    }

    /// Copies `num_bytes` from one place to another.
    ///
    /// # Safety
    ///
    /// Nobody writes to those at `from`, and nobody else reads or writes those at `to`, meanwhile.
    pub(super) unsafe fn copy_bytes(&self, from: usize, to: usize, num_bytes: usize) {
        let (from, to) = (self.at::<u8>(from, num_bytes), self.at::<u8>(to, num_bytes));
        // SAFETY: `at` proved both ranges; the caller keeps everybody else away.
        unsafe { to.copy_from(from, num_bytes) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Numbers that are converted at a time: by plain loops, which `dispatch` has compiled once for each kind
/// of vectors that machines have, and chooses from. In between they are on the stack, since those of others
/// may change, and elements are never read twice.
const SCRATCH: usize = 256;

/// Values to copy: a slice, or foreign memory that others may write to meanwhile, of which for that
/// reason no reference is ever made.
///
/// # Invariants
///
/// `values` is aligned and readable for `len` values during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a, U> {
    values: NonNull<U>,
    len: usize,
    _owner: PhantomData<&'a [U]>,
}

/// Room for values: a slice, or foreign memory.
///
/// # Invariants
///
/// `values` is aligned and writable for `len` values during `'a`.
#[derive(Debug)]
pub(crate) struct Space<'a, U> {
    values: NonNull<U>,
    len: usize,
    _owner: PhantomData<&'a mut [U]>,
}

/// What to write to rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a, T: Element> {
    /// Elements of a type without scales.
    Elements(Run<'a, T>),
    /// Elements, and one scale a head if the type has any.
    Stored(&'a Stored<'a, T>),
    /// Numbers, which are rounded.
    Numbers(Run<'a, f32>),
}

/// Where to copy rows.
#[derive(Debug)]
pub(crate) enum Target<'a, T: Element> {
    /// As elements, of a type without scales.
    Elements(Space<'a, T>),
    /// As the numbers that the elements stand for.
    Numbers(Space<'a, f32>),
}

// SAFETY: it stands for a `&[U]`, which is `Send`.
unsafe impl<U: Sync> Send for Run<'_, U> {}

// SAFETY: it stands for a `&[U]`, which is `Sync`.
unsafe impl<U: Sync> Sync for Run<'_, U> {}

impl<'a, U> From<&'a [U]> for Run<'a, U> {
    fn from(slice: &'a [U]) -> Self {
        Self { values: NonNull::from(slice).cast(), len: slice.len(), _owner: PhantomData }
    }
}

impl<'a, U> From<&'a mut [U]> for Space<'a, U> {
    fn from(slice: &'a mut [U]) -> Self {
        let len = slice.len();
        Self { values: NonNull::from(slice).cast(), len, _owner: PhantomData }
    }
}

impl<U> Run<'_, U> {
    /// # Safety
    ///
    /// `values` is aligned and readable for `len` values during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw(values: NonNull<U>, len: usize) -> Self {
        Self { values, len, _owner: PhantomData }
    }

    fn part(&self, values: &Range<usize>) -> Self {
        let first = part(self.values, self.len, values);
        Self { values: first, len: values.len(), _owner: PhantomData }
    }

    /// As many values at a time, and what is left.
    pub(crate) fn chunks(&self, len: usize) -> impl Iterator<Item = Self> {
        (0..self.len).step_by(len).map(move |at| self.part(&(at..self.len.min(at + len))))
    }
}

impl<U: Pod> Run<'_, U> {
    /// Copies all values to the start of `scratch`, which has room for them.
    #[inline(always)]
    pub(crate) fn copy<'s>(&self, scratch: &'s mut [U]) -> &'s [U] {
        let copy = &mut scratch[..self.len];
        // SAFETY: the values are readable by the type's invariant, and the copy has as many.
        unsafe { self.values.copy_to(NonNull::from(&mut *copy).cast(), self.len) };
        copy
    }
}

impl Run<'_, f32> {
    /// Which head of so many elements is the first with infinity or NaN.
    #[inline(always)]
    fn first_not_finite(&self, dim: usize) -> Option<usize> {
        let mut scratch = [0.0; SCRATCH];
        self.chunks(dim).position(|head| !head.largest(&mut scratch).is_finite())
    }

    /// The largest magnitude; infinite or NaN if any number is.
    #[inline(always)]
    fn largest(&self, scratch: &mut [f32]) -> f32 {
        self.chunks(SCRATCH).fold(0.0, |so_far, part| largest(so_far, part.copy(scratch)))
    }
}

impl<U> Space<'_, U> {
    /// Copies `values` to their place from `at` on.
    fn fill(&mut self, at: usize, values: &[U]) {
        let room = part(self.values, self.len, &(at..at.saturating_add(values.len())));
        // SAFETY: the room is writable by the type's invariant, and inside by `part`. The two may
        // overlap.
        unsafe { room.copy_from(NonNull::from(values).cast(), values.len()) }
    }

    fn part(&mut self, values: &Range<usize>) -> Space<'_, U> {
        let first = part(self.values, self.len, values);
        Space { values: first, len: values.len(), _owner: PhantomData }
    }
}

/// The address of the first of some of `len` values.
fn part<U>(all: NonNull<U>, len: usize, values: &Range<usize>) -> NonNull<U> {
    assert!(values.start <= values.end && values.end <= len, "a part is inside the whole");
    // SAFETY: the assertion keeps it inside the values, or one past their end.
    unsafe { all.add(values.start) }
}

impl<T: Element> Source<'_, T> {
    /// `S` is `T` if that has no scales, or `f32`.
    ///
    /// # Safety
    ///
    /// `elements` is aligned and readable for `len` of them during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw<S: Element>(elements: NonNull<S>, len: usize) -> Self {
        if S::DTYPE == T::DTYPE && !T::DTYPE.has_scales() {
            // SAFETY: the caller's promise.
            return Self::Elements(unsafe { Run::from_raw(elements.cast(), len) });
        }
        assert!(S::DTYPE == DType::F32, "other types do not go into the cache");
        // SAFETY: likewise.
        Self::Numbers(unsafe { Run::from_raw(elements.cast(), len) })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Elements(elements) => elements.len,
            Self::Stored(stored) => stored.data.len(),
            Self::Numbers(numbers) => numbers.len,
        }
    }

    /// Some of the elements, without what scales they have.
    pub(crate) fn part(&self, elements: Range<usize>) -> Self {
        match self {
            Self::Elements(all) => Self::Elements(all.part(&elements)),
            Self::Stored(all) => Self::Elements(Run::from(all.data).part(&elements)),
            Self::Numbers(numbers) => Self::Numbers(numbers.part(&elements)),
        }
    }

    /// Checks that all numbers can be scaled, in heads of a token of this shape.
    pub(crate) fn check(&self, plane: &'static str, [num_heads, dim]: [usize; 2]) -> Result<()> {
        let Self::Numbers(numbers) = self else { return Ok(()) };
        if !T::DTYPE.has_scales() {
            return Ok(());
        }
        let bad = dispatch!(Level::new(), _simd => numbers.first_not_finite(dim));
        bad.map_or(Ok(()), |head| {
            Err(KvError::NotFinite { plane, token: head / num_heads, head: head % num_heads })
        })
    }
}

impl<'a, T: Element + Transfer<S>, S: Element> From<&'a [S]> for Source<'a, T> {
    fn from(slice: &'a [S]) -> Self {
        if S::DTYPE == T::DTYPE {
            Self::Elements(bytemuck::cast_slice(slice).into())
        } else {
            Self::Numbers(bytemuck::cast_slice(slice).into())
        }
    }
}

impl<'a, T: Element> From<&'a Stored<'a, T>> for Source<'a, T> {
    fn from(stored: &'a Stored<'a, T>) -> Self {
        Self::Stored(stored)
    }
}

impl<'a, T: Element> Target<'a, T> {
    /// `S` is `T` if that has no scales, or `f32`.
    pub(crate) fn new<S: Element>(slice: &'a mut [S]) -> Self {
        if S::DTYPE == T::DTYPE {
            Self::Elements(bytemuck::cast_slice_mut(slice).into())
        } else {
            Self::Numbers(bytemuck::cast_slice_mut(slice).into())
        }
    }

    /// `S` is `T` if that has no scales, or `f32`.
    ///
    /// # Safety
    ///
    /// `elements` is aligned and writable for `len` of them during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw<S: Element>(elements: NonNull<S>, len: usize) -> Self {
        if S::DTYPE == T::DTYPE && !T::DTYPE.has_scales() {
            return Self::Elements(Space { values: elements.cast(), len, _owner: PhantomData });
        }
        assert!(S::DTYPE == DType::F32, "the cache does not give other types");
        Self::Numbers(Space { values: elements.cast(), len, _owner: PhantomData })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Elements(space) => space.len,
            Self::Numbers(space) => space.len,
        }
    }

    /// Some of the elements.
    pub(crate) fn part(&mut self, elements: Range<usize>) -> Target<'_, T> {
        match self {
            Self::Elements(space) => Target::Elements(space.part(&elements)),
            Self::Numbers(space) => Target::Numbers(space.part(&elements)),
        }
    }
}

impl<'a, T: Element + Transfer<S>, S: Element> From<&'a mut [S]> for Target<'a, T> {
    fn from(slice: &'a mut [S]) -> Self {
        Self::new(slice)
    }
}
