//! Every error: the smallest call that provokes it, its numbers, its text, and that it changed
//! nothing.

mod common {
    pub(crate) mod caches;
    pub(crate) mod watchdog;
}

use std::error::Error;
use std::fmt::Debug;
use std::time::Duration;

use common::caches::{CONFIG, contents, empty, holding, keys, values, write, write_batch};
use common::watchdog::within;
use kvspan::{KVCacheConfig, KvError, LayerKvCache, Result};

const LIMIT: Duration = Duration::from_secs(10);

/// Asserts that `call` fails with `error`, which reads `text`, and leaves the cache unchanged.
fn refuses<R: Debug>(
    cache: &LayerKvCache,
    call: impl FnOnce(&LayerKvCache) -> Result<R>,
    error: &KvError,
    text: &str,
) {
    let stored = || (!cache.is_empty()).then(|| contents(cache));
    let before = (cache.nbytes(), stored());
    assert_eq!(&call(cache).expect_err("the call is refused"), error);
    assert_eq!(error.to_string(), text);
    assert_eq!((cache.nbytes(), stored()), before);
}

#[test]
fn invalid_config() {
    refuses(
        &LayerKvCache::new(KVCacheConfig { num_heads: 0, ..CONFIG }),
        |cache| cache.initialize(1),
        &KvError::InvalidConfig { field: "num_heads" },
        "num_heads must be at least 1, but it is 0",
    );
}

#[test]
fn size_overflow() {
    refuses(
        &LayerKvCache::new(KVCacheConfig { max_tokens_per_seq: usize::MAX, ..CONFIG }),
        |cache| cache.initialize(1),
        &KvError::SizeOverflow { capacity: usize::MAX, num_heads: 2, head_dim: 4, itemsize: 4 },
        &format!(
            "the size of the cache overflows: 2 x {} tokens x 2 heads x 4 elements of 4 bytes",
            usize::MAX
        ),
    );
}

/// A size that is a number, but more than any system can map, whatever it overcommits.
#[cfg(target_pointer_width = "64")]
#[test]
fn out_of_memory() {
    let config = KVCacheConfig { max_tokens_per_seq: 1 << 54, ..CONFIG };
    let cache = LayerKvCache::new(config);
    let error = KvError::OutOfMemory { bytes: 1 << 60 };
    let text = "cannot allocate 1152921504606846976 bytes";
    refuses(&cache, |cache| cache.initialize(1), &error, text);
    refuses(&cache, |cache| cache.append(&keys(&[1]), &values(&[1])), &error, text);
    refuses(&cache, |cache| cache.reserve(1), &error, text);
    refuses(&cache, LayerKvCache::prefault, &error, text);
    assert_eq!(write(&cache, 0, 1), Err(KvError::NotInitialized));
}

#[test]
fn empty_initialize() {
    let text = "cannot initialize a cache with 0 tokens: at least 1 is wanted";
    refuses(&empty(), |cache| cache.initialize(0), &KvError::EmptyInitialize, text);
    refuses(&holding(&[1]), |cache| cache.initialize(0), &KvError::EmptyInitialize, text);
}

#[test]
fn not_initialized() {
    let text = "the cache is not initialized: call initialize first";
    refuses(&empty(), |cache| write(cache, 0, 1), &KvError::NotInitialized, text);
    refuses(&empty(), |cache| write_batch(cache, &[(0, 1)]), &KvError::NotInitialized, text);
}

#[test]
fn length_mismatch() {
    let error = KvError::LengthMismatch { keys: 8, values: 7 };
    let text = "keys have 8 elements but values have 7: both must be the same";
    let row = [1.0; 8];
    refuses(&holding(&[1]), |cache| cache.write_kv(0, &row, &row[1..]), &error, text);
    refuses(&holding(&[1]), |cache| cache.append(&row, &row[1..]), &error, text);
}

#[test]
fn width_mismatch() {
    let error = KvError::WidthMismatch { given: 9, width: 8 };
    let text = "got 9 elements, but a token has 8 (num_heads x head_dim)";
    let row = [1.0; 9];
    refuses(&holding(&[1]), |cache| cache.write_kv(0, &row, &row), &error, text);
    refuses(&holding(&[1]), |cache| cache.append(&row, &row), &error, text);
}

#[test]
fn batch_entry() {
    let row = [1.0; 8];
    let source = Box::new(KvError::LengthMismatch { keys: 8, values: 7 });
    let error = KvError::BatchEntry { index: 1, source };
    refuses(
        &holding(&[2]),
        |cache| cache.write_kv_batch(&[(0, &row, &row), (0, &row, &row[1..])]),
        &error,
        "entry 1 of the batch: keys have 8 elements but values have 7: both must be the same",
    );
    let source = error.source().map(ToString::to_string);
    assert_eq!(
        source.as_deref(),
        Some("keys have 8 elements but values have 7: both must be the same")
    );
}

#[test]
fn capacity_exceeded() {
    let error = |range| KvError::CapacityExceeded { range, capacity: 16 };
    let text = "tokens 16..17 do not fit: the capacity is 16 tokens";
    refuses(&holding(&[1]), |cache| write(cache, 16, 2), &error(16..17), text);
    refuses(&holding(&[1; 16]), |cache| cache.reserve(1), &error(16..17), text);
    let text = "tokens 15..17 do not fit: the capacity is 16 tokens";
    let (k, v) = (keys(&[2; 2]), values(&[2; 2]));
    refuses(&holding(&[1; 15]), |cache| cache.append(&k, &v), &error(15..17), text);
}

