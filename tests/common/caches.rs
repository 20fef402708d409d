//! Small caches whose tokens are told apart by one number.
//!
//! Token `n` has all keys `n` and all values `-n`, so that a torn or misplaced row can not pass for
//! a token, and token 0 is what was never written.

use kvspan::{KVCacheConfig, LayerKvCache, Result};

pub(crate) const CONFIG: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 16, num_heads: 2, hidden_dim_per_head: 4 };

/// An empty cache.
pub(crate) fn empty() -> LayerKvCache {
    LayerKvCache::new(CONFIG)
}

/// A cache of these tokens.
pub(crate) fn holding(tokens: &[u8]) -> LayerKvCache {
    let cache = empty();
    cache.append(&keys(tokens), &values(tokens)).expect("the tokens fit");
    cache
}

/// Writes one token.
pub(crate) fn write(cache: &LayerKvCache, at: usize, token: u8) -> Result<()> {
    cache.write_kv(at, &keys(&[token]), &values(&[token]))
}

/// Writes a batch of tokens, each to a place.
pub(crate) fn write_batch(cache: &LayerKvCache, entries: &[(usize, u8)]) -> Result<()> {
    let rows = entries.iter().map(|&(at, token)| (at, keys(&[token]), values(&[token])));
    let rows: Vec<_> = rows.collect();
    let entries: Vec<_> = rows.iter().map(|(at, k, v)| (*at, &**k, &**v)).collect();
    cache.write_kv_batch(&entries)
}

/// The keys of tokens, one after the other.
pub(crate) fn keys(tokens: &[u8]) -> Vec<f32> {
    tokens.iter().flat_map(|&token| vec![f32::from(token); CONFIG.token_width()]).collect()
}

/// The values of tokens, one after the other.
pub(crate) fn values(tokens: &[u8]) -> Vec<f32> {
    keys(tokens).iter().map(|key| -key).collect()
}

/// The tokens that have these keys and values. Panics on anything else.
pub(crate) fn tokens(all_keys: &[f32], all_values: &[f32]) -> Vec<u8> {
    let is_of = |token: &u8, row: &[f32]| keys(&[*token]) == row;
    let tokens: Vec<u8> = all_keys
        .chunks(CONFIG.token_width())
        .map(|row| (0..=u8::MAX).find(|token| is_of(token, row)).expect("the row is of one token"))
        .collect();
    assert_eq!(all_values, values(&tokens), "the values belong to the keys");
    tokens
}

/// All tokens of a cache.
pub(crate) fn contents(cache: &LayerKvCache) -> Vec<u8> {
    let (keys, values) = cache.read_range(0, cache.len()).expect("all tokens are readable");
    tokens(&keys, &values)
}
