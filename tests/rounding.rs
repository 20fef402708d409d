//! How numbers become elements, beside slow references.

use kvspan::{Element, bf16, f16};

/// One number through a type.
fn narrow<T: Element<Scale = ()>>(number: f32) -> T {
    let mut element = [T::zeroed()];
    T::narrow(&[number], (), &mut element);
    element[0]
}

fn widen<T: Element<Scale = ()>>(element: T) -> f32 {
    let mut number = [0.0];
    T::widen(&[element], (), &mut number);
    number[0]
}

/// A 16-bit float by its parts: a sign, so many bits of exponent, and the rest.
trait Half: Element<Scale = ()> {
    const EXPONENT_BITS: u32;

    fn from_bits(bits: u16) -> Self;

    fn to_bits(self) -> u16;

    /// What IEEE 754 says a pattern means. Exact: an f64 holds more than any of them.
    fn meaning(bits: u16) -> f64 {
        let fraction_bits = 15 - Self::EXPONENT_BITS;
        let bias = (1 << (Self::EXPONENT_BITS - 1)) - 1;
        let exponent = i32::from((bits & 0x7fff) >> fraction_bits);
        let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
        let magnitude = if exponent == (1 << Self::EXPONENT_BITS) - 1 {
            if fraction > 0.0 { f64::NAN } else { f64::INFINITY }
        } else if exponent == 0 {
            fraction * 2_f64.powi(1 - bias)
        } else {
            (1.0 + fraction) * 2_f64.powi(exponent - bias)
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    }
}

impl Half for f16 {
    const EXPONENT_BITS: u32 = 5;

    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }

    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

impl Half for bf16 {
    const EXPONENT_BITS: u32 = 8;

    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }

    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

fn check_all_patterns<T: Half>() {
    for bits in 0..=u16::MAX {
        let (meaning, number) = (T::meaning(bits), widen(T::from_bits(bits)));
        if meaning.is_nan() {
            assert!(number.is_nan() && narrow::<T>(number).to_bits() & 0x7fff > 0, "{bits:#06x}");
            assert!(widen(narrow::<T>(number)).is_nan(), "{bits:#06x}");
        } else {
            assert_eq!(f64::from(number).to_bits(), meaning.to_bits(), "{bits:#06x}");
            assert_eq!(narrow::<T>(number).to_bits(), bits, "{bits:#06x}");
        }
    }
}

#[test]
fn every_pattern_is_read_as_what_it_means_and_written_as_itself() {
    check_all_patterns::<f16>();
    check_all_patterns::<bf16>();
}

/// Between each two neighbours, and on both sides of the middle.
fn check_all_ties<T: Half>() {
    let infinity = (0..=u16::MAX).find(|&bits| T::meaning(bits).is_infinite());
    let infinity = infinity.expect("there is an infinity");
    for low in 0..infinity {
        let high = low + 1;
        // What would come next if the exponent had no end.
        let above = if high < infinity {
            T::meaning(high)
        } else {
            2.0 * T::meaning(low) - T::meaning(low - 1)
        };
        let middle = f64::midpoint(T::meaning(low), above);
        if middle > f64::from(f32::MAX) {
            continue;
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "it is exact: both halves have 11 bits"
        )]
        #[expect(clippy::as_conversions, reason = "there is no other way to an f32")]
        let tie = middle as f32;
        assert_eq!(f64::from(tie).to_bits(), middle.to_bits(), "{low:#06x}");
        let even = if low % 2 == 0 { low } else { high };
        for (number, wanted) in [(tie.next_down(), low), (tie, even), (tie.next_up(), high)] {
            assert_eq!(narrow::<T>(number).to_bits(), wanted, "{number:e}");
            assert_eq!(narrow::<T>(-number).to_bits(), wanted | 0x8000, "-{number:e}");
        }
    }
}

#[test]
fn what_is_no_number_has_a_finite_scale_and_is_zero() {
    for largest in [f32::INFINITY, f32::NAN] {
        let scale = i8::scale(largest);
        assert!(scale > 0.0 && (127.0 * scale).is_finite(), "{largest}");
    }
    // Whatever bits a NaN has.
    let nans = [0x7fc0_0000, 0x7f80_0001, 0xffc0_0055, 0x7fff_ffff, 0xffff_ff80];
    let numbers = [nans.map(f32::from_bits), [f32::INFINITY, f32::NEG_INFINITY, 9.0, -9.0, 1.0]];
    let mut elements = [7; 10];
    i8::narrow(numbers.as_flattened(), i8::scale(1.0), &mut elements);
    assert_eq!(elements, [0, 0, 0, 0, 0, 127, -127, 127, -127, 127]);
}

