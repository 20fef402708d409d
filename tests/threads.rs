//! What several threads see when they read and write at once.

mod common {
    pub(crate) mod caches;
    pub(crate) mod rng;
    pub(crate) mod watchdog;
}

use std::iter::repeat_with;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use common::caches::{CONFIG, contents, empty, holding, keys, tokens, values, write, write_batch};
use common::rng::Rng;
use common::watchdog::within;
use kvspan::{KVCacheConfig, KVSpan, KvError, LayerKvCache, Result};

const LIMIT: Duration = Duration::from_secs(30);

// Tearing

/// Tokens so wide that to copy one takes a while, and to copy all of them more than a thread's turn
/// on a busy core.
const WIDE: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 128, num_heads: 64, hidden_dim_per_head: 256 };
const WIDTH: usize = WIDE.token_width();

/// Pairs of tokens that are overwritten; what is appended follows.
const PAIRS: usize = 2;

/// Whether all elements are the same, as they are in what one call writes. Looks at some.
fn is_whole(elements: &[f32]) -> bool {
    let all_but_few = elements.iter().step_by(61).chain(elements.last());
    all_but_few.map(|x| x.to_bits()).all(|bits| bits == elements[0].to_bits())
}

fn is_whole_pair(keys: &[f32], values: &[f32]) -> bool {
    is_whole(keys) && is_whole(values) && is_whole(&[keys[0], values[0]])
}

/// A row for each of a few numbers.
fn rows() -> Vec<Vec<f32>> {
    (1..8).map(|stamp| vec![number(stamp); WIDTH]).collect()
}

/// Raises a flag when it is dropped, and so after a panic too.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn no_reader_sees_a_torn_row_or_half_a_batch() {
    within(LIMIT, || {
        let cache = LayerKvCache::new(WIDE);
        cache.initialize(2 * PAIRS).unwrap();
        let counts: [_; 4] = [0; 4].map(AtomicUsize::new);
        let enough = || counts.iter().all(|count| count.load(Relaxed) >= 500);
        let one_is_over = AtomicBool::new(false);
        let repeat = |number: usize, act: &(dyn Fn(&mut Rng) -> bool + Sync)| {
            let (_raise, mut rng) = (Raise(&one_is_over), Rng::new(1));
            while !enough() && !one_is_over.load(SeqCst) {
                counts[number].fetch_add(usize::from(act(&mut rng)), Relaxed);
            }
        };
        let rows = rows();
        let overwrite = |rng: &mut Rng| {
            let (at, row) = (2 * rng.below(PAIRS), &rows[rng.below(rows.len())]);
            match cache.write_kv_batch(&[(at, row, row), (at + 1, row, row)]) {
                Err(KvError::Pinned { .. }) => false,
                written => written.is_ok() || panic!("{written:?}"),
            }
        };
        let read_in_closure = |rng: &mut Rng| {
            let len = cache.len();
            assert!(len.is_multiple_of(2), "half of an append is visible");
            let at = 2 * rng.below(len / 2);
            let check = |span: KVSpan<'_>| is_whole_pair(span.keys, span.values);
            assert!(cache.with_read_range(at, at + 2, check).unwrap(), "a closure saw it");
            assert!(cache.len() >= len, "the length fell");
            true
        };
        let copy = |rng: &mut Rng| {
            let (mut keys, mut values) = (vec![0.5; 2 * WIDTH], vec![0.5; 2 * WIDTH]);
            let at = 2 * rng.below(PAIRS);
            cache.read_range_into(at, at + 2, &mut keys, &mut values).unwrap();
            assert!(is_whole_pair(&keys, &values), "a copy has it");
            true
        };
        let view = |rng: &mut Rng| {
            let at = 2 * rng.below(PAIRS);
            let view = cache.pin_range(at, at + 2).unwrap();
            let then = view.values().to_vec();
            thread::yield_now();
            assert!(is_whole_pair(view.keys(), view.values()), "a view saw it");
            assert!(is_whole_pair(view.values(), &then), "a view changed");
            true
        };
        thread::scope(|scope| {
            let repeat = &repeat;
            scope.spawn(move || repeat(0, &overwrite));
            scope.spawn(move || repeat(1, &read_in_closure));
            scope.spawn(move || repeat(2, &copy));
            scope.spawn(move || repeat(3, &view));
            for stamp in (PAIRS..WIDE.max_tokens_per_seq / 2).map(number) {
                let pair = vec![stamp; 2 * WIDTH];
                cache.append(&pair, &pair).unwrap();
                thread::yield_now();
            }
        });
        assert_eq!(cache.len(), WIDE.max_tokens_per_seq);
    });
}

