//! Attention in the plainest terms, and numbers to attend to.

use kvspan::{Attention, Element, KVCacheConfig, LayerKvCache};

use super::rng::Rng;

/// What tokens look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) num_q_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Shape {
    pub(crate) fn width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Elements of the query of one token.
    pub(crate) fn query_width(self) -> usize {
        self.num_q_heads * self.head_dim
    }
}

/// Numbers between -1 and 1.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..count)
        .map(|_| u16::try_from(rng.below(1 << 12)).map_or(0.0, f32::from) / 2048.0 - 1.0)
        .collect()
}

/// A cache of so many tokens of these numbers.
pub(crate) fn cache<T: Element>(shape: Shape, keys: &[f32], values: &[f32]) -> LayerKvCache<T> {
    let cache = LayerKvCache::with_element(KVCacheConfig {
        max_tokens_per_seq: 2 * keys.len() / shape.width() + 1,
        num_heads: shape.num_kv_heads,
        hidden_dim_per_head: shape.head_dim,
    });
    cache.append(keys, values).expect("there is room for twice as much");
    cache
}

/// The keys and the values of a cache as numbers.
pub(crate) fn stored<T: Element>(cache: &LayerKvCache<T>) -> [Vec<f32>; 2] {
    let len = cache.len() * cache.config.token_width();
    let (mut keys, mut values) = (vec![0.0; len], vec![0.0; len]);
    cache.read_range_into(0, cache.len(), &mut keys, &mut values).expect("all can be read");
    [keys, values]
}

/// A naive softmax in f64, of each head of each query token.
pub(crate) fn naive(
    options: &Attention,
    shape: Shape,
    query: &[f32],
    [keys, values]: &[Vec<f32>; 2],
) -> Vec<f64> {
    let (dim, len) = (shape.head_dim, keys.len() / shape.width());
    let q_tokens = query.len() / shape.query_width();
    let scale = options
        .scale
        .map_or_else(|| u32::try_from(dim).map_or(0.0, f64::from).sqrt().recip(), f64::from);
    let mut out = Vec::new();
    for (row, query) in query.chunks(dim).enumerate() {
        let (token, head) = (row / shape.num_q_heads, row % shape.num_q_heads);
        let head = head * shape.num_kv_heads / shape.num_q_heads;
        let end = if options.causal { len - q_tokens + token + 1 } else { len };
        let start = end.saturating_sub(options.window.unwrap_or(len));
        let place = |token| (token * shape.num_kv_heads + head) * dim..;
        let score = |token| {
            let products = keys[place(token)].iter().zip(query);
            let score = products.map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() * scale;
            options.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<_> = (start..end).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<_> = scores.iter().map(|score| (score - max).exp()).collect();
        let norm: f64 = weights.iter().sum();
        out.extend((0..dim).map(|d| {
            let values = (start..end).map(|token| f64::from(values[place(token)][d]));
            values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / norm
        }));
    }
    out
}

/// The largest difference; infinite if one is NaN where the other is not.
pub(crate) fn difference(given: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(given.len(), wanted.len());
    let differences = given.iter().zip(wanted).map(|(&given, wanted)| {
        let difference = (f64::from(given) - wanted).abs();
        match (given.is_nan(), wanted.is_nan()) {
            (true, true) => 0.0,
            (false, false) => difference,
            _ => f64::INFINITY,
        }
    });
    differences.fold(0.0, f64::max)
}