#[test]
fn numbers_between_two_elements_go_to_the_nearest_and_ties_to_the_even_one() {
    check_all_ties::<f16>();
    check_all_ties::<bf16>();
}

#[test]
fn what_is_too_large_is_infinite_and_nan_stays_nan() {
    fn check<T: Half>(too_large: &[f32]) {
        for &number in too_large {
            let [above, below] = [number, -number].map(|x| T::meaning(narrow::<T>(x).to_bits()));
            assert!(above.is_infinite() && above > 0.0, "{number}");
            assert!(below.is_infinite() && below < 0.0, "{number}");
        }
        for bits in [0x7fc0_0000, 0x7f80_0001, 0x7f80_ffff, 0xffff_ffff, 0xff80_0001] {
            assert!(widen(narrow::<T>(f32::from_bits(bits))).is_nan(), "{bits:#x}");
        }
    }
    check::<f16>(&[65520.0, 1e6, f32::MAX, f32::INFINITY]);
    check::<bf16>(&[f32::MAX, f32::INFINITY]);
}

/// A run so long that vector code has a body and a rest.
#[test]
fn a_long_run_is_rounded_as_one_number_is() {
    fn check<T: Half>() {
        let numbers = (0..1003_u16).map(|i| f32::from(i) * 0.37 - 150.0).collect::<Vec<_>>();
        let mut elements = vec![T::zeroed(); numbers.len()];
        T::narrow(&numbers, (), &mut elements);
        let mut read = vec![0.0; numbers.len()];
        T::widen(&elements, (), &mut read);
        for ((number, element), read) in numbers.iter().zip(elements).zip(read) {
            assert_eq!(element.to_bits(), narrow::<T>(*number).to_bits());
            assert_eq!(read.to_bits(), widen(element).to_bits());
        }
    }
    check::<f16>();
    check::<bf16>();
}

fn quantized(numbers: &[f32]) -> (Vec<i8>, f32) {
    let largest = numbers.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    let (scale, mut elements) = (i8::scale(largest), vec![99; numbers.len()]);
    i8::narrow(numbers, scale, &mut elements);
    (elements, scale)
}

#[test]
fn the_largest_of_a_head_becomes_127_and_ties_go_to_even() {
    let numbers = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 0.49, -127.0];
    let (elements, scale) = quantized(&numbers);
    assert_eq!(scale.to_bits(), 1_f32.to_bits());
    assert_eq!(elements, [127, 0, 2, 2, 0, -2, -2, 126, -126, 0, -127]);
}

#[test]
fn a_head_of_zeros_has_scale_zero() {
    let (elements, scale) = quantized(&[0.0, -0.0, 0.0]);
    assert_eq!((elements, scale.to_bits()), (vec![0; 3], 0));
}

#[test]
fn scales_at_both_ends_of_the_range_are_fine() {
    // 200 times the smallest number: the scale itself is rounded, to the smallest number.
    let smallest = f32::from_bits(1);
    let (elements, scale) = quantized(&[200.0 * smallest, -200.0 * smallest, 3.0 * smallest]);
    assert_eq!((elements, scale.to_bits()), (vec![100, -100, 2], 2));
    let (elements, scale) = quantized(&[50.0 * smallest, smallest]);
    assert_eq!((elements, scale.to_bits()), (vec![0, 0], 0));
    let (elements, scale) = quantized(&[f32::MAX, f32::MIN, f32::MAX / 4.0]);
    assert_eq!(elements, [127, -127, 32]);
    let mut read = [0.0];
    i8::widen(&[127], scale, &mut read);
    assert!(read[0].is_finite());
}

#[test]
fn elements_are_at_most_half_a_scale_off() {
    for seed in 1..200_u16 {
        let numbers = (0..64_u16)
            .map(|i| (f32::from(i * seed) * 0.7123).sin() * f32::from(seed))
            .collect::<Vec<_>>();
        let (elements, scale) = quantized(&numbers);
        let mut read = vec![0.0; numbers.len()];
        i8::widen(&elements, scale, &mut read);
        for ((number, element), read) in numbers.iter().zip(elements).zip(read) {
            let reference = (number / scale).round_ties_even();
            assert_eq!(f32::from(element).to_bits(), (reference + 0.0).to_bits());
            assert!((number - read).abs() <= 0.5001 * scale);
        }
    }
}
