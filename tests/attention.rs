//! Attention is what a naive softmax says, wherever keys and values lie and whatever lies beside them.

mod common {
    pub(crate) mod rng;
    pub(crate) mod softmax;
}

use std::any::Any;
use std::sync::Arc;

use common::softmax::{Shape, cache, difference, naive, numbers, stored};
use kvspan::{
    Attention, AttentionPool, BlockTable, CacheHandleStats, Context, ContiguousKvCacheHandle,
    DType, Device, Element, Instructions, KVCacheConfig, KvCacheHandle, KvCacheManager,
    KvCacheManagerConfig, KvError, LayerKvCache, PagedKvCacheHandle, Query, RequestOptions, Result,
    Storage, TensorLike, TensorRef, bf16, f16,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};

/// Of results whose values are between -1 and 1.
const TOLERANCE: f64 = 2e-5;

const GROUPED: Shape = Shape { num_q_heads: 4, num_kv_heads: 2, head_dim: 8 };

fn query(shape: Shape, elements: &[f32]) -> Query<'_> {
    let q_tokens = elements.len() / shape.query_width();
    Query::new(elements, [q_tokens, shape.num_q_heads, shape.head_dim]).expect("whole tokens")
}

/// Attends to a cache on this thread.
fn attend<T: Element>(
    options: Attention,
    shape: Shape,
    elements: &[f32],
    cache: &LayerKvCache<T>,
) -> Result<Vec<f32>> {
    let mut out = vec![f32::NAN; elements.len()];
    let pool = AttentionPool::default();
    options.attend_layer(query(shape, elements), cache, &pool, &mut out)?;
    Ok(out)
}

fn attend_context(shape: Shape, elements: &[f32], context: &Context<'_>) -> Result<Vec<f32>> {
    let mut out = vec![f32::NAN; elements.len()];
    let pool = AttentionPool::default();
    Attention::default().attend(query(shape, elements), context, &pool, &mut out)?;
    Ok(out)
}

/// A sequence of these numbers in blocks, in the only layer.
fn paged<T: Element>(
    shape: Shape,
    block_size: usize,
    keys: &[f32],
    values: &[f32],
) -> (KvCacheManager<T>, PagedKvCacheHandle<T>) {
    let tokens: Vec<u32> = (0..).take(keys.len() / shape.width()).collect();
    let config = KvCacheManagerConfig {
        num_blocks: 4 * tokens.len().div_ceil(block_size) + 4,
        block_size,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        ..KvCacheManagerConfig::default()
    };
    let manager = KvCacheManager::with_element(config).expect("a small pool");
    let mut handle = manager.allocate(&tokens, &RequestOptions::default()).expect("there is room");
    manager.write(&mut handle, 0, 0, keys, values).expect("it has its blocks");
    (manager, handle)
}

#[derive(Clone, Copy, Debug)]
struct Case {
    shape: Shape,
    len: usize,
    q_tokens: usize,
    options: Attention,
    num_threads: usize,
    seed: u64,
}

fn any_case() -> impl Strategy<Value = Case> {
    let dims = select(vec![1, 3, 4, 8, 12, 16, 33, 40, 64, 72]);
    let shape = (select(vec![1_usize, 2, 3]), select(vec![1_usize, 2, 3, 4, 7, 8]), dims);
    let shape = shape.prop_map(|(num_kv_heads, group_size, head_dim)| Shape {
        num_q_heads: num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
    });
    let len = prop_oneof![1_usize..40, select(vec![127, 128, 129, 256, 300, 511, 513, 700])];
    let options = (
        proptest::option::of(0.1_f32..3.0),
        any::<bool>(),
        proptest::option::of(prop_oneof![1_usize..20, 1_usize..400]),
        proptest::option::of(0.5_f32..30.0),
    );
    let options = options.prop_map(|(scale, causal, window, softcap)| Attention {
        scale,
        causal,
        window: window.filter(|_| causal),
        softcap,
    });
    (shape, len, options, 1_usize..12, 1_usize..4, any::<u64>()).prop_map(
        |(shape, len, options, q_tokens, num_threads, seed)| Case {
            shape,
            len,
            q_tokens: if options.causal { q_tokens.min(len) } else { q_tokens },
            options,
            num_threads,
            seed,
        },
    )
}

