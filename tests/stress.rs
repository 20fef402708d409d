//! All operations at once, at random, on few tokens, for as long as wanted: `KVSPAN_STRESS_OPS` is
//! the number of operations of each thread. Made for the sanitizers.

mod common {
    pub(crate) mod rng;
    pub(crate) mod stamped;
    pub(crate) mod watchdog;
}

use std::env;
use std::thread;
use std::time::Duration;

use common::rng::Rng;
use common::stamped::{self, shown};
use common::watchdog::within;
use kvspan::{
    AttentionPool, Context, Element, KVCacheConfig, KVSpan, KvError, LayerKvCache, PinnedSpan,
    Result, bf16, f16,
};

const CONFIG: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 24, num_heads: 2, hidden_dim_per_head: 24 };
const CAPACITY: usize = CONFIG.max_tokens_per_seq;
const WIDTH: usize = CONFIG.token_width();

const THREADS: u64 = 4;
const OPS: u32 = 5_000;
/// After so many operations the caches are given up, while views of them live on.
const OPS_OF_A_ROUND: u32 = 500;

/// A view, and the keys it showed when it was made.
type Pin<T> = (PinnedSpan<T>, Vec<f32>);

#[test]
fn stress_of_all_operations_at_once() {
    let ops = env::var("KVSPAN_STRESS_OPS").map_or(OPS, |ops| ops.parse().expect("a number"));
    within(Duration::from_mins(1) + Duration::from_millis(20) * ops, move || {
        for round in 0..ops.div_ceil(OPS_OF_A_ROUND) {
            let ops = ops.min(OPS_OF_A_ROUND);
            match round % 4 {
                0 => one_round::<f32>(round, ops),
                1 => one_round::<bf16>(round, ops),
                2 => one_round::<i8>(round, ops),
                _ => one_round::<f16>(round, ops),
            }
        }
    });
}

/// Leaves views, which it looks at when all caches are gone.
fn one_round<T: Element>(round: u32, ops: u32) {
    let cache = LayerKvCache::<T>::with_element(CONFIG);
    cache.initialize(1).expect("there is memory for a small cache");
    // Before there are threads: what the processor can do is found out once, in a way that
    // ThreadSanitizer does not see.
    let pool = &AttentionPool::default();
    let views = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (clone, seed) = (cache.clone(), u64::from(round) * THREADS + thread + 1);
                scope.spawn(move || one_thread(clone, pool, Rng::new(seed), ops))
            })
            .collect();
        let views = threads.into_iter().map(|thread| thread.join().expect("the thread is well"));
        views.flatten().collect::<Vec<_>>()
    });
    cache.with_read_range(0, cache.len(), check_span).expect("what is stored can be read");
    let copy = cache.deep_clone().expect("there is memory for a small cache");
    copy.reset().expect("nobody else has the copy");
    copy.initialize(CAPACITY).expect("nothing is reserved");
    let all_zero = |span: KVSpan<'_, T>| shown(span).0.iter().all(|x| x.to_bits() == 0);
    assert_eq!(copy.with_read_range(0, CAPACITY, all_zero), Ok(true));
    drop((cache, copy));
    views.iter().for_each(check_pin);
}

fn one_thread<T: Element>(
    mut cache: LayerKvCache<T>,
    pool: &AttentionPool,
    mut rng: Rng,
    ops: u32,
) -> Vec<Pin<T>> {
    let mut pins: Vec<Pin<T>> = Vec::new();
    for _ in 0..ops {
        match rng.below(21) {
            0 => cache = cache.clone(),
            1 => {
                let copy = cache.deep_clone().expect("there is memory for a small cache");
                copy.with_read_range(0, copy.len(), check_span).expect("it can be read");
            }
            2 | 3 => {
                let start = rng.below(CAPACITY);
                if let Some(view) = allowed(cache.pin_range(start, start + rng.below(4))) {
                    let (keys, _) = shown(view.span());
                    pins.push((view, keys));
                }
            }
            4 | 5 if !pins.is_empty() => drop(pins.swap_remove(rng.below(pins.len()))),
            4 | 5 => thread::yield_now(),
            6 if rng.below(4) == 0 => attempt(cache.reset()),
            6 => attempt(cache.truncate(rng.below(CAPACITY))),
            7 => attempt(cache.truncate_timeout(rng.below(CAPACITY), moment(&mut rng))),
            8 => attempt(cache.prefault()),
            9 => read_into(&cache, &mut rng),
            10..13 => read_in_closure(&cache, &mut rng),
            13 if rng.below(4) == 0 => attend(&cache, pool, &mut rng),
            _ => attempt(write(&cache, &mut rng)),
        }
        pins.truncate(3);
        pins.iter().for_each(check_pin);
    }
    pins
}

