//! Elements of a cache as vectors of `f32`.

#![expect(clippy::inline_always, reason = "vectors can be in registers only where all is inlined")]

use fearless_simd::Simd;
use fearless_simd::prelude::*;
#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
use fearless_simd::{Level, f32x8, f32x16, u16x8, u16x16};
use half::slice::HalfFloatSliceExt;

use crate::dtype::{Element, bf16, f16};

/// An element type that the kernel reads.
///
/// Elements come in *groups*: as many as fill one vector, which become one or more vectors of `f32`. They
/// need not keep their order in these.
pub(super) trait Lanes: Element {
    /// A group in vectors.
    type Vectors<S: Simd>: AsRef<[S::f32s]> + AsMut<[S::f32s]> + Copy;

    /// How many vectors that is.
    const VECTORS: usize;

    /// Which lane of the vectors of a group an element goes to.
    #[inline(always)]
    fn lane<S: Simd>(element: usize) -> usize {
        element
    }

    /// A group of zeros.
    fn zeros<S: Simd>(simd: S) -> Self::Vectors<S>;

    /// Makes numbers of a group of elements.
    fn widen_group<S: Simd>(simd: S, elements: &[Self]) -> Self::Vectors<S>;

    /// Makes numbers of a group, or, if it is not `WHOLE`, of the beginning of one, which zeros follow.
    #[inline(always)]
    fn load<S: Simd, const WHOLE: bool>(simd: S, elements: &[Self]) -> Self::Vectors<S> {
        let group = group_size::<S, Self>();
        if WHOLE {
            return Self::widen_group(simd, &elements[..group]);
        }
        let mut padded = [Self::zeroed(); MAX_GROUP];
        padded[..elements.len()].copy_from_slice(elements);
        Self::widen_group(simd, &padded[..group])
    }
}

/// Elements of a group.
#[inline(always)]
pub(super) fn group_size<S: Simd, T: Lanes>() -> usize {
    S::f32s::LEN * T::VECTORS
}

/// Bytes of the widest vector.
const MAX_GROUP: usize = 64;

/// Puts the numbers of rows that are multiplied with elements where these go.
#[inline(always)]
pub(super) fn to_lanes<S: Simd, T: Lanes>(rows: &mut [f32]) {
    move_in_groups::<S, T>(rows, |numbers, lanes, element, lane| lanes[lane] = numbers[element]);
}

/// Puts numbers that were made of elements in the order of these.
#[inline(always)]
pub(super) fn from_lanes<S: Simd, T: Lanes>(rows: &mut [f32]) {
    move_in_groups::<S, T>(rows, |lanes, numbers, element, lane| numbers[element] = lanes[lane]);
}

#[inline(always)]
fn move_in_groups<S: Simd, T: Lanes>(
    rows: &mut [f32],
    move_one: impl Fn(&[f32], &mut [f32], usize, usize),
) {
    for group in rows.chunks_exact_mut(group_size::<S, T>()) {
        let mut moved = [0.0; MAX_GROUP];
        for element in 0..group.len() {
            move_one(group, &mut moved, element, T::lane::<S>(element));
        }
        group.copy_from_slice(&moved[..group.len()]);
    }
}

impl Lanes for f32 {
    type Vectors<S: Simd> = [S::f32s; 1];
    const VECTORS: usize = 1;

    #[inline(always)]
    fn zeros<S: Simd>(simd: S) -> [S::f32s; 1] {
        [S::f32s::splat(simd, 0.0); 1]
    }

    #[inline(always)]
    fn widen_group<S: Simd>(simd: S, elements: &[Self]) -> [S::f32s; 1] {
        [S::f32s::from_slice(simd, elements)]
    }
}

impl Lanes for bf16 {
    type Vectors<S: Simd> = [S::f32s; 2];
    const VECTORS: usize = 2;

    #[inline(always)]
    fn zeros<S: Simd>(simd: S) -> [S::f32s; 2] {
        [S::f32s::splat(simd, 0.0); 2]
    }

    /// Elements of even and of odd index become a vector each: to take pairs apart needs less than to
    /// move all of them.
    #[inline(always)]
    fn lane<S: Simd>(element: usize) -> usize {
        element / 2 + element % 2 * S::f32s::LEN
    }