/// Checks one case in a layer cache, and that blocks and threads change no bit of it.
fn check<T: Element>(case: Case, block_size: usize) {
    let Case { shape, options, .. } = case;
    let keys = numbers(case.seed, case.len * shape.width());
    let values = numbers(case.seed ^ 1, keys.len());
    let elements = numbers(case.seed ^ 2, case.q_tokens * shape.query_width());
    let cache = cache::<T>(shape, &keys, &values);
    let out = attend(options, shape, &elements, &cache).expect("the case is valid");
    let wanted = naive(&options, shape, &elements, &stored(&cache));
    assert!(difference(&out, &wanted) < TOLERANCE, "{}", difference(&out, &wanted));

    let (_manager, handle) = paged::<T>(shape, block_size, &keys, &values);
    let pool = AttentionPool::new(case.num_threads).expect("a few threads");
    let mut paged_out = vec![0.0; out.len()];
    let result = options.attend_handle(query(shape, &elements), &handle, 0, &pool, &mut paged_out);
    assert_eq!((result, paged_out), (Ok(()), out));
}

proptest! {
    #![proptest_config(Config {
        cases: 64,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    })]

    #[test]
    fn attention_is_what_a_naive_softmax_says(
        case in any_case(),
        dtype in select(vec![DType::F32, DType::F16, DType::BF16, DType::I8]),
        block_size in select(vec![1, 2, 7, 16, 32, 128]),
    ) {
        match dtype {
            DType::F32 => check::<f32>(case, block_size),
            DType::F16 => check::<f16>(case, block_size),
            DType::BF16 => check::<bf16>(case, block_size),
            _ => check::<i8>(case, block_size),
        }
    }
}

