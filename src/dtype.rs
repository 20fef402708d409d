//! Element types a cache can hold, and how numbers get into them and out again.

#![expect(
    clippy::inline_always,
    reason = "where it is inlined says for which vectors it is compiled"
)]

use std::fmt::Debug;

use half::slice::HalfFloatSliceExt;
pub use half::{bf16, f16};

/// The name of an element type, as NumPy spells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE 754.
    #[default]
    F32,
    /// 16-bit IEEE 754: 11 bits of precision, up to 65504.
    F16,
    /// The upper half of an F32: 8 bits of precision, and its range.
    BF16,
    /// A signed byte, times a scale that the elements of a head have in common.
    I8,
}

impl DType {
    /// Bytes of one element.
    pub const fn itemsize(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 => size_of::<f16>(),
            Self::BF16 => size_of::<bf16>(),
            Self::I8 => size_of::<i8>(),
        }
    }

    /// The name NumPy gives the type (for bfloat16, that of `ml_dtypes`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I8 => "int8",
        }
    }

    /// What copies are made of; see [`Element::Number`].
    #[cfg(feature = "python")]
    pub(crate) const fn of_copies(self) -> Self {
        if self.has_scales() { Self::F32 } else { self }
    }

    /// Whether the elements of a head are multiplied by a scale; see [`Element::Scale`].
    pub const fn has_scales(self) -> bool {
        matches!(self, Self::I8)
    }
}

/// An element type of a cache.
///
/// Sealed. [`bytemuck::Pod`] is what the memory module builds on: any bytes, zeros among them, are
/// a value, and there is nothing to drop.
///
/// # Examples
///
/// ```
/// use kvspan::Element;
///
/// let numbers = [0.25, -1.0, 0.0];
/// let scale = i8::scale(1.0); // of a head whose largest element is that
/// let mut stored = [0; 3];
/// i8::narrow(&numbers, scale, &mut stored);
/// assert_eq!(stored, [32, -127, 0]);
///
/// let mut read = [0.0; 3];
/// i8::widen(&stored, scale, &mut read);
/// assert_eq!(read[1..], [-1.0, 0.0]);
/// ```
pub trait Element: bytemuck::Pod + Debug + PartialEq + Send + Sync + Transfer<f32> {
    /// The type's name at run time.
    const DTYPE: DType;

    /// What the elements of one head of one token are multiplied by: `f32` for `i8`, and nothing for
    /// the floats.
    type Scale: bytemuck::Pod + Debug + PartialEq + Send + Sync;

    /// What an owned copy of an element is: the element, or an `f32` if it needs a scale.
    type Number: Element;

    /// Returns the scale for elements of which `largest` is the largest magnitude. It is finite, even if
    /// that is not.
    fn scale(largest: f32) -> Self::Scale;

    /// Rounds numbers to the nearest elements, ties to even, as many as there is room for.
    ///
    /// What is too large for an f16 becomes infinite, and NaN stays NaN. An `i8` is clamped to -127
    /// to 127, and 0 if there is no number.
    fn narrow(numbers: &[f32], scale: Self::Scale, elements: &mut [Self]);

    /// Returns elements as numbers, as many as there is room for. Exact for the floats.
    fn widen(elements: &[Self], scale: Self::Scale, numbers: &mut [f32]);
}

/// An owned copy of elements.
pub(crate) type Numbers<T> = Vec<<T as Element>::Number>;

/// Says that elements of `S` go into a cache of this type, and come out of it.
///
/// A float goes in and out as it is. An `f32` does so everywhere: it is rounded on the way in, as
/// [`Element::narrow`] says. An `i8` does not, since it is nothing without its scale.
///
/// Sealed, like [`Element`].
pub trait Transfer<S>: sealed::Sealed {}

