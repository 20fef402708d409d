//! A small manager, and sequences with one number for each row, so that a torn or misplaced one can
//! not pass for another.

use kvspan::{
    KvCacheHandle, KvCacheManager, KvCacheManagerConfig, PagedKvCacheHandle, PagedSpan, Result,
};

pub(crate) const BLOCK_SIZE: usize = 4;
pub(crate) const NUM_LAYERS: usize = 2;
pub(crate) const WIDTH: usize = 2;

pub(crate) fn config(num_blocks: usize) -> KvCacheManagerConfig {
    KvCacheManagerConfig {
        num_blocks,
        block_size: BLOCK_SIZE,
        num_layers: NUM_LAYERS,
        num_kv_heads: 1,
        head_dim: WIDTH,
        ..KvCacheManagerConfig::default()
    }
}

/// Keys of rows with these numbers.
pub(crate) fn keys(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().flat_map(|&number| [number; WIDTH]).collect()
}

/// Values of rows with these numbers.
pub(crate) fn values(numbers: &[f32]) -> Vec<f32> {
    keys(numbers).iter().map(|key| -key).collect()
}

/// The numbers of rows. Panics if a row has more than one.
pub(crate) fn numbers(all_keys: &[f32], all_values: &[f32]) -> Vec<f32> {
    let numbers = all_keys.chunks(WIDTH).map(|row| row[0]).collect::<Vec<_>>();
    assert_eq!((all_keys, all_values), (&*keys(&numbers), &*values(&numbers)), "no row is torn");
    numbers
}

pub(crate) fn numbers_of(span: &PagedSpan) -> Vec<f32> {
    span.segments().flat_map(|segment| numbers(segment.keys, segment.values)).collect()
}

pub(crate) fn write(
    manager: &KvCacheManager,
    handle: &mut PagedKvCacheHandle,
    layer: usize,
    position: usize,
    numbers: &[f32],
) -> Result<()> {
    manager.write(handle, layer, position, &keys(numbers), &values(numbers))
}

/// All rows of a layer.
pub(crate) fn read(
    manager: &KvCacheManager,
    handle: &PagedKvCacheHandle,
    layer: usize,
) -> Vec<f32> {
    let len = handle.num_tokens();
    let (mut keys, mut values) = (vec![0.0; len * WIDTH], vec![0.0; len * WIDTH]);
    manager.read_range_into(handle, layer, 0, len, &mut keys, &mut values).expect("it is alive");
    numbers(&keys, &values)
}
