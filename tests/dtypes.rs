//! Every element type, through every layer.

use kvspan::{
    ContiguousKvCacheHandle, DType, Element, KVCacheConfig, KVSpan, KvCacheHandle, KvCacheManager,
    KvCacheManagerConfig, KvError, LayerKvCache, PagedKvCacheHandle, RequestOptions, Result,
    Transfer, bf16, f16,
};

const CONFIG: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 8, num_heads: 2, hidden_dim_per_head: 3 };
const WIDTH: usize = 6;

/// Keys, values, and their scales.
type Parts<T> = (Vec<T>, Vec<T>, Vec<<T as Element>::Scale>, Vec<<T as Element>::Scale>);

fn parts<T: Element>(span: KVSpan<'_, T>) -> Parts<T> {
    let KVSpan { keys, values, key_scales, value_scales, .. } = span;
    (keys.to_vec(), values.to_vec(), key_scales.to_vec(), value_scales.to_vec())
}

fn stored<T: Element>(cache: &LayerKvCache<T>) -> Parts<T> {
    cache.with_read_range(0, cache.len(), parts).expect("all tokens can be read")
}

#[test]
fn a_type_is_called_what_numpy_calls_it() {
    let names = [DType::F32, DType::F16, DType::BF16, DType::I8]
        .map(|dtype| (dtype.name(), dtype.itemsize(), dtype.has_scales()));
    let wanted =
        [("float32", 4, false), ("float16", 2, false), ("bfloat16", 2, false), ("int8", 1, true)];
    assert_eq!(names, wanted);
}

#[test]
fn a_buffer_has_the_bytes_of_its_type() {
    fn nbytes<T: Element>() -> usize {
        let cache = LayerKvCache::<T>::with_element(CONFIG);
        cache.initialize(1).unwrap();
        cache.nbytes()
    }
    // A plane begins at a multiple of 64 bytes.
    assert_eq!(nbytes::<f32>(), 192 + 192);
    assert_eq!([nbytes::<f16>(), nbytes::<bf16>()], [128 + 96; 2]);
    assert_eq!(nbytes::<i8>(), 64 + 64 + 64 + 64);
}

/// A cache of 4 tokens, of which token 1 was written through a reservation.
fn reserved_i8() -> Result<LayerKvCache<i8>> {
    let cache = LayerKvCache::<i8>::with_element(CONFIG);
    cache.initialize(1)?;
    let mut rows = cache.reserve(1)?;
    let (keys, values) = rows.keys_and_values_mut();
    keys.copy_from_slice(&[1, 2, 3, 4, 5, 6]);
    values.copy_from_slice(&[-1, -2, -3, -4, -5, -6]);
    let (key_scales, value_scales) = rows.scales_mut();
    key_scales.copy_from_slice(&[0.5, 0.25]);
    value_scales.copy_from_slice(&[2.0, 4.0]);
    assert_eq!(rows.span().key_scales, [0.5, 0.25]);
    assert_eq!(rows.commit(), 1..2);
    cache.initialize(4)?;
    Ok(cache)
}