/// One of the ways to write or to grow.
fn write<T: Element>(cache: &LayerKvCache<T>, rng: &mut Rng) -> Result<()> {
    let (keys, values) = rows(rng, 3);
    let row = |n: usize| (&keys[n * WIDTH..(n + 1) * WIDTH], &values[n * WIDTH..(n + 1) * WIDTH]);
    let at = [0; 3].map(|_| rng.below(CAPACITY + 1));
    let entries = [(at[0], row(0).0, row(0).1), (at[1], row(1).0, row(1).1)];
    match rng.below(9) {
        0 => cache.initialize(at[0].max(1)),
        1 => cache.write_kv(at[0], row(0).0, row(0).1),
        2 => cache.write_kv_timeout(at[0], row(0).0, row(0).1, moment(rng)),
        3 => cache.write_kv_batch(&entries),
        4 => cache.write_kv_batch_timeout(&entries, moment(rng)),
        5 => cache.append(&keys, &values).map(drop),
        6 => cache.append(row(0).0, row(0).1).map(drop),
        7 => {
            let mut reserved = cache.reserve(3)?;
            check_span(reserved.span());
            let (all_keys, all_values) = reserved.keys_and_values_mut();
            let scale = T::scale(127.0);
            T::narrow(&keys, scale, all_keys);
            T::narrow(&values, scale, all_values);
            let (key_scales, value_scales) = reserved.scales_mut();
            key_scales.fill(scale);
            value_scales.fill(scale);
            thread::yield_now();
            check_span(reserved.span());
            reserved.commit();
            Ok(())
        }
        _ => {
            let mut dropped = cache.reserve(2)?;
            let row = [f32::NAN; 2 * WIDTH];
            T::narrow(&row, T::scale(1.0), dropped.keys_and_values_mut().0);
            dropped.scales_mut().0.fill(T::scale(1.0));
            Ok(())
        }
    }
}

fn read_in_closure<T: Element>(cache: &LayerKvCache<T>, rng: &mut Rng) {
    let start = rng.below(cache.len().max(1));
    let read = cache.with_read_range(start, start + rng.below(4), |span| {
        check_span(span);
        let (keys, values) = shown(span);
        let refused = cache.write_kv(start, &keys[..0], &keys[..0]);
        assert_eq!(refused, Err(KvError::WidthMismatch { given: 0, width: WIDTH }));
        if !span.is_empty() {
            let row = (&keys[..WIDTH], &values[..WIDTH]);
            assert_eq!(cache.write_kv(start, row.0, row.1), Err(KvError::WouldDeadlock));
            attempt(cache.append(row.0, row.1));
            attempt(cache.pin_range(start, start + 1));
        }
        assert_eq!(shown(span).0, keys, "what a closure reads changed");
    });
    attempt(read);
}

/// Attends to tokens that are pinned, while others write beside them.
fn attend<T: Element>(cache: &LayerKvCache<T>, pool: &AttentionPool, rng: &mut Rng) {
    let start = rng.below(cache.len().max(1));
    if let Some(pinned) = allowed(cache.pin_range(start, start + 1 + rng.below(4))) {
        let context = Context::of_span(pinned.span()).expect("the span is as it was made");
        let shape = [1, CONFIG.num_heads, CONFIG.hidden_dim_per_head];
        stamped::attend(&context, shape, pool);
    }
}

fn read_into<T: Element>(cache: &LayerKvCache<T>, rng: &mut Rng) {
    let (mut keys, mut values) = rows(rng, 3);
    let start = rng.below(CAPACITY);
    if allowed(cache.read_range_into(start, start + 2, &mut keys, &mut values)).is_some() {
        check_rows(&keys, &values);
    }
}

fn rows(rng: &mut Rng, count: usize) -> (Vec<f32>, Vec<f32>) {
    stamped::rows(rng, count, WIDTH)
}

fn moment(rng: &mut Rng) -> Duration {
    Duration::from_micros([0, 20, 200][rng.below(3)])
}

fn check_rows(keys: &[f32], values: &[f32]) {
    stamped::check_rows(keys, values, WIDTH);
}

fn check_span<T: Element>(span: KVSpan<'_, T>) {
    let (keys, values) = shown(span);
    check_rows(&keys, &values);
}

fn check_pin<T: Element>((view, then): &Pin<T>) {
    check_span(view.span());
    assert_eq!(&shown(view.span()).0, then, "a view changed");
}

/// Lets a call fail for what other threads do meanwhile.
fn attempt<R>(result: Result<R>) {
    let _ = allowed(result);
}

/// The value of a call, unless it was refused for what other threads do meanwhile.
fn allowed<R>(result: Result<R>) -> Option<R> {
    match result {
        Ok(value) => Some(value),
        Err(
            KvError::Pinned { .. }
            | KvError::Reserved { .. }
            | KvError::Timeout { .. }
            | KvError::CapacityExceeded { .. }
            | KvError::RangeOutOfBounds { .. },
        ) => None,
        Err(KvError::BatchEntry { source, .. }) => allowed(Err(*source)),
        Err(other) => panic!("{other}"),
    }
}
