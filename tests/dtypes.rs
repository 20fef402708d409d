//! Every element type, through every layer.

use kvspan::{
    ContiguousKvCacheHandle, DType, Element, KVCacheConfig, KVSpan, KvCacheHandle, LayerKvCache,
    Result, bf16, f16,
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