#[test]
fn scales_stay_with_their_tokens() {
    let cache = reserved_i8().unwrap();
    let (keys, values, key_scales, value_scales) = stored(&cache);
    assert_eq!(keys[WIDTH..2 * WIDTH], [1, 2, 3, 4, 5, 6]);
    assert_eq!(values[WIDTH..2 * WIDTH], [-1, -2, -3, -4, -5, -6]);
    assert_eq!(key_scales, [0.0, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(value_scales, [0.0, 0.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0]);

    let pinned = cache.pin_range(1, 3).unwrap();
    let (_, _, key_scales, value_scales) = parts(pinned.span());
    assert_eq!(key_scales, [0.5, 0.25, 0.0, 0.0]);
    assert_eq!(value_scales, [2.0, 4.0, 0.0, 0.0]);

    let copy = cache.deep_clone().unwrap();
    assert_eq!(stored(&copy), stored(&cache));
}

#[test]
fn scales_of_truncated_tokens_do_not_come_back() {
    let cache = reserved_i8().unwrap();
    cache.truncate(1).unwrap();
    cache.initialize(4).unwrap();
    let (keys, values, key_scales, value_scales) = stored(&cache);
    assert_eq!((keys, values), (vec![0; 4 * WIDTH], vec![0; 4 * WIDTH]));
    assert_eq!((key_scales, value_scales), (vec![0.0; 8], vec![0.0; 8]));
    cache.truncate(1).unwrap();
    assert_eq!(cache.reserve(2).unwrap().span().key_scales, [0.0; 4]);
}

#[test]
fn a_type_without_scales_has_nothing_in_their_place() {
    let cache = LayerKvCache::<f16>::with_element(CONFIG);
    let row = [f16::from_f32(1.5); WIDTH];
    cache.append(&row, &row).unwrap();
    cache.with_read_range(0, 1, |span| assert_eq!(size_of_val(span.key_scales), 0)).unwrap();
}

#[test]
fn a_tensor_offers_the_scales_of_a_type_that_has_them() {
    let handle = ContiguousKvCacheHandle::new(vec![reserved_i8().unwrap()]).unwrap();
    let (keys, values) = handle.kv_cache(0).unwrap();
    let (keys, values) = (keys.unwrap(), values.unwrap());
    assert_eq!(keys.dtype(), DType::I8);
    assert_eq!(keys.segment_as::<i8>(0).unwrap()[WIDTH..2 * WIDTH], [1, 2, 3, 4, 5, 6]);
    assert_eq!(keys.scales(0).unwrap()[2..4], [0.5, 0.25]);
    assert_eq!(values.scales(0).unwrap()[2..4], [2.0, 4.0]);
    assert_eq!(keys.scales(1), None);

    let floats = LayerKvCache::<bf16>::with_element(CONFIG);
    floats.initialize(2).unwrap();
    let handle = ContiguousKvCacheHandle::new(vec![floats]).unwrap();
    let keys = handle.key_cache(0).unwrap().unwrap();
    assert_eq!((keys.dtype(), keys.scales(0)), (DType::BF16, None));
}

// Numbers in and out

/// Numbers of a few tokens that every type holds exactly: with 127 times a power of two in each
/// head, the scale of an int8 is that power.
fn exact(num_tokens: u8, seed: u8) -> Vec<f32> {
    let head = |token: u8, head: u8| {
        let unit = f32::from(1_u8 << (token % 4)) / 4.0;
        let other = f32::from((seed + 5 * token + 3 * head) % 128) - 64.0;
        [127.0 * unit, other * unit, -other * unit]
    };
    (0..num_tokens).flat_map(|token| [head(token, 0), head(token, 1)]).flatten().collect()
}

/// The numbers that a span stands for.
fn numbers<T: Element>(span: KVSpan<'_, T>) -> (Vec<f32>, Vec<f32>) {
    let plane = |data: &[T], scales: &[T::Scale]| {
        let mut numbers = vec![0.0; data.len()];
        for ((data, scale), numbers) in data.chunks(3).zip(scales).zip(numbers.chunks_mut(3)) {
            T::widen(data, *scale, numbers);
        }
        numbers
    };
    (plane(span.keys, span.key_scales), plane(span.values, span.value_scales))
}

fn check_layer<T: Element>() -> Result<()> {
    let cache = LayerKvCache::<T>::with_element(CONFIG);
    let (keys, values) = (exact(5, 1), exact(5, 2));
    assert_eq!(cache.append(&keys[..2 * WIDTH], &values[..2 * WIDTH])?, 0..2);
    cache.write_kv(4, &keys[4 * WIDTH..], &values[4 * WIDTH..])?;
    let row = |token| (&keys[token * WIDTH..][..WIDTH], &values[token * WIDTH..][..WIDTH]);
    cache.write_kv_batch(&[
        (3, row(0).0, row(0).1),
        (2, row(2).0, row(2).1),
        (3, row(3).0, row(3).1),
    ])?;
    cache
        .with_read_range(0, 5, |span| assert_eq!(numbers(span), (keys.clone(), values.clone())))?;
    assert_eq!(numbers(cache.pin_range(1, 4)?.span()).0, keys[WIDTH..4 * WIDTH]);

    let (mut into_keys, mut into_values) = (vec![0.5; 2 * WIDTH + 1], vec![0.5; 2 * WIDTH]);
    cache.read_range_into(3, 5, &mut into_keys, &mut into_values)?;
    assert_eq!(
        (&into_keys[..2 * WIDTH], &into_values[..]),
        (&keys[3 * WIDTH..], &values[3 * WIDTH..])
    );
    assert_eq!(into_keys[2 * WIDTH].to_bits(), 0.5_f32.to_bits());
    Ok(())
}

#[test]
fn f32_goes_into_a_layer_cache_of_any_type_and_comes_out() {
    check_layer::<f32>().unwrap();
    check_layer::<f16>().unwrap();
    check_layer::<bf16>().unwrap();
    check_layer::<i8>().unwrap();
}

#[test]
fn elements_of_the_own_type_go_in_and_out_bit_by_bit() {
    fn check<T: Element + Transfer<T>>() {
        let config = KVCacheConfig { max_tokens_per_seq: 1 << 13, ..CONFIG };
        let cache = LayerKvCache::<T>::with_element(config);
        // All patterns of 16 bits, NaNs among them.
        let patterns = (0..=u16::MAX).flat_map(|bits| [bits, bits.wrapping_mul(40_503)]);
        let mut patterns = patterns.collect::<Vec<_>>();
        patterns.truncate(WIDTH * (1 << 13) * size_of::<T>() / 2);
        let elements: &[T] = bytemuck::cast_slice(&patterns);
        let elements = &elements[..elements.len() / WIDTH * WIDTH];
        let range = cache.append(elements, elements).unwrap();
        let mut read = vec![T::zeroed(); elements.len()];
        let mut values = read.clone();
        cache.read_range_into(0, range.end, &mut read, &mut values).unwrap();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&read), bytemuck::cast_slice::<T, u8>(elements));
        assert_eq!(bytemuck::cast_slice::<T, u8>(&values), bytemuck::cast_slice::<T, u8>(elements));
        cache.truncate(0).unwrap();
        cache.write_kv_batch(&[(1, &elements[..WIDTH], &elements[WIDTH..2 * WIDTH])]).unwrap();
        let span = cache.pin_range(1, 2).unwrap();
        assert_eq!(
            bytemuck::cast_slice::<T, u8>(span.values()),
            bytemuck::cast_slice::<T, u8>(&elements[WIDTH..2 * WIDTH])
        );
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn numbers_are_rounded_while_they_are_copied() {
    let cache = LayerKvCache::<f16>::with_element(CONFIG);
    let row = [1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.0, 65520.0, -1e-9, f32::NAN];
    cache.append(&row, &row).unwrap();
    let (keys, _) = cache.read_range(0, 1).unwrap();
    assert_eq!(
        keys.iter().map(|key| key.to_bits()).collect::<Vec<_>>()[..5],
        [0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x8000]
    );
    assert!(keys[5].is_nan());
}

/// Longer than what is converted at a time, in heads and in tokens, and no multiple of it.
#[test]
fn long_heads_and_many_tokens_are_converted_whole() {
    fn check<T: Element>() {
        let config =
            KVCacheConfig { max_tokens_per_seq: 4, num_heads: 2, hidden_dim_per_head: 601 };
        let cache = LayerKvCache::<T>::with_element(config);
        let count = 3 * config.token_width();
        let rows = (0..count)
            .map(|i| f32::from(u8::try_from(i % 255).unwrap()) - 127.0)
            .collect::<Vec<_>>();
        cache.append(&rows, &rows).unwrap();
        let (mut keys, mut values) = (vec![0.0; count], vec![0.0; count]);
        cache.read_range_into(0, 3, &mut keys, &mut values).unwrap();
        assert_eq!((&keys, &values), (&rows, &rows));
    }
    check::<f16>();
    check::<bf16>();
    check::<i8>();
}

#[test]
fn an_int8_cache_gives_copies_as_f32() {
    let cache = LayerKvCache::<i8>::with_element(CONFIG);
    let (keys, values) = (exact(2, 7), exact(2, 9));
    cache.append(&keys, &values).unwrap();
    assert_eq!(cache.read_range(0, 2), Ok((keys.clone(), values)));
    assert_eq!(cache.read_kv(1).unwrap().keys, keys[WIDTH..]);
    let error = cache.read_kv(2).unwrap_err();
    assert_eq!(error, KvError::TokenOutOfRange { token: 2, len: 2 });
    let raw = cache.with_read_kv(0, |keys, _| keys[0]);
    assert_eq!(raw, Ok(127));
}

#[test]
fn what_can_not_be_scaled_is_refused_and_nothing_changes() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let cache = LayerKvCache::<i8>::with_element(CONFIG);
        let good = exact(3, 1);
        cache.append(&good, &good).unwrap();
        let before = stored(&cache);
        let mut rows = exact(3, 2);
        rows[2 * WIDTH + 4] = bad;
        let error = |plane, token, head| KvError::NotFinite { plane, token, head };
        assert_eq!(cache.append(&good, &rows), Err(error("values", 2, 1)));
        assert_eq!(cache.append(&rows, &rows), Err(error("keys", 2, 1)));
        let row = &rows[2 * WIDTH..];
        assert_eq!(cache.write_kv(1, row, &good[..WIDTH]), Err(error("keys", 0, 1)));
        let batch =
            cache.write_kv_batch(&[(0, &good[..WIDTH], &good[..WIDTH]), (5, &good[..WIDTH], row)]);
        let source = Box::new(error("values", 0, 1));
        assert_eq!(batch, Err(KvError::BatchEntry { index: 1, source }));
        assert_eq!(stored(&cache), before);

        let floats = LayerKvCache::<bf16>::with_element(CONFIG);
        assert_eq!(floats.append(&rows, &rows), Ok(0..3));
    }
    let error = KvError::NotFinite { plane: "keys", token: 2, head: 1 };
    assert_eq!(
        error.to_string(),
        "the keys of token 2 of the input have an infinity or NaN in head 1"
    );
}

