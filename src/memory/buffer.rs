//! One allocation, and the few things that are done to it through raw pointers.

#![expect(unsafe_code, reason = "the cache's bytes are shared between threads row by row")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use bytemuck::Pod;
use memmap2::{MmapMut, MmapRaw};

use crate::config::Place;
use crate::dtype::Element;
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
}

impl<T: Element> Default for StoredMut<'_, T> {
    /// No rows.
    fn default() -> Self {
        Self { data: &mut [], scales: &mut [] }
    }
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

    /// The address of `len` values, `offset` bytes in.
    fn at<U>(&self, offset: usize, len: usize) -> NonNull<U> {
        let end = len.checked_mul(size_of::<U>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.len), "rows are inside the buffer");
        assert!(offset.is_multiple_of(align_of::<U>()), "rows are aligned");
        // SAFETY: the assertion keeps the result inside the allocation, or one past its end.
        unsafe { self.bytes.add(offset) }.cast()
    }

    /// The address of the elements of some rows, for use while the caller's claim on them lasts.
    #[cfg(feature = "python")]
    pub(super) fn pointer<T: Element>(&self, place: &Place) -> NonNull<T> {
        self.at(place.data_at, place.num_elements)
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
        // and valid for `U`; the caller keeps writers away.
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
    /// Nobody else reads or writes the rows meanwhile.
    pub(super) unsafe fn write<T: Element>(&self, place: &Place, source: Source<'_, T>) {
        let Source { data, scales } = source;
        assert!(data.len == place.num_elements, "the source has as many elements as the rows");
        // SAFETY: the caller's promise.
        unsafe { self.copy_in(place.data_at, data) };
        if scales.len == place.num_scales {
            // SAFETY: likewise.
            unsafe { self.copy_in(place.scales_at, scales) };
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
    pub(super) unsafe fn read<T: Element>(&self, place: &Place, target: &Target<'_, T>) {
        let len = place.num_elements;
        assert!(len <= target.len, "the target has room");
        let elements = self.at(place.data_at, len);
        // SAFETY: the target is writable by its invariant, the source by `at`; the caller keeps
        // writers away. The two may overlap.
        unsafe { elements.copy_to(target.elements, len) }
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

/// Values to copy: a slice, or foreign memory that others may write to meanwhile, of which for that
/// reason no reference is ever made.
///
/// # Invariants
///
/// `values` is aligned and readable for `len` values during `'a`.
#[derive(Clone, Copy, Debug)]
struct Run<'a, U> {
    values: NonNull<U>,
    len: usize,
    _owner: PhantomData<&'a [U]>,
}

/// Elements to copy from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a, T: Element> {
    data: Run<'a, T>,
    /// None if they are not known.
    scales: Run<'a, T::Scale>,
}

/// Elements to copy to: a slice, or foreign memory.
///
/// # Invariants
///
/// `elements` is aligned and writable for `len` elements during `'a`.
#[derive(Debug)]
pub(crate) struct Target<'a, T> {
    elements: NonNull<T>,
    len: usize,
    _owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&[U]`, which is `Send`.
unsafe impl<U: Sync> Send for Run<'_, U> {}

// SAFETY: it stands for a `&[U]`, which is `Sync`.
unsafe impl<U: Sync> Sync for Run<'_, U> {}

// SAFETY: it stands for a `&mut [T]`, which is `Send`.
unsafe impl<T: Send> Send for Target<'_, T> {}

// SAFETY: it stands for a `&mut [T]`, which is `Sync`.
unsafe impl<T: Sync> Sync for Target<'_, T> {}

impl<'a, U> From<&'a [U]> for Run<'a, U> {
    fn from(slice: &'a [U]) -> Self {
        Self { values: NonNull::from(slice).cast(), len: slice.len(), _owner: PhantomData }
    }
}

impl<U> Run<'_, U> {
    fn part(&self, values: &Range<usize>) -> Self {
        let first = part(self.values, self.len, values);
        Self { values: first, len: values.len(), _owner: PhantomData }
    }
}

impl<T: Element> Source<'_, T> {
    /// # Safety
    ///
    /// `elements` is aligned and readable for `len` elements during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw(elements: NonNull<T>, len: usize) -> Self {
        let data = Run { values: elements, len, _owner: PhantomData };
        Self { data, scales: Run::from([].as_slice()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len
    }

    /// Some of the elements.
    pub(crate) fn part(&self, elements: Range<usize>) -> Self {
        Self { data: self.data.part(&elements), scales: Run::from([].as_slice()) }
    }
}

impl<'a, T: Element> From<&'a [T]> for Source<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self { data: slice.into(), scales: [].as_slice().into() }
    }
}

impl<'a, T: Element> From<Stored<'a, T>> for Source<'a, T> {
    fn from(stored: Stored<'a, T>) -> Self {
        Self { data: stored.data.into(), scales: stored.scales.into() }
    }
}

impl<T> Target<'_, T> {
    /// # Safety
    ///
    /// `elements` is aligned and writable for `len` elements during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw(elements: NonNull<T>, len: usize) -> Self {
        Self { elements, len, _owner: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Some of the elements.
    pub(crate) fn part(&mut self, elements: Range<usize>) -> Target<'_, T> {
        Target {
            elements: part(self.elements, self.len, &elements),
            len: elements.len(),
            _owner: PhantomData,
        }
    }
}

/// The address of the first of some of `len` elements.
fn part<T>(all: NonNull<T>, len: usize, elements: &Range<usize>) -> NonNull<T> {
    assert!(elements.start <= elements.end && elements.end <= len, "a part is inside the whole");
    // SAFETY: the assertion keeps it inside the elements, or one past their end.
    unsafe { all.add(elements.start) }
}

impl<'a, T> From<&'a mut [T]> for Target<'a, T> {
    fn from(slice: &'a mut [T]) -> Self {
        let len = slice.len();
        Self { elements: NonNull::from(slice).cast(), len, _owner: PhantomData }
    }
}