#[test]
fn token_out_of_range() {
    let text = "token 1 is out of range: 1 tokens are stored";
    let error = KvError::TokenOutOfRange { token: 1, len: 1 };
    refuses(&holding(&[1]), |cache| cache.read_kv(1), &error, text);
    refuses(&holding(&[1]), |cache| cache.with_read_kv(1, |_, _| ()), &error, text);
}

#[test]
fn inverted_range() {
    let text = "the range 1..0 ends before it starts";
    let error = KvError::InvertedRange { start: 1, end: 0 };
    refuses(&holding(&[1]), |cache| cache.read_range(1, 0), &error, text);
    refuses(&holding(&[1]), |cache| cache.pin_range(1, 0), &error, text);
}

#[test]
fn range_out_of_bounds() {
    let text = "the range 0..2 is out of bounds: 1 tokens are stored";
    let error = KvError::RangeOutOfBounds { start: 0, end: 2, len: 1 };
    refuses(&holding(&[1]), |cache| cache.read_range(0, 2), &error, text);
    refuses(&holding(&[1]), |cache| cache.pin_range(0, 2), &error, text);
    let text = "the range 2..2 is out of bounds: 1 tokens are stored";
    let error = KvError::RangeOutOfBounds { start: 2, end: 2, len: 1 };
    refuses(&holding(&[1]), |cache| cache.truncate(2), &error, text);
}

#[test]
fn output_too_short() {
    for (plane, room) in [("keys", (7, 8)), ("values", (8, 7))] {
        refuses(
            &holding(&[1]),
            |cache| cache.read_range_into(0, 1, &mut vec![0.0; room.0], &mut vec![0.0; room.1]),
            &KvError::OutputTooShort { plane, given: 7, wanted: 8 },
            &format!("the buffer for the {plane} has 7 elements, but 8 are needed"),
        );
    }
}

#[test]
fn pinned() {
    let cache = holding(&[1, 2]);
    let _pins = [cache.pin_range(0, 2), cache.pin_range(1, 2)];
    let text = "tokens 1..2 can not change: 2 view(s) of them are alive";
    let error = KvError::Pinned { range: 1..2, pins: 2 };
    refuses(&cache, |cache| write(cache, 1, 9), &error, text);
    refuses(&cache, |cache| write_batch(cache, &[(3, 9), (1, 9)]), &error, text);
    refuses(&cache, |cache| cache.truncate(1), &error, text);
    let text = "tokens 0..2 can not change: 2 view(s) of them are alive";
    refuses(&cache, LayerKvCache::reset, &KvError::Pinned { range: 0..2, pins: 2 }, text);
}

#[test]
fn reserved() {
    let cache = holding(&[1]);
    let _reserved = cache.reserve(2);
    let text = "tokens 1..3 are reserved: commit or discard the reservation first";
    let error = KvError::Reserved { range: 1..3 };
    refuses(&cache, |cache| cache.append(&keys(&[2]), &values(&[2])), &error, text);
    refuses(&cache, |cache| cache.reserve(1), &error, text);
    refuses(&cache, |cache| cache.initialize(2), &error, text);
    refuses(&cache, |cache| write(cache, 1, 2), &error, text);
    refuses(&cache, |cache| write_batch(cache, &[(0, 2), (1, 2)]), &error, text);
    refuses(&cache, LayerKvCache::reset, &error, text);
}

#[test]
fn would_deadlock() {
    within(LIMIT, || {
        let text = "a read closure of this cache is running on this thread: the write would wait \
                    for it";
        let inside = |call: fn(&LayerKvCache) -> Result<()>| {
            let inside = |cache: &LayerKvCache| cache.with_read_kv(0, |_, _| call(cache))?;
            refuses(&holding(&[1, 2]), inside, &KvError::WouldDeadlock, text);
        };
        inside(|cache| write(cache, 1, 9));
        inside(|cache| write_batch(cache, &[(2, 9), (1, 9)]));
        inside(|cache| cache.truncate(1));
        inside(LayerKvCache::reset);
    });
}

#[test]
fn timeout() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let _pinned = cache.pin_range(0, 2);
        let (k, v, soon) = (keys(&[9]), values(&[9]), Duration::from_millis(1));
        let text = "timed out: tokens 1..2 are still in use by 1 view(s)";
        let error = KvError::Timeout { range: 1..2, pins: 1 };
        refuses(&cache, |cache| cache.write_kv_timeout(1, &k, &v, soon), &error, text);
        let batch = [(1, &*k, &*v), (3, &*k, &*v)];
        refuses(&cache, |cache| cache.write_kv_batch_timeout(&batch, soon), &error, text);
        refuses(&cache, |cache| cache.truncate_timeout(1, soon), &error, text);
    });
}

#[test]
fn an_error_becomes_a_string_through_the_question_mark() {
    fn first_key(cache: &LayerKvCache) -> Result<f32, String> {
        cache.initialize(1)?;
        Ok(cache.with_read_kv(1, |keys, _| keys[0])?)
    }
    let text = "token 1 is out of range: 1 tokens are stored";
    assert_eq!(first_key(&empty()), Err(text.to_owned()));
}

#[test]
fn an_error_becomes_a_boxed_error_through_the_question_mark() {
    fn first_key(cache: &LayerKvCache) -> Result<f32, Box<dyn Error + Send + Sync>> {
        Ok(cache.with_read_kv(0, |keys, _| keys[0])?)
    }
    let error = first_key(&empty()).unwrap_err();
    let error = error.downcast_ref::<KvError>();
    assert_eq!(error, Some(&KvError::TokenOutOfRange { token: 0, len: 0 }));
}