/// The same writes and the same check around memory that nothing protects, to show that the check
/// finds a torn write when there is one.
#[test]
fn readers_of_unprotected_memory_do_see_torn_writes() {
    within(LIMIT, || {
        let pair: Vec<_> = repeat_with(AtomicU32::default).take(2 * WIDTH).collect();
        let torn = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for stamp in (1..).map(number).take_while(|_| !torn.load(Relaxed)) {
                    for element in &pair {
                        element.store(stamp.to_bits(), Relaxed);
                    }
                }
            });
            while !torn.load(Relaxed) {
                let load = |element: &AtomicU32| f32::from_bits(element.load(Relaxed));
                let seen: Vec<_> = pair.iter().map(load).collect();
                torn.store(!is_whole(&seen), Relaxed);
            }
        });
    });
}

/// A reader that looks as soon as the length moves, at what is copied last.
#[test]
fn new_tokens_are_complete_when_the_length_shows_them() {
    const TOKENS: usize = WIDE.max_tokens_per_seq;
    const ROUNDS: usize = 20;
    type Grow = fn(&LayerKvCache, &[f32]) -> Result<()>;
    /// Whether the tokens are then the rows, or else zeros over what other rounds left behind.
    type Shows = bool;
    let ways: [(Grow, Shows); 4] = [
        (|cache, rows| cache.append(rows, rows).map(drop), true),
        (
            |cache, rows| {
                let rows = (0..).zip(rows.chunks(WIDTH));
                let entries: Vec<_> = rows.map(|(at, row)| (at, row, row)).collect();
                cache.write_kv_batch(&entries)
            },
            true,
        ),
        (
            |cache, rows| {
                let mut reserved = cache.reserve(TOKENS)?;
                let (keys, values) = reserved.keys_and_values_mut();
                keys.copy_from_slice(rows);
                values.copy_from_slice(rows);
                reserved.commit();
                Ok(())
            },
            true,
        ),
        (|cache, _| cache.initialize(TOKENS), false),
    ];
    within(LIMIT, move || {
        let cache = LayerKvCache::new(WIDE);
        cache.prefault().unwrap();
        let ((start, starts), (saw, sightings)) = (mpsc::channel(), mpsc::channel());
        thread::scope(|scope| {
            scope.spawn(|| {
                for () in starts {
                    while cache.is_empty() {
                        thread::yield_now();
                    }
                    let ends = |span: KVSpan<'_>| {
                        let last = TOKENS * WIDTH - 1;
                        [span.values[last], span.keys[last], span.keys[0]].map(f32::to_bits)
                    };
                    saw.send(cache.with_read_range(0, TOKENS, ends)).unwrap();
                }
            });
            let both: [Vec<f32>; 2] = [1, 2].map(|stamp| vec![number(stamp); TOKENS * WIDTH]);
            let rounds = (0..ROUNDS).flat_map(|_| ways).zip(both.iter().cycle());
            for ((grow, shows), rows) in rounds {
                cache.reset().unwrap();
                start.send(()).unwrap();
                grow(&cache, rows).unwrap();
                let expected = if shows { rows[0].to_bits() } else { 0 };
                assert_eq!(sightings.recv().unwrap(), Ok([expected; 3]));
            }
            drop(start);
        });
    });
}

/// One that did not wait for the write would see its beginning, and not yet its end.
#[test]
fn a_view_is_never_made_in_the_middle_of_a_write() {
    within(LIMIT, || {
        let cache = LayerKvCache::new(WIDE);
        cache.initialize(1).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _raise = Raise(&over);
                for _ in 0..20_000 {
                    let view = cache.pin_range(0, 1).unwrap();
                    let ends = [view.values()[WIDTH - 1], view.keys()[0]];
                    assert!(is_whole(&ends), "{ends:?}");
                }
            });
            for row in rows().iter().cycle().take_while(|_| !over.load(SeqCst)) {
                let written = cache.write_kv(0, row, row);
                assert!(matches!(written, Ok(()) | Err(KvError::Pinned { .. })), "{written:?}");
            }
        });
    });
}

