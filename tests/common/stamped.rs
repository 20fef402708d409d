//! Tokens whose elements all say which write they are of, so that a torn one shows.

use kvspan::{Attention, AttentionPool, Context, Element, KVSpan, Query};

use super::rng::Rng;

/// Tokens with all keys equal, and the values their negatives.
pub(crate) fn rows(rng: &mut Rng, count: usize, width: usize) -> (Vec<f32>, Vec<f32>) {
    let stamps = (0..count).map(|_| u16::try_from(rng.below(60_000)).map_or(1.0, f32::from));
    let keys = stamps.flat_map(|stamp| vec![stamp; width]).collect::<Vec<_>>();
    let values = keys.iter().map(|key| -key).collect();
    (keys, values)
}

/// The numbers that a span stands for.
pub(crate) fn shown<T: Element>(span: KVSpan<'_, T>) -> (Vec<f32>, Vec<f32>) {
    let dim = span.head_dim();
    let plane = |data: &[T], scales: &[T::Scale]| {
        let mut numbers = vec![0.0; data.len()];
        for ((data, scale), numbers) in data.chunks(dim).zip(scales).zip(numbers.chunks_mut(dim)) {
            T::widen(data, *scale, numbers);
        }
        numbers
    };
    (plane(span.keys, span.key_scales), plane(span.values, span.value_scales))
}

pub(crate) fn check_rows(keys: &[f32], values: &[f32], width: usize) {
    for (keys, values) in keys.chunks(width).zip(values.chunks(width)) {
        check_equal(keys);
        let opposite = |(k, v): (&f32, &f32)| (k + v).to_bits() == 0;
        assert!(keys.iter().zip(values).all(opposite), "{keys:?} with {values:?}");
    }
}

/// Panics unless all elements of the output are equal, as they are of values that are not torn.
pub(crate) fn attend(context: &Context<'_>, shape: [usize; 3], pool: &AttentionPool) {
    let [_, num_heads, head_dim] = shape;
    let (elements, mut out) = (vec![0.5; num_heads * head_dim], vec![0.0; num_heads * head_dim]);
    let query = Query::new(&elements, [1, num_heads, head_dim]).expect("one token");
    Attention::default().attend(query, context, pool, &mut out).expect("there are tokens");
    check_equal(&out);
}

pub(crate) fn check_equal(row: &[f32]) {
    assert!(row.iter().all(|x| x.to_bits() == row[0].to_bits()), "torn: {row:?}");
}
