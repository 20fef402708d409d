//! One allocation, and the few things that are done to it through raw pointers.

#![expect(unsafe_code, reason = "the cache's bytes are shared between threads row by row")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapRaw};

use crate::dtype::Element;
use crate::error::{KvError, Result};

/// Zeroed elements at an address that never changes.
///
/// The memory comes page by page from the system when it is first touched, in huge pages where the
/// system gives them.
///
/// # Invariants
///
/// * `elements` points to `len` elements of `T` that live as long as `map`, which nothing else
///   looks into. It is aligned to a page, and so for any element type.
/// * No reference to the whole is ever made. Who may touch which elements when is for the caller
///   to settle; each method says what it relies on.
pub(super) struct Buffer<T> {
    elements: NonNull<T>,
    len: usize,
    map: MmapRaw,
}

// SAFETY: a `Buffer` owns its memory and hands out nothing without an unsafe call that must prove
// the access free of races. `T` is plain data.
unsafe impl<T: Send> Send for Buffer<T> {}

// SAFETY: as above; every method that touches the elements is unsafe for just this reason.
unsafe impl<T: Send + Sync> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// Allocates `len` zeros. The caller has checked that their size fits `isize`.
    pub(super) fn zeroed(len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<T>());
        let out_of_memory = KvError::OutOfMemory { bytes };
        // Raw, for what looks like a look at its length would be a reference to all its bytes.
        let map = MmapMut::map_anon(bytes).map_err(|_| out_of_memory.clone())?;
        let map = MmapRaw::from(map);
        #[cfg(target_os = "linux")]
        {
            // Advice only: a system without huge pages refuses it, and nothing else changes.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let elements = NonNull::new(map.as_mut_ptr().cast()).ok_or(out_of_memory)?;
        Ok(Self { elements, len, map })
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

    /// The address of an element.
    fn at(&self, offset: usize, len: usize) -> NonNull<T> {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "rows are inside the buffer"
        );
        // SAFETY: the assertion keeps the result inside the allocation, or one past its end.
        unsafe { self.elements.add(offset) }
    }

    /// The address of `len` elements, for use while the caller's claim on them lasts.
    #[cfg(feature = "python")]
    pub(super) fn pointer(&self, offset: usize, len: usize) -> NonNull<T> {
        self.at(offset, len)
    }

    /// Borrows `len` elements.
    ///
    /// # Safety
    ///
    /// Nobody writes to them while the borrow lives.
    pub(super) unsafe fn slice(&self, offset: usize, len: usize) -> &[T] {
        let elements = self.at(offset, len);
        // SAFETY: `at` proved the range inside the allocation, whose bytes are always initialized
        // and valid for `T`; the caller keeps writers away.
        unsafe { NonNull::slice_from_raw_parts(elements, len).as_ref() }
    }

    /// Borrows `len` elements for writing.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them while the borrow lives.
    #[expect(clippy::mut_from_ref, reason = "what is exclusive is the caller's claim on the range")]
    pub(super) unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [T] {
        let elements = self.at(offset, len);
        // SAFETY: as in `slice`; the caller keeps everybody else away.
        unsafe { NonNull::slice_from_raw_parts(elements, len).as_mut() }
    }

    /// Copies all of `source` to `offset`.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes the elements meanwhile.
    pub(super) unsafe fn write(&self, offset: usize, source: Source<'_, T>) {
        let elements = self.at(offset, source.len);
        // SAFETY: the source is readable by its invariant, the target by `at`; the caller keeps
        // everybody else away. The two may overlap.
        unsafe { elements.copy_from(source.elements, source.len) }
    }

    /// Copies `len` elements to the start of `target`, which has room for them.
    ///
    /// # Safety
    ///
    /// Nobody writes to the elements meanwhile.
    pub(super) unsafe fn read(&self, offset: usize, len: usize, target: &Target<'_, T>) {
        assert!(len <= target.len, "the target has room");
        let elements = self.at(offset, len);
        // SAFETY: the target is writable by its invariant, the source by `at`; the caller keeps
        // writers away. The two may overlap.
        unsafe { elements.copy_to(target.elements, len) }
    }

    /// Zeroes `len` elements.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them meanwhile.
    pub(super) unsafe fn zero(&self, offset: usize, len: usize) {
        let elements = self.at(offset, len);
        // SAFETY: `at` proved the range; all bytes zero is a `T`; the caller keeps everybody away.
        unsafe { elements.write_bytes(0, len) }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Elements to copy from: a slice, or foreign memory that others may write to meanwhile, of which
/// for that reason no reference is ever made.
///
/// # Invariants
///
/// `elements` is aligned and readable for `len` elements during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a, T> {
    elements: NonNull<T>,
    len: usize,
    _owner: PhantomData<&'a [T]>,
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

// SAFETY: it stands for a `&[T]`, which is `Send`.
unsafe impl<T: Sync> Send for Source<'_, T> {}

// SAFETY: it stands for a `&[T]`, which is `Sync`.
unsafe impl<T: Sync> Sync for Source<'_, T> {}

// SAFETY: it stands for a `&mut [T]`, which is `Send`.
unsafe impl<T: Send> Send for Target<'_, T> {}

// SAFETY: it stands for a `&mut [T]`, which is `Sync`.
unsafe impl<T: Sync> Sync for Target<'_, T> {}

impl<T> Source<'_, T> {
    /// # Safety
    ///
    /// `elements` is aligned and readable for `len` elements during the lifetime of the result.
    #[cfg(feature = "python")]
    pub(crate) unsafe fn from_raw(elements: NonNull<T>, len: usize) -> Self {
        Self { elements, len, _owner: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Some of the elements.
    pub(crate) fn part(&self, elements: Range<usize>) -> Self {
        Self {
            elements: part(self.elements, self.len, &elements),
            len: elements.len(),
            _owner: PhantomData,
        }
    }
}

impl<'a, T> From<&'a [T]> for Source<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self { elements: NonNull::from(slice).cast(), len: slice.len(), _owner: PhantomData }
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