    #[inline(always)]
    fn widen_group<S: Simd>(simd: S, elements: &[Self]) -> [S::f32s; 2] {
        let pairs: S::u32s = S::u16s::from_slice(simd, elements.reinterpret_cast()).bitcast();
        let (low, high) = (pairs << 16, pairs & S::u32s::splat(simd, 0xffff_0000));
        let (even, odd) = if cfg!(target_endian = "little") { (low, high) } else { (high, low) };
        [even.bitcast(), odd.bitcast()]
    }
}

impl Lanes for f16 {
    type Vectors<S: Simd> = [S::f32s; 2];
    const VECTORS: usize = 2;

    #[inline(always)]
    fn zeros<S: Simd>(simd: S) -> [S::f32s; 2] {
        [S::f32s::splat(simd, 0.0); 2]
    }

    #[inline(always)]
    fn widen_group<S: Simd>(simd: S, elements: &[Self]) -> [S::f32s; 2] {
        let bits: &[u16] = elements.reinterpret_cast();
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        {
            let mut numbers = [S::f32s::splat(simd, 0.0); 2];
            let parts = numbers.iter_mut().zip(bits.chunks_exact(S::f32s::LEN));
            match simd.level() {
                Level::Avx512(avx512) => {
                    for (vector, bits) in parts {
                        let halves = u16x16::from_slice(avx512, bits).into();
                        let wide: f32x16<_> = f16c::widen_16(avx512, halves).simd_into(avx512);
                        *vector = S::f32s::from_slice(simd, wide.as_slice());
                    }
                    return numbers;
                }
                Level::Avx2(avx2) => {
                    for (vector, bits) in parts {
                        let halves = u16x8::from_slice(avx2, bits).into();
                        let wide: f32x8<_> = f16c::widen_8(avx2, halves).simd_into(avx2);
                        *vector = S::f32s::from_slice(simd, wide.as_slice());
                    }
                    return numbers;
                }
                _ => {}
            }
        }
        let (low, high) = S::u16s::from_slice(simd, bits).widen();
        [widen_f16(simd, low), widen_f16(simd, high)]
    }
}

/// Makes numbers of the bits of an f16, without an instruction for it.
#[inline(always)]
fn widen_f16<S: Simd>(simd: S, bits: S::u32s) -> S::f32s {
    /// What the exponents of an f32 and of an f16 differ by, as a factor.
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let sign = (bits & S::u32s::splat(simd, 0x8000)) << 16;
    let magnitude: S::f32s = ((bits & S::u32s::splat(simd, 0x7fff)) << 13).bitcast();
    let magnitude = magnitude * S::f32s::splat(simd, REBIAS);
    // Beyond what an f16 can hold are its infinity and its NaNs.
    let special: S::u32s = magnitude.bitcast();
    let special: S::f32s = (special | S::u32s::splat(simd, 0x7f80_0000)).bitcast();
    let is_special = magnitude.simd_ge(S::f32s::splat(simd, 65536.0));
    let magnitude: S::u32s = is_special.select(special, magnitude).bitcast();
    (magnitude | sign).bitcast()
}

#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
mod f16c {
    #[cfg(target_arch = "x86")]
    use std::arch::x86::{__m128i, __m256, __m256i, __m512, _mm256_cvtph_ps, _mm512_cvtph_ps};
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::{__m128i, __m256, __m256i, __m512, _mm256_cvtph_ps, _mm512_cvtph_ps};

    fearless_simd::kernel!(
        #[inline]
        pub(super) fn widen_8(avx2: Avx2, halves: __m128i) -> __m256 {
            _mm256_cvtph_ps(halves)
        }
    );

    fearless_simd::kernel!(
        #[inline]
        pub(super) fn widen_16(avx512: Avx512, halves: __m256i) -> __m512 {
            _mm512_cvtph_ps(halves)
        }
    );
}

impl Lanes for i8 {
    type Vectors<S: Simd> = [S::f32s; 4];
    const VECTORS: usize = 4;

    #[inline(always)]
    fn zeros<S: Simd>(simd: S) -> [S::f32s; 4] {
        [S::f32s::splat(simd, 0.0); 4]
    }

    #[inline(always)]
    fn widen_group<S: Simd>(simd: S, elements: &[Self]) -> [S::f32s; 4] {
        let (low, high) = S::i8s::from_slice(simd, elements).widen();
        let ((a, b), (c, d)) = (low.widen(), high.widen());
        [a.to_float(), b.to_float(), c.to_float(), d.to_float()]
    }
}
