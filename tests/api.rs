//! What must not change unnoticed: thread safety, sizes, inference, and what `Debug` shows.

use std::fmt::Debug;
use std::hash::Hash;
use std::panic::{RefUnwindSafe, UnwindSafe};

use kvspan::{
    DType, Element, KVCacheConfig, KVCacheEntry, KVSpan, KvError, LayerKvCache, PinnedSpan,
    ReservedSpan,
};

const CONFIG: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 4, num_heads: 1, hidden_dim_per_head: 2 };

#[test]
fn everything_can_be_sent_and_shared() {
    fn assert<T: Send + Sync + Unpin>() {}
    assert::<LayerKvCache>();
    assert::<PinnedSpan>();
    assert::<ReservedSpan>();
    assert::<KVSpan<'_>>();
    assert::<KVCacheEntry>();
    assert::<KVCacheConfig>();
    assert::<KvError>();
}

#[test]
fn everything_can_be_used_after_a_panic() {
    fn assert<T: UnwindSafe + RefUnwindSafe>() {}
    assert::<LayerKvCache>();
    assert::<PinnedSpan>();
    assert::<ReservedSpan>();
    assert::<KVSpan<'_>>();
    assert::<KVCacheEntry>();
    assert::<KVCacheConfig>();
    assert::<KvError>();
}

#[test]
fn what_owns_memory_has_no_lifetime() {
    fn assert<T: 'static>() {}
    assert::<LayerKvCache>();
    assert::<PinnedSpan>();
    assert::<ReservedSpan>();
}

#[test]
fn small_types_have_the_usual_traits() {
    fn assert<T: Copy + Eq + Hash + Debug + Default>() {}
    fn assert_copy<T: Copy + PartialEq + Debug>() {}
    fn assert_clone<T: Clone + PartialEq + Debug>() {}
    assert::<KVCacheConfig>();
    assert::<DType>();
    assert_copy::<KVSpan<'_>>();
    assert_clone::<KVCacheEntry>();
    assert_clone::<KvError>();
}

#[cfg(target_pointer_width = "64")]
#[test]
fn nothing_has_grown() {
    assert_eq!(size_of::<KVCacheConfig>(), 24);
    assert_eq!(size_of::<LayerKvCache>(), 64);
    assert_eq!(size_of::<KVSpan<'_>>(), 96);
    assert_eq!(size_of::<PinnedSpan>(), 40);
    assert_eq!(size_of::<ReservedSpan>(), 32);
    assert_eq!(size_of::<KVCacheEntry>(), 48);
    assert_eq!(size_of::<KvError>(), 40);
    assert_eq!(size_of::<kvspan::Result<()>>(), 40);
}

/// The elements are `f32` unless said otherwise, in signatures and in calls.
#[test]
fn a_cache_is_of_f32_by_default() {
    fn takes_the_plain_type(cache: &LayerKvCache) -> LayerKvCache<f32> {
        cache.clone()
    }
    let cache = LayerKvCache::new(CONFIG);
    cache.append(&[1.5, 2.5], &[3.5, 4.5]).unwrap();
    let sum = cache.with_read_kv(0, |keys, _| keys.iter().sum::<f32>());
    assert!(sum.is_ok_and(|sum| sum > 3.5));
    let span_of_f32 = |span: KVSpan<'_>| span.values.to_vec();
    let cache = takes_the_plain_type(&cache);
    assert_eq!(cache.with_read_range(0, 1, span_of_f32), Ok(vec![3.5, 4.5]));
    assert_eq!(LayerKvCache::default().capacity(), 8192);
    assert_eq!(LayerKvCache::<f32>::with_element(CONFIG).capacity(), 4);
}

#[test]
fn an_element_type_has_its_numpy_name_and_size() {
    assert_eq!(<f32 as Element>::DTYPE, DType::F32);
    assert_eq!((DType::F32.name(), DType::F32.itemsize()), ("float32", 4));
    assert_eq!(DType::default(), DType::F32);
}

#[test]
fn debug_of_a_cache_is_its_configuration_and_length() {
    let cache = LayerKvCache::new(CONFIG);
    cache.initialize(3).unwrap();
    assert_eq!(
        format!("{cache:?}"),
        "LayerKvCache { config: KVCacheConfig { max_tokens_per_seq: 4, num_heads: 1, \
         hidden_dim_per_head: 2 }, dtype: F32, len: 3, .. }"
    );
    let invalid = LayerKvCache::new(KVCacheConfig { num_heads: 0, ..CONFIG });
    assert!(format!("{invalid:?}").ends_with("dtype: F32, len: 0, .. }"));
}

#[test]
fn debug_of_a_span_is_its_place_and_shape() {
    let cache = LayerKvCache::new(CONFIG);
    cache.initialize(3).unwrap();
    let shown = cache.with_read_range(1, 3, |span| format!("{span:?}"));
    let expected = "KVSpan { tokens: 1..3, num_heads: 1, head_dim: 2, .. }";
    assert_eq!(shown.as_deref(), Ok(expected));
}

#[test]
fn debug_never_shows_the_data() {
    let cache = LayerKvCache::new(CONFIG);
    let row = [8642.0; 4];
    cache.append(&row, &row).unwrap();
    let pinned = cache.pin_range(0, 2).unwrap();
    let mut reserved = cache.reserve(2).unwrap();
    reserved.keys_and_values_mut().0.fill(8642.0);
    let shown: [&dyn Debug; 5] = [&cache, &pinned, &pinned.span(), &reserved, &reserved.span()];
    for shown in shown {
        let text = format!("{shown:?} {shown:#?}");
        assert!(!text.contains("8642"), "{text}");
    }
    let refused = cache.write_kv(0, &row[..2], &row[..2]).unwrap_err();
    assert!(!format!("{refused:?} {refused}").contains("8642"));
}
