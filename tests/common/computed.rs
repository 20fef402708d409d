//! Sequences with the content that a model computes for their tokens, so that what belongs to other
//! tokens shows.

use std::fmt::Debug;

use kvspan::{KvCacheHandle, KvCacheManager, KvError, PagedKvCacheHandle, RequestOptions, Result};

use super::sequences::{NUM_LAYERS, config, read, write};

pub(crate) const PLAIN: RequestOptions<'_> = RequestOptions {
    request_id: None,
    cache_salt: None,
    lora_id: None,
    extra_keys: &[],
    lookahead: 0,
};

pub(crate) fn manager(num_blocks: usize) -> KvCacheManager {
    KvCacheManager::new(config(num_blocks)).expect("a small pool")
}

/// A number that the tokens up to a position, and the layer, decide. Never 0, which is what was not
/// written.
pub(crate) fn computed(tokens: &[u32], layer: usize) -> f32 {
    let start = u32::try_from(layer).expect("a small number");
    let mixed = tokens.iter().fold(start, |mixed, token| (mixed * 31 + token + 1) % 65_520);
    f32::from(u16::try_from(mixed + 1).expect("less than 65521"))
}

/// Writes what is computed for the tokens from `start` on, in all layers, and commits them.
pub(crate) fn compute(
    manager: &KvCacheManager,
    handle: &mut PagedKvCacheHandle,
    tokens: &[u32],
    start: usize,
) {
    for layer in 0..NUM_LAYERS {
        let numbers = (start..tokens.len()).map(|at| computed(&tokens[..=at], layer));
        let numbers = numbers.collect::<Vec<_>>();
        write(manager, handle, layer, start, &numbers).expect("it has its blocks");
    }
    manager.commit(handle, &tokens[start..]).expect("the tokens are its own");
}

/// A sequence that was computed as far as it was not cached.
pub(crate) fn start(manager: &KvCacheManager, tokens: &[u32]) -> PagedKvCacheHandle {
    let mut handle = manager.allocate(tokens, &PLAIN).expect("there is room");
    let num_cached = handle.num_cached_tokens();
    compute(manager, &mut handle, tokens, num_cached);
    handle
}

/// Panics unless all rows of the sequence are what its tokens make them.
pub(crate) fn check(manager: &KvCacheManager, handle: &PagedKvCacheHandle, tokens: &[u32]) {
    for layer in 0..NUM_LAYERS {
        let expected = (0..tokens.len()).map(|at| computed(&tokens[..=at], layer));
        assert_eq!(read(manager, handle, layer), expected.collect::<Vec<_>>());
    }
}

pub(crate) fn blocks(handle: &PagedKvCacheHandle) -> Vec<u32> {
    handle.block_table().logical_to_physical.clone()
}

/// Calls `call`, which is refused and leaves everything as it was.
pub(crate) fn refuses<R: Debug>(
    manager: &KvCacheManager,
    call: impl FnOnce() -> Result<R>,
    expected: &KvError,
) {
    let before = manager.inspect();
    assert_eq!(call().err().as_ref(), Some(expected));
    assert_eq!(manager.inspect(), before);
    manager.check_integrity().expect("nothing is lost");
}