#[test]
fn all_instructions_say_the_same_within_rounding() {
    fn check<T: Element>() {
        for head_dim in [8, 24, 64, 80, 128] {
            let shape = Shape { num_q_heads: 7, num_kv_heads: 1, head_dim };
            let keys = numbers(1, 150 * shape.width());
            let values = numbers(2, keys.len());
            let elements = numbers(3, 5 * shape.query_width());
            let cache = cache::<T>(shape, &keys, &values);
            let options =
                Attention { softcap: Some(4.0), window: Some(99), ..Attention::default() };
            let portable = AttentionPool::with_instructions(1, Instructions::Portable).unwrap();
            let attend = |pool: &AttentionPool| {
                let mut out = vec![f32::NAN; elements.len()];
                options.attend_layer(query(shape, &elements), &cache, pool, &mut out).unwrap();
                out
            };
            let wanted: Vec<_> = attend(&portable.unwrap()).into_iter().map(f64::from).collect();
            let exact = naive(&options, shape, &elements, &stored(&cache));
            for instructions in Instructions::available() {
                let pool = AttentionPool::with_instructions(1, instructions).unwrap().unwrap();
                assert_eq!(pool.instructions(), instructions);
                let out = attend(&pool);
                let differences = [difference(&out, &wanted), difference(&out, &exact)];
                assert!(
                    differences.iter().all(|&x| x < TOLERANCE),
                    "{instructions:?} {differences:?}"
                );
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    check::<i8>();
}

#[test]
fn every_f16_is_read_as_the_number_it_is() {
    let shape = Shape { num_q_heads: 1, num_kv_heads: 1, head_dim: 32 };
    let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let cache = LayerKvCache::<f16>::with_element(KVCacheConfig {
        max_tokens_per_seq: all.len() / 32,
        num_heads: 1,
        hidden_dim_per_head: 32,
    });
    cache.append(&vec![f16::ZERO; all.len()], &all).unwrap();
    for instructions in Instructions::available() {
        let pool = AttentionPool::with_instructions(1, instructions).unwrap().unwrap();
        for (token, wanted) in all.chunks(32).enumerate() {
            // A single token has the weight 1.
            let pinned = cache.pin_range(token, token + 1).unwrap();
            let context = Context::of_span(pinned.span()).unwrap();
            let mut out = [0.0; 32];
            let query = query(shape, &[1.0; 32]);
            Attention::default().attend(query, &context, &pool, &mut out).unwrap();
            for (given, wanted) in out.iter().zip(wanted) {
                let wanted = wanted.to_f32();
                // Zeros of both signs are sums of zero.
                let (given, wanted) = ((given + 0.0).to_bits(), (wanted + 0.0).to_bits());
                let is_nan = |bits| f32::from_bits(bits).is_nan();
                assert!(given == wanted || is_nan(given) && is_nan(wanted), "{given} {wanted}");
            }
        }
    }
}

#[test]
fn a_long_sequence_of_small_heads_is_summed_with_little_error() {
    let shape = Shape { num_q_heads: 2, num_kv_heads: 1, head_dim: 4 };
    let keys = numbers(1, 128 * 1024 * shape.width());
    let values = numbers(2, keys.len());
    let elements = numbers(3, shape.query_width());
    let cache = cache::<f32>(shape, &keys, &values);
    let options = Attention::default();
    let out = attend(options, shape, &elements, &cache).unwrap();
    let wanted = naive(&options, shape, &elements, &stored(&cache));
    assert!(difference(&out, &wanted) < 1e-6, "{}", difference(&out, &wanted));

    let mut threaded = vec![0.0; out.len()];
    let pool = AttentionPool::new(3).unwrap();
    options.attend_layer(query(shape, &elements), &cache, &pool, &mut threaded).unwrap();
    assert_eq!(threaded, out);
}

#[test]
fn one_token_has_all_the_weight() {
    let keys = numbers(1, GROUPED.width());
    let values = numbers(2, GROUPED.width());
    let cache = cache::<f32>(GROUPED, &keys, &values);
    let elements = numbers(3, GROUPED.query_width());
    let out = attend(Attention::default(), GROUPED, &elements, &cache).unwrap();
    let heads: Vec<_> = values.chunks(8).flat_map(|head| [head, head].concat()).collect();
    assert_eq!(out, heads);
}

#[test]
fn a_prompt_in_chunks_gives_what_it_gives_at_once() {
    let shape = GROUPED;
    let (prompt, chunk) = (200, 37);
    let keys = numbers(1, prompt * shape.width());
    let values = numbers(2, keys.len());
    let elements = numbers(3, prompt * shape.query_width());
    let options = Attention { window: Some(50), ..Attention::default() };
    let at_once = attend(options, shape, &elements, &cache::<f32>(shape, &keys, &values)).unwrap();

    let cache = LayerKvCache::new(KVCacheConfig {
        max_tokens_per_seq: prompt,
        num_heads: shape.num_kv_heads,
        hidden_dim_per_head: shape.head_dim,
    });
    let mut out = Vec::new();
    for start in (0..prompt).step_by(chunk) {
        let end = prompt.min(start + chunk);
        let kv = start * shape.width()..end * shape.width();
        cache.append(&keys[kv.clone()], &values[kv]).unwrap();
        let elements = &elements[start * shape.query_width()..end * shape.query_width()];
        out.extend(attend(options, shape, elements, &cache).unwrap());
    }
    let at_once: Vec<_> = at_once.into_iter().map(f64::from).collect();
    assert!(difference(&out, &at_once) < 1e-6);
}

#[test]
fn sequences_in_one_call_get_what_each_gets_alone() {
    let shape = GROUPED;
    let pool = AttentionPool::new(2).unwrap();
    let options = Attention::default();
    let lens: [(usize, usize); 4] = [(1, 1), (600, 1), (40, 40), (129, 3)];
    let caches = lens.map(|(len, q_tokens)| {
        let seed = u64::try_from(len).unwrap();
        let keys = numbers(seed, len * shape.width());
        let (_, handle) = paged::<bf16>(shape, 16, &keys, &keys);
        (handle, numbers(seed + 7, q_tokens * shape.query_width()))
    });
    let alone = caches.iter().flat_map(|(handle, elements)| {
        let mut out = vec![0.0; elements.len()];
        options.attend_handle(query(shape, elements), handle, 0, &pool, &mut out).unwrap();
        out
    });
    let alone: Vec<_> = alone.collect();
    let sequences = caches.iter().map(|(handle, elements)| {
        let handle: &dyn KvCacheHandle = handle;
        (query(shape, elements), handle)
    });
    let mut together = vec![0.0; alone.len()];
    options.attend_handles(&sequences.collect::<Vec<_>>(), 0, &pool, &mut together).unwrap();
    assert_eq!(together, alone);
    assert_eq!(options.attend_handles(&[], 0, &pool, &mut []), Ok(()));
}

#[test]
fn forks_attend_to_what_each_wrote() {
    let shape = GROUPED;
    let keys = numbers(1, 20 * shape.width());
    let (manager, mut first) = paged::<f32>(shape, 8, &keys, &keys);
    let mut second = manager.fork(&first, None).unwrap();
    let rows = [numbers(2, shape.width()), numbers(3, shape.width())];
    for (handle, row) in [&mut first, &mut second].into_iter().zip(&rows) {
        manager.extend(handle, 1).unwrap();
        manager.write(handle, 0, 20, row, row).unwrap();
    }
    let elements = numbers(4, shape.query_width());
    let (options, pool) = (Attention::default(), AttentionPool::default());
    for (handle, row) in [&first, &second].into_iter().zip(&rows) {
        let mut out = vec![0.0; elements.len()];
        options.attend_handle(query(shape, &elements), handle, 0, &pool, &mut out).unwrap();
        let all = [&*keys, row].concat();
        let wanted = attend(options, shape, &elements, &cache::<f32>(shape, &all, &all)).unwrap();
        assert_eq!(out, wanted);
    }
}

#[test]
fn what_is_not_seen_is_not_read() {
    fn check<T: Element>() {
        let shape = GROUPED;
        let (width, len) = (shape.width(), 300);
        let mut keys = numbers(1, len * width);
        let mut values = numbers(2, len * width);
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // A window of 100 tokens, for 3 query tokens: of 198..298 to 200..300.
            for token in (0..198).chain([298, 299]) {
                keys[token * width..][..width].fill(poison);
                values[token * width..][..width].fill(poison);
            }
            let cache = cache::<T>(shape, &keys, &values);
            let beyond = vec![poison; 20 * width];
            cache.append(&beyond, &beyond).unwrap();
            cache.truncate(len).unwrap();
            let elements = numbers(3, 3 * shape.query_width());
            let options = Attention { window: Some(100), ..Attention::default() };
            let out = attend(options, shape, &elements, &cache).unwrap();
            // The first query token sees neither what is before the window nor the last two.
            let clean = shape.query_width();
            assert!(out[..clean].iter().all(|x| x.is_finite()), "{poison}");
            let [keys, values] = stored(&cache);
            let seen = [keys[..298 * width].to_vec(), values[..298 * width].to_vec()];
            let wanted = naive(&options, shape, &elements[..clean], &seen);
            assert!(difference(&out[..clean], &wanted) < TOLERANCE);
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn scales_of_what_is_not_seen_are_not_read() {
    let shape = GROUPED;
    let seen = numbers(1, 20 * shape.width());
    let elements = numbers(3, shape.query_width());
    let options = Attention { window: Some(20), ..Attention::default() };
    let wanted = attend(options, shape, &elements, &cache::<i8>(shape, &seen, &seen)).unwrap();

    let cache = LayerKvCache::<i8>::with_element(KVCacheConfig {
        max_tokens_per_seq: 50,
        num_heads: shape.num_kv_heads,
        hidden_dim_per_head: shape.head_dim,
    });
    let reserve_poison = |num_tokens| {
        let mut rows = cache.reserve(num_tokens).unwrap();
        let (key_scales, value_scales) = rows.scales_mut();
        key_scales.fill(f32::NAN);
        value_scales.fill(f32::NAN);
        rows
    };
    reserve_poison(20).commit();
    cache.append(&seen, &seen).unwrap();
    drop(reserve_poison(10));
    assert_eq!(attend(options, shape, &elements, &cache), Ok(wanted));
}

#[test]
fn nan_in_one_head_stays_in_the_query_heads_that_read_it() {
    let shape = GROUPED;
    let mut keys = numbers(1, 50 * shape.width());
    keys[10 * shape.width()] = f32::NAN; // in the first KV head
    let values = numbers(2, keys.len());
    let elements = numbers(3, shape.query_width());
    let cache = cache::<f32>(shape, &keys, &values);
    let out = attend(Attention::default(), shape, &elements, &cache).unwrap();
    assert!(out[..16].iter().all(|x| x.is_nan()) && out[16..].iter().all(|x| x.is_finite()));
}

#[test]
fn tokens_with_infinitely_small_scores_have_no_weight() {
    let shape = Shape { num_q_heads: 1, num_kv_heads: 1, head_dim: 1 };
    // The first tile, and more, has nothing else.
    let mut keys = vec![f32::NEG_INFINITY; 200];
    keys.extend(numbers(1, 50));
    let values = numbers(2, keys.len());
    let cache = cache::<f32>(shape, &keys, &values);
    let options = Attention::default();
    let out = attend(options, shape, &[1.0], &cache).unwrap();
    let wanted = naive(&options, shape, &[1.0], &stored(&cache));
    assert!(wanted[0].is_finite() && difference(&out, &wanted) < TOLERANCE);
}

#[test]
fn scores_far_apart_overflow_nothing() {
    let shape = Shape { num_q_heads: 1, num_kv_heads: 1, head_dim: 1 };
    let keys = [-2e38, 2e38, 1e30, 0.0];
    let values = [1.0, 2.0, 3.0, 4.0];
    let cache = cache::<f32>(shape, &keys, &values);
    assert_eq!(attend(Attention::default(), shape, &[1.0], &cache), Ok(vec![2.0]));
    let capped = Attention { softcap: Some(20.0), ..Attention::default() };
    let wanted = naive(&capped, shape, &[1.0], &stored(&cache));
    let out = attend(capped, shape, &[1.0], &cache).unwrap();
    assert!(difference(&out, &wanted) < TOLERANCE);
}

#[test]
fn a_soft_cap_of_any_size_bounds_scores_with_little_error() {
    let shape = GROUPED;
    let keys = numbers(1, 200 * shape.width());
    let cache = cache::<f32>(shape, &keys, &numbers(2, keys.len()));
    for softcap in [1e-45, 1e-39, 1e-3, 0.3, 4.0, 1e3, 1e5, 1e7, 1e20, f32::MAX] {
        let options = Attention { softcap: Some(softcap), ..Attention::default() };
        for elements in [numbers(3, shape.query_width()), vec![0.0; shape.query_width()]] {
            let wanted = naive(&options, shape, &elements, &stored(&cache));
            for instructions in Instructions::available() {
                let pool = AttentionPool::with_instructions(1, instructions).unwrap().unwrap();
                let mut out = vec![f32::NAN; elements.len()];
                let query = query(shape, &elements);
                assert_eq!(options.attend_layer(query, &cache, &pool, &mut out), Ok(()));
                let difference = difference(&out, &wanted);
                assert!(difference < 1e-6, "{softcap} {instructions:?}: {difference}");
            }
        }
    }
}

#[test]
fn a_context_stays_as_it_is_while_its_layer_grows() {
    let shape = GROUPED;
    let keys = numbers(1, 10 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let elements = numbers(2, shape.query_width());
    let before = attend(Attention::default(), shape, &elements, &cache).unwrap();
    let pinned = cache.pin_range(0, 10).unwrap();
    let context = Context::of_span(pinned.span()).unwrap();
    cache.append(&keys, &keys).unwrap();
    assert_eq!(attend_context(shape, &elements, &context), Ok(before.clone()));
    assert_ne!(attend(Attention::default(), shape, &elements, &cache), Ok(before));
    assert_eq!((context.len(), context.num_heads(), context.head_dim()), (10, 2, 8));
    assert_eq!(context.dtype(), DType::F32);
    assert_eq!(
        format!("{context:?}"),
        "Context { shape: [10, 2, 8], dtype: F32, num_segments: 1 }"
    );
}

#[test]
fn a_chunk_of_a_prompt_sees_nothing_of_the_blocks_that_are_to_be_filled() {
    let shape = GROUPED;
    let (keys, values) = (numbers(1, 9 * shape.width()), numbers(2, 9 * shape.width()));
    let (_manager, handle) = paged::<f32>(shape, 4, &keys, &values);
    let (k, v) = handle.kv_cache(0).unwrap();
    let (k, v) = (k.unwrap(), v.unwrap());
    let whole = || Context::of_tensors(&*k, &*v).unwrap();
    let elements = numbers(3, 2 * shape.query_width());
    for len in 2..=9 {
        let part = |rows: &[f32]| rows[..len * shape.width()].to_vec();
        let cache = cache::<f32>(shape, &part(&keys), &part(&values));
        let wanted = attend(Attention::default(), shape, &elements, &cache);
        let first = whole().first(len).unwrap();
        assert_eq!(first.len(), len);
        assert_eq!(attend_context(shape, &elements, &first), wanted);
    }
    let too_many = KvError::RangeOutOfBounds { start: 0, end: 10, len: 9 };
    assert_eq!(whole().first(10).err(), Some(too_many));
    let none = attend_context(shape, &elements, &whole().first(0).unwrap());
    assert_eq!(none, Err(KvError::NothingToAttend));
}

#[test]
fn an_error_says_which_of_several_sequences_it_is_about() {
    let shape = GROUPED;
    let keys = numbers(1, 3 * shape.width());
    let (_one, good) = paged::<f32>(shape, 2, &keys, &keys);
    let (_other, empty) = paged::<f32>(shape, 2, &[], &[]);
    let (elements, mut out) = (numbers(2, shape.query_width()), vec![7.0; 64]);
    let sequences: [(_, &dyn KvCacheHandle); 2] =
        [(query(shape, &elements), &good), (query(shape, &elements), &empty)];
    let pool = AttentionPool::default();
    let result = Attention::default().attend_handles(&sequences, 0, &pool, &mut out);
    let source = Box::new(KvError::NothingToAttend);
    assert_eq!(result, Err(KvError::BatchEntry { index: 1, source }));
    assert_eq!(out, [7.0; 64]);
    let alone = Attention::default().attend_handles(&sequences[1..], 0, &pool, &mut out[..32]);
    assert_eq!(alone, Err(KvError::NothingToAttend));
}

#[test]
fn a_scale_of_any_size_makes_no_nan() {
    let shape = GROUPED;
    let keys = numbers(1, 3 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let zero = vec![0.0; shape.query_width()];
    let plain = attend(Attention::default(), shape, &zero, &cache);
    for scale in [f32::MAX, -f32::MAX, f32::MIN_POSITIVE] {
        let options = Attention { scale: Some(scale), ..Attention::default() };
        assert_eq!(attend(options, shape, &zero, &cache), plain);
    }
}

#[test]
fn bad_shapes_are_refused_with_their_numbers_and_change_nothing() {
    let shape = GROUPED;
    let keys = numbers(1, 3 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let (options, pool) = (Attention::default(), AttentionPool::default());
    let elements = vec![1.0; 1000];
    let attend = |shape: [usize; 3], out: &mut [f32]| {
        let len = shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n));
        let len = len.map_or(elements.len(), |len| len.min(elements.len()));
        let query = Query::new(&elements[..len], shape)?;
        options.attend_layer(query, &cache, &pool, out)
    };
    let mut out = vec![7.0; 1000];
    let mut refused = |shape, out_len, error| {
        assert_eq!(attend(shape, &mut out[..out_len]), Err(error));
        assert_eq!(out, [7.0; 1000]);
    };
    let mismatch = |what, given, wanted| KvError::ShapeMismatch { what, given, wanted };
    refused([1, 4, 7], 28, mismatch("head_dim of the query", 7, 8));
    refused([1, 3, 8], 24, KvError::HeadsNotGrouped { num_q_heads: 3, num_kv_heads: 2 });
    refused([1, 0, 8], 0, KvError::HeadsNotGrouped { num_q_heads: 0, num_kv_heads: 2 });
    refused([4, 4, 8], 128, KvError::QueryTooLong { q_tokens: 4, len: 3 });
    refused([1, 4, 8], 31, mismatch("elements of the output", 31, 32));
    refused([1, 4, 8], 33, mismatch("elements of the output", 33, 32));
    refused([1, usize::MAX, 8], 0, mismatch("elements of the query", 1000, usize::MAX));
    assert_eq!(attend([0, 4, 8], &mut []), Ok(()));
    assert_eq!(attend([0, usize::MAX - 1, 8], &mut []), Ok(()));

    let empty = LayerKvCache::new(cache.config);
    let query = query(shape, &elements[..32]);
    let result = options.attend_layer(query, &empty, &pool, &mut out[..32]);
    assert_eq!(result, Err(KvError::NothingToAttend));

    // Without an order, there can be more query tokens than tokens.
    let all_see_all = Attention { causal: false, ..options };
    let long = Query::new(&elements[..128], [4, 4, 8]).unwrap();
    assert_eq!(all_see_all.attend_layer(long, &cache, &pool, &mut out[..128]), Ok(()));
}

#[test]
fn options_without_sense_are_refused() {
    let shape = GROUPED;
    let keys = numbers(1, 3 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let plain = Attention::default();
    let refused = |options, option, wanted| {
        let result = attend(options, shape, &[1.0; 32], &cache);
        assert_eq!(result, Err(KvError::InvalidOption { option, wanted }));
    };
    for scale in [f32::NAN, f32::INFINITY] {
        refused(Attention { scale: Some(scale), ..plain }, "scale", "finite");
    }
    for softcap in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        refused(Attention { softcap: Some(softcap), ..plain }, "softcap", "finite and above 0");
    }
    refused(Attention { window: Some(0), ..plain }, "window", "at least 1");
    let unordered = Attention { window: Some(3), causal: false, ..plain };
    refused(unordered, "window", "left out, since attention is not causal");
    assert!(attend(Attention { scale: Some(0.0), ..plain }, shape, &[1.0; 32], &cache).is_ok());
    let all = Attention { window: Some(usize::MAX), ..plain };
    assert_eq!(attend(all, shape, &[1.0; 32], &cache), attend(plain, shape, &[1.0; 32], &cache));
}

#[test]
fn a_span_whose_fields_were_changed_is_refused() {
    let shape = GROUPED;
    let keys = numbers(1, 3 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let pinned = cache.pin_range(0, 3).unwrap();
    let mut span = pinned.span();
    span.values = &span.values[1..];
    let error = KvError::ShapeMismatch { what: "bytes of a segment", given: 188, wanted: 192 };
    assert_eq!(Context::of_span(span).err(), Some(error));
}

#[test]
fn a_pool_needs_a_thread_and_says_what_it_is() {
    let error = KvError::InvalidConfig { field: "num_threads" };
    assert_eq!(AttentionPool::new(0).err(), Some(error));
    for num_threads in [4097, usize::MAX] {
        let error = KvError::NoThreads { num_threads };
        assert_eq!(error.to_string(), format!("cannot start {num_threads} threads"));
        assert_eq!(AttentionPool::new(num_threads).err(), Some(error));
    }
    let pool = AttentionPool::with_instructions(2, Instructions::Portable).unwrap().unwrap();
    assert_eq!(format!("{pool:?}"), "AttentionPool { num_threads: 2, instructions: Portable, .. }");
}

#[test]
fn calls_from_several_threads_share_a_pool() {
    let shape = GROUPED;
    let keys = numbers(1, 600 * shape.width());
    let cache = cache::<f32>(shape, &keys, &keys);
    let pool = AttentionPool::new(2).unwrap();
    let elements = numbers(2, shape.query_width());
    let wanted = attend(Attention::default(), shape, &elements, &cache).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut out = vec![0.0; elements.len()];
                let query = query(shape, &elements);
                Attention::default().attend_layer(query, &cache, &pool, &mut out).unwrap();
                assert_eq!(out, wanted);
            });
        }
    });
}

/// A tensor that says what it is told to.
#[derive(Clone, Debug)]
struct Told {
    shape: [usize; 3],
    dtype: DType,
    segments: Vec<Vec<f32>>,
    scales: Vec<Vec<f32>>,
    num_segments: usize,
    /// Bytes that the first segment leaves out at its beginning.
    skip: usize,
    /// And at its end.
    cut: usize,
}

impl TensorLike for Told {
    fn shape(&self) -> [usize; 3] {
        self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_segments(&self) -> usize {
        self.num_segments
    }

    fn segment(&self, index: usize) -> Option<&[u8]> {
        let elements = self.segments.get(index)?;
        let bytes = bytemuck::cast_slice(elements);
        Some(if index == 0 { &bytes[self.skip..bytes.len() - self.cut] } else { bytes })
    }

    fn scales(&self, index: usize) -> Option<&[f32]> {
        self.scales.get(index).map(Vec::as_slice)
    }
}

/// Somebody else's handle, of one layer.
#[derive(Debug)]
struct Foreign {
    table: BlockTable,
    tensors: [Option<Told>; 2],
}

impl Foreign {
    fn tensor(&self, index: usize) -> Option<TensorRef> {
        self.tensors[index].clone().map(|told| -> TensorRef { Arc::new(told) })
    }
}

impl KvCacheHandle for Foreign {
    fn block_table(&self) -> &BlockTable {
        &self.table
    }

    fn block_table_mut(&mut self) -> &mut BlockTable {
        &mut self.table
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_layers(&self) -> usize {
        1
    }

    fn num_heads(&self) -> usize {
        2
    }

    fn head_dim(&self) -> usize {
        8
    }

    fn key_cache(&self, _layer: usize) -> Result<Option<TensorRef>> {
        Ok(self.tensor(0))
    }

    fn value_cache(&self, _layer: usize) -> Result<Option<TensorRef>> {
        Ok(self.tensor(1))
    }

    fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>> {
        Err(KvError::NoStorage)
    }

    fn stats(&self) -> CacheHandleStats {
        CacheHandleStats {
            memory_bytes: 0,
            blocks_allocated: 0,
            tokens_stored: 0,
            utilization: 0.0,
            last_access: std::time::Instant::now(),
        }
    }

    fn is_valid(&self) -> bool {
        true
    }

    fn cache_id(&self) -> String {
        "foreign".to_owned()
    }
}

fn attend_to(keys: Option<Told>, values: Option<Told>) -> Result<Vec<f32>> {
    let handle = Foreign { table: BlockTable::new(16), tensors: [keys, values] };
    let (elements, mut out) = (numbers(9, GROUPED.query_width()), vec![0.0; 32]);
    let pool = AttentionPool::default();
    let query = query(GROUPED, &elements);
    Attention::default().attend_handle(query, &handle, 0, &pool, &mut out)?;
    Ok(out)
}

#[test]
fn tensors_of_somebody_else_are_read_and_lies_are_refused() {
    let elements = numbers(1, 5 * GROUPED.width());
    let (first, second) = elements.split_at(2 * GROUPED.width());
    let honest = Told {
        shape: [5, 2, 8],
        dtype: DType::F32,
        segments: vec![first.to_vec(), second.to_vec()],
        scales: vec![],
        num_segments: 2,
        skip: 0,
        cut: 0,
    };
    let cache = cache::<f32>(GROUPED, &elements, &elements);
    let query = numbers(9, GROUPED.query_width());
    let wanted = attend(Attention::default(), GROUPED, &query, &cache);
    assert_eq!(attend_to(Some(honest.clone()), Some(honest.clone())), wanted);

    assert_eq!(attend_to(Some(honest.clone()), None), Err(KvError::NoStorage));
    let refused = |lie: Told, error: KvError| {
        assert_eq!(attend_to(Some(honest.clone()), Some(lie)), Err(error));
    };
    let mismatch = |what, given, wanted| KvError::ShapeMismatch { what, given, wanted };
    let dtype = KvError::DTypeMismatch { given: "bfloat16", wanted: "float32" };
    refused(Told { dtype: DType::BF16, ..honest.clone() }, dtype);
    for (shape, error) in [
        ([4, 2, 8], mismatch("tokens of the values", 4, 5)),
        ([5, 1, 8], mismatch("heads of the values", 1, 2)),
        ([5, 2, 9], mismatch("head_dim of the values", 9, 8)),
    ] {
        refused(Told { shape, ..honest.clone() }, error);
    }
    let fewer = Told { num_segments: 1, ..honest.clone() };
    refused(fewer, mismatch("segments of the values", 1, 2));
    let swapped = Told { segments: vec![second.to_vec(), first.to_vec()], ..honest.clone() };
    refused(swapped, mismatch("bytes of a segment", 192, 128));
    let scaled = Told { scales: vec![vec![1.0]], ..honest.clone() };
    refused(scaled, mismatch("scales of a segment", 1, 0));
    refused(Told { skip: 3, ..honest.clone() }, mismatch("bytes of a segment", 125, 128));

    // Both tell the same lie.
    let refused = |lie: Told, error: KvError| {
        assert_eq!(attend_to(Some(lie.clone()), Some(lie)), Err(error));
    };
    let more = Told { num_segments: 3, ..honest.clone() };
    assert_eq!(attend_to(Some(more.clone()), Some(more)), wanted, "a third segment is empty");
    let longer = Told { shape: [6, 2, 8], ..honest.clone() };
    refused(longer, mismatch("tokens in the segments", 5, 6));
    let no_heads = Told { shape: [5, 0, 8], ..honest.clone() };
    refused(no_heads, KvError::InvalidConfig { field: "num_heads" });
    let unscaled = Told { dtype: DType::I8, shape: [20, 2, 8], ..honest.clone() };
    refused(unscaled, mismatch("scales of a segment", 0, 16));
    let endless = Told { num_segments: usize::MAX, ..honest.clone() };
    refused(endless, KvError::OutOfMemory { bytes: usize::MAX });
    let huge = Told { shape: [1, usize::MAX, 8], ..honest };
    let overflow =
        KvError::SizeOverflow { capacity: 1, num_heads: usize::MAX, head_dim: 8, itemsize: 4 };
    refused(huge, overflow);
}

#[test]
fn bytes_out_of_alignment_are_refused() {
    let whole = numbers(1, 2 * GROUPED.width() + 1);
    let told = Told {
        shape: [4, 2, 8],
        dtype: DType::F16,
        segments: vec![whole],
        scales: vec![],
        num_segments: 1,
        skip: 4,
        cut: 0,
    };
    assert_eq!(attend_to(Some(told.clone()), Some(told.clone())).err(), None);
    // As many bytes, at an odd address.
    let told = Told { skip: 3, cut: 1, ..told };
    let what = "bytes that a segment is out of alignment";
    let error = KvError::ShapeMismatch { what, given: 1, wanted: 0 };
    assert_eq!(attend_to(Some(told.clone()), Some(told)), Err(error));
}

#[test]
fn handles_of_both_kinds_are_attended_to_and_stale_ones_refused() {
    let shape = GROUPED;
    let keys = numbers(1, 5 * shape.width());
    let elements = numbers(2, shape.query_width());
    let (options, pool) = (Attention::default(), AttentionPool::default());
    let layer = cache::<f32>(shape, &keys, &keys);
    let wanted = attend(options, shape, &elements, &layer).unwrap();
    let mut contiguous = ContiguousKvCacheHandle::new(vec![layer]).unwrap();
    let (manager, paged) = paged::<f32>(shape, 2, &keys, &keys);
    let handles: [&dyn KvCacheHandle; 2] = [&contiguous, &paged];
    for handle in handles {
        let mut out = vec![0.0; 32];
        let query = query(shape, &elements);
        options.attend_handle(query, handle, 0, &pool, &mut out).unwrap();
        assert_eq!(out, wanted);
        let layer = options.attend_handle(query, handle, 1, &pool, &mut out);
        assert_eq!(layer, Err(KvError::LayerOutOfRange { layer: 1, num_layers: 1 }));
    }
    let span = manager.view(&paged, 0, 1, 4).unwrap();
    let context = Context::of_paged(&span).unwrap();
    assert_eq!((context.len(), context.num_heads()), (3, 2));

    contiguous.close();
    manager.free(&paged).unwrap();
    let handles: [&dyn KvCacheHandle; 2] = [&contiguous, &paged];
    for handle in handles {
        let mut out = vec![0.0; 32];
        let query = query(shape, &elements);
        let stale = options.attend_handle(query, handle, 0, &pool, &mut out);
        assert_eq!(stale, Err(KvError::StaleHandle { cache_id: handle.cache_id() }));
    }
}

#[test]
fn a_manager_without_storage_has_nothing_to_read() {
    let config =
        KvCacheManagerConfig { storage: Storage::Elsewhere, ..KvCacheManagerConfig::default() };
    let manager = KvCacheManager::new(config).unwrap();
    let handle = manager.allocate(&[1, 2], &RequestOptions::default()).unwrap();
    let elements = vec![0.0; 4 * 64];
    let query = Query::new(&elements, [1, 4, 64]).unwrap();
    let (pool, mut out) = (AttentionPool::default(), elements.clone());
    let result = Attention::default().attend_handle(query, &handle, 0, &pool, &mut out);
    assert_eq!(result, Err(KvError::NoStorage));
}
