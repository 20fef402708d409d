//! A hint to the processor.

#![expect(unsafe_code, reason = "the instruction takes an address")]

/// Asks for memory that will be read soon, to be brought as near as the second-level cache.
///
/// Not nearer: rows of one head are a power of two apart as a rule, and then have few places in the
/// first level. Does nothing on processors other than x86-64.
#[inline(always)]
pub(crate) fn prefetch<T>(elements: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

        const LINE: usize = 64;
        for line in elements.chunks(const { LINE.div_ceil(size_of::<T>()) }) {
            // SAFETY: a prefetch changes nothing that a program can see, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}