// Blocks

/// Two layers in blocks of two tokens.
fn manager<T: Element>(num_blocks: usize) -> KvCacheManager<T> {
    let config = KvCacheManagerConfig {
        num_blocks,
        block_size: 2,
        num_layers: 2,
        num_kv_heads: 2,
        head_dim: 3,
        ..KvCacheManagerConfig::default()
    };
    KvCacheManager::with_element(config).expect("the blocks are few")
}

/// The numbers of one layer of a sequence.
fn content<T: Element>(
    manager: &KvCacheManager<T>,
    handle: &PagedKvCacheHandle<T>,
    layer: usize,
) -> (Vec<f32>, Vec<f32>) {
    let view = manager.view(handle, layer, 0, handle.num_tokens()).expect("all tokens can be read");
    let segments = view.segments().map(numbers);
    let (keys, values): (Vec<_>, Vec<_>) = segments.unzip();
    (keys.concat(), values.concat())
}

fn check_manager<T: Element>() -> Result<()> {
    let manager = manager::<T>(6);
    let options = RequestOptions::default();
    let (keys, values) = (exact(5, 1), exact(5, 2));
    let mut handle = manager.allocate(&[1, 2, 3, 4, 5], &options)?;
    manager.write(&mut handle, 1, 0, &keys, &values)?;
    assert_eq!(content(&manager, &handle, 1), (keys.clone(), values.clone()));
    assert_eq!(content(&manager, &handle, 0), (vec![0.0; 5 * WIDTH], vec![0.0; 5 * WIDTH]));
    let (mut into_keys, mut into_values) = (vec![0.5; 3 * WIDTH], vec![0.5; 3 * WIDTH]);
    manager.read_range_into(&handle, 1, 1, 4, &mut into_keys, &mut into_values)?;
    assert_eq!(
        (&into_keys[..], &into_values[..]),
        (&keys[WIDTH..4 * WIDTH], &values[WIDTH..4 * WIDTH])
    );

    // A copied block has its scales.
    let mut fork = manager.fork(&handle, None)?;
    let rows = exact(2, 50);
    manager.write_many(1, &mut [&mut fork, &mut handle], &[4, 0], &rows, &rows)?;
    let [mut forked, mut first] = [keys.clone(), keys];
    forked[4 * WIDTH..].copy_from_slice(&rows[..WIDTH]);
    first[..WIDTH].copy_from_slice(&rows[WIDTH..]);
    assert_eq!(content(&manager, &fork, 1).0, forked);
    assert_eq!(content(&manager, &handle, 1).0, first);

    // What was truncated does not come back.
    manager.truncate(&mut fork, 3)?;
    manager.extend(&mut fork, 1)?;
    forked.truncate(3 * WIDTH);
    forked.extend([0.0; WIDTH]);
    assert_eq!(content(&manager, &fork, 1).0, forked);
    drop((handle, fork));
    manager.check_integrity()
}