impl Transfer<Self> for f32 {}
impl Transfer<Self> for f16 {}
impl Transfer<Self> for bf16 {}
impl Transfer<f32> for f16 {}
impl Transfer<f32> for bf16 {}
impl Transfer<f32> for i8 {}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    type Scale = ();
    type Number = Self;

    fn scale(_largest: f32) {}

    #[inline(always)]
    fn narrow(numbers: &[f32], (): (), elements: &mut [Self]) {
        let len = numbers.len().min(elements.len());
        elements[..len].copy_from_slice(&numbers[..len]);
    }

    #[inline(always)]
    fn widen(elements: &[Self], (): (), numbers: &mut [f32]) {
        Self::narrow(elements, (), numbers);
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    type Scale = ();
    type Number = Self;

    fn scale(_largest: f32) {}

    #[inline(always)]
    fn narrow(numbers: &[f32], (): (), elements: &mut [Self]) {
        let len = numbers.len().min(elements.len());
        elements[..len].convert_from_f32_slice(&numbers[..len]);
    }

    #[inline(always)]
    fn widen(elements: &[Self], (): (), numbers: &mut [f32]) {
        let len = numbers.len().min(elements.len());
        elements[..len].convert_to_f32_slice(&mut numbers[..len]);
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    type Scale = ();
    type Number = Self;

    fn scale(_largest: f32) {}

    #[inline(always)]
    fn narrow(numbers: &[f32], (): (), elements: &mut [Self]) {
        for (element, number) in elements.iter_mut().zip(numbers) {
            let bits = number.to_bits();
            // Without branches, so that the loop becomes vector code.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
            let quiet = bits | 0x0040_0000;
            let [low, high, ..] = if number.is_nan() { quiet } else { rounded }.to_be_bytes();
            *element = Self::from_bits(u16::from_be_bytes([low, high]));
        }
    }

    #[inline(always)]
    fn widen(elements: &[Self], (): (), numbers: &mut [f32]) {
        for (number, element) in numbers.iter_mut().zip(elements) {
            *number = f32::from_bits(u32::from(element.to_bits()) << 16);
        }
    }
}

/// So large that 127 times it is no infinity.
const LARGEST_SCALE: f32 = (f32::MAX / 127.0).next_down();

/// 1.5 * 2^23: so large that a sum with it has no bits for less than 1.
const ONES: f32 = 12_582_912.0;

impl Element for i8 {
    const DTYPE: DType = DType::I8;
    type Scale = f32;
    type Number = f32;

    fn scale(largest: f32) -> f32 {
        (largest / 127.0).min(LARGEST_SCALE)
    }

    #[inline(always)]
    fn narrow(numbers: &[f32], scale: f32, elements: &mut [Self]) {
        if scale == 0.0 {
            elements.iter_mut().zip(numbers).for_each(|(element, _)| *element = 0);
            return;
        }
        for (element, number) in elements.iter_mut().zip(numbers) {
            let quotient = number / scale;
            // Without branches, so that the loop becomes vector code.
            let quotient = if quotient.is_nan() { 0.0 } else { quotient.clamp(-127.0, 127.0) };
            let [low, ..] = (quotient + ONES).to_bits().to_le_bytes();
            *element = low.cast_signed();
        }
    }

    #[inline(always)]
    fn widen(elements: &[Self], scale: f32, numbers: &mut [f32]) {
        for (number, &element) in numbers.iter_mut().zip(elements) {
            *number = f32::from(element) * scale;
        }
    }
}

/// The largest magnitude of these numbers and of those before; infinite or NaN if any is.
#[inline(always)]
pub(crate) fn largest(so_far: f32, numbers: &[f32]) -> f32 {
    // Without its sign, a float that is larger has larger bits, and NaN the largest. Signed, because
    // that is what vectors compare.
    let bits = |x: f32| x.abs().to_bits().cast_signed();
    let largest = numbers.iter().fold(bits(so_far), |largest, &x| largest.max(bits(x)));
    f32::from_bits(largest.cast_unsigned())
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::f16 {}
    impl Sealed for super::bf16 {}
    impl Sealed for i8 {}
}