fn number(stamp: usize) -> f32 {
    u16::try_from(stamp % (1 << 16)).map(f32::from).expect("it fits")
}

// What was written is there

#[test]
fn threads_that_write_before_initialize_fail_until_it_is_done() {
    within(LIMIT, || {
        for _ in 0..50 {
            let cache = empty();
            let start = Barrier::new(4);
            thread::scope(|scope| {
                let writes: [fn(&LayerKvCache) -> Result<()>; 2] =
                    [|cache| write(cache, 4, 7), |cache| write_batch(cache, &[(5, 8), (3, 6)])];
                for write in writes {
                    let (cache, start) = (&cache, &start);
                    scope.spawn(move || {
                        start.wait();
                        while let Err(error) = write(cache) {
                            assert_eq!(error, KvError::NotInitialized);
                            thread::yield_now();
                        }
                    });
                }
                for seq_len in [2, 3] {
                    let (cache, start) = (&cache, &start);
                    scope.spawn(move || {
                        start.wait();
                        cache.initialize(seq_len).unwrap();
                    });
                }
            });
            assert_eq!(contents(&cache), [0, 0, 0, 6, 7, 8]);
        }
    });
}

#[test]
fn concurrent_appends_get_ranges_of_their_own() {
    within(LIMIT, || {
        for _ in 0..50 {
            let cache = empty();
            let start = Barrier::new(4);
            let append = |token: u8| {
                start.wait();
                let appended =
                    (0..2).map(|_| cache.append(&keys(&[token; 2]), &values(&[token; 2])));
                appended.map(|range| (range.unwrap(), token)).collect::<Vec<_>>()
            };
            let ranges: Vec<_> = thread::scope(|scope| {
                let append = &append;
                let threads = [1, 2, 3, 4].map(|token| scope.spawn(move || append(token)));
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let stored = contents(&cache);
            assert_eq!(stored.len(), CONFIG.max_tokens_per_seq);
            for (range, token) in ranges {
                assert_eq!(stored[range], [token; 2]);
            }
        }
    });
}

#[test]
fn eight_threads_read_what_was_written() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3, 4, 5, 6, 7, 8]);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let read = |token| cache.read_kv(token).unwrap();
                    let read: Vec<_> = (0..8).map(read).collect();
                    let tokens = read.iter().map(|entry| tokens(&entry.keys, &entry.values)[0]);
                    assert_eq!(tokens.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
                });
            }
        });
    });
}

/// Readers of the whole cache beside an appender: the length never falls, and whatever is below it
/// has its final value.
#[test]
fn what_is_below_the_length_is_complete() {
    within(LIMIT, || {
        for _ in 0..50 {
            let cache = empty();
            cache.initialize(1).unwrap();
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let mut len = 1;
                        while len < CONFIG.max_tokens_per_seq {
                            let seen = contents(&cache);
                            assert!(seen.len() >= len, "the length fell");
                            assert!(seen.iter().copied().eq((0..16).take(seen.len())));
                            len = seen.len();
                        }
                    });
                }
                for token in 1..16 {
                    cache.append(&keys(&[token]), &values(&[token])).unwrap();
                }
            });
        }
    });
}

/// A reservation ends and its tokens appear in one step.
#[test]
fn who_sees_committed_tokens_can_append() {
    within(LIMIT, || {
        let narrow =
            KVCacheConfig { max_tokens_per_seq: 2000, num_heads: 1, hidden_dim_per_head: 1 };
        let cache = LayerKvCache::new(narrow);
        for _ in 0..narrow.max_tokens_per_seq / 2 {
            let (len, rows) = (cache.len(), cache.reserve(1).unwrap());
            thread::scope(|scope| {
                let next = scope.spawn(|| {
                    while cache.len() == len {
                        std::hint::spin_loop();
                    }
                    cache.append(&[1.0], &[1.0])
                });
                rows.commit();
                assert_eq!(next.join().unwrap(), Ok(len + 1..len + 2));
            });
        }
    });
}