#[test]
fn f32_goes_into_blocks_of_any_type_and_comes_out() {
    check_manager::<f32>().unwrap();
    check_manager::<f16>().unwrap();
    check_manager::<bf16>().unwrap();
    check_manager::<i8>().unwrap();
}

#[test]
fn a_block_gets_a_new_owner_without_old_scales() {
    let manager = manager::<i8>(3);
    let options = RequestOptions::default();
    let mut handle = manager.allocate(&[1, 2, 3, 4, 5, 6], &options).unwrap();
    let rows = exact(6, 3);
    for layer in [0, 1] {
        manager.write(&mut handle, layer, 0, &rows, &rows).unwrap();
    }
    drop(handle);
    let handle = manager.allocate(&[9; 6], &options).unwrap();
    for layer in [0, 1] {
        let view = manager.view(&handle, layer, 0, 6).unwrap();
        for segment in view.segments() {
            assert_eq!(parts(segment), (vec![0; 12], vec![0; 12], vec![0.0; 4], vec![0.0; 4]));
        }
    }
}

#[test]
fn blocks_that_would_get_what_can_not_be_scaled_are_left_alone() {
    let manager = manager::<i8>(4);
    let mut handle = manager.allocate(&[1, 2, 3], &RequestOptions::default()).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    let (good, mut bad) = (exact(3, 1), exact(3, 1));
    bad[WIDTH] = f32::NAN;
    let before = manager.inspect();
    let error = KvError::NotFinite { plane: "values", token: 1, head: 0 };
    assert_eq!(manager.write(&mut handle, 0, 0, &good, &bad), Err(error.clone()));
    let (good, bad) = (&good[..2 * WIDTH], &bad[..2 * WIDTH]);
    let many = manager.write_many(0, &mut [&mut handle, &mut fork], &[0, 1], good, bad);
    assert_eq!(many, Err(error));
    assert_eq!(manager.inspect(), before);
    assert_eq!(content(&manager, &handle, 0).0, [0.0; 3 * WIDTH]);
}

#[test]
fn a_block_of_int8_takes_a_byte_an_element_and_four_a_scale() {
    assert_eq!(manager::<f32>(4).stats().block_bytes, 2 * 2 * 2 * WIDTH * 4);
    assert_eq!(manager::<bf16>(4).stats().block_bytes, 2 * 2 * 2 * WIDTH * 2);
    assert_eq!(manager::<i8>(4).stats().block_bytes, 2 * 2 * 2 * (WIDTH + 2 * 4));
}

#[test]
fn a_contiguous_handle_takes_f32_for_any_type() {
    fn check<T: Element>() {
        let layers = vec![LayerKvCache::<T>::with_element(CONFIG); 1];
        let mut handle = ContiguousKvCacheHandle::new(layers).unwrap();
        let (keys, values) = (exact(2, 1), exact(2, 2));
        assert_eq!(handle.append(0, &keys, &values), Ok(0..2));
        let pinned = handle.layer(0).unwrap().pin_range(0, 2).unwrap();
        assert_eq!(numbers(pinned.span()), (keys, values));
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    check::<i8>();
}

#[test]
fn a_paged_tensor_has_scales_for_each_segment() {
    let manager = manager::<i8>(4);
    let mut handle = manager.allocate(&[1, 2, 3], &RequestOptions::default()).unwrap();
    let rows = exact(3, 1);
    manager.write(&mut handle, 0, 0, &rows, &rows).unwrap();
    let keys = handle.key_cache(0).unwrap().unwrap();
    assert_eq!((keys.dtype(), keys.num_segments()), (DType::I8, 2));
    assert_eq!(keys.scales(0), Some([0.25, 0.25, 0.5, 0.5].as_slice()));
    assert_eq!(keys.scales(1), Some([1.0, 1.0].as_slice()));
    assert_eq!(keys.segment(1).map(<[u8]>::len), Some(WIDTH));
}
