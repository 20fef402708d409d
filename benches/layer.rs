//! What one layer's cache costs.
//!
//! ```text
//! cargo bench                        # all groups; about three minutes
//! cargo bench -- closure_read        # one group
//! cargo bench -- --test              # each benchmark once, to see that it works
//! ```
//!
//! | group | question |
//! |---|---|
//! | `closure_read` | What does a closure cost beyond the reading it does? |
//! | `write_warm` | What does it cost to overwrite a token whose memory is in use? |
//! | `write_first_touch` | What does a token cost that is the first in its memory? |
//! | `append_1`, `append_256` | What does it cost to append, token by token and a prompt at once? |
//! | `write_batch_64` | Does it matter whether the tokens of a batch lie together? |
//! | `read_range_into` | What does a copy cost? |
//! | `pin_unpin` | What does a view cost, and do the views that live already matter? |
//! | `overwrite_with_pins` | How much do live views of other tokens slow an overwrite down? |
//! | `reserve_commit` | What does it cost to compute in place instead of copying? |
//! | `prefault` | How much faster than by touching it does memory come? |
//! | `readers_beside_an_appender` | How much do readers get done while a decode loop appends? |
//! | `sum_1024_tokens_two_threads` | Do readers slow each other down? |
//!
//! The data is not zero, which some machines move faster. Rows are hot, unless the group's name
//! says otherwise. Making and dropping a cache is never in what is timed. A number for several
//! threads is the time in which each of them does its share, so that perfect scaling is the same
//! time with twice the throughput. The crate whose API this one follows is measured beside it in
//! `benches/peer`.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvspan::{KVCacheConfig, LayerKvCache, PinnedSpan};

const DEFAULT: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 8192, num_heads: 4, hidden_dim_per_head: 64 };
const WIDE: KVCacheConfig =
    KVCacheConfig { max_tokens_per_seq: 2048, num_heads: 32, hidden_dim_per_head: 128 };
/// 256 MiB, keys and values together.
const LARGE: KVCacheConfig = KVCacheConfig { max_tokens_per_seq: 131_072, ..DEFAULT };

/// What calls for one token read and write.
const TOKEN: usize = 128;
const BATCH: usize = 64;
/// Tokens that a reader sums beside others: 2 MiB.
const CONTEXT: usize = 1024;
/// Tokens at a time, and how many times before the cache is emptied again, so that rows stay hot.
const GROWTH: [(usize, u64); 2] = [(1, 256), (256, 1)];
/// How often the appender beside the readers appends, as a decode loop would.
const APPEND_EVERY: Duration = Duration::from_micros(50);
const SMALL_PAGE: usize = 4096;

fn closure_read(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("closure_read");
    group.bench_function("touch_nothing", |b| {
        b.iter(|| {
            let read = cache.with_read_kv(black_box(TOKEN), |keys, values| {
                black_box((keys.as_ptr(), values.as_ptr(), values.len()));
            });
            read.expect("the token is stored");
        });
    });
    for tokens in [1, 64, 1024] {
        group.throughput(bytes(DEFAULT, tokens));
        group.bench_function(BenchmarkId::new("sum", tokens), |b| {
            b.iter(|| sum_tokens(&cache, black_box(tokens)));
        });
    }
}

fn write_warm(c: &mut Criterion) {
    let mut group = c.benchmark_group("write_warm");
    for config in [DEFAULT, WIDE] {
        let cache = filled(config);
        let row = numbers(config.token_width());
        group.throughput(bytes(config, 1));
        group.bench_function(shape(config), |b| {
            b.iter(|| write_token(&cache, black_box(TOKEN), black_box(&row)));
        });
    }
}

fn write_first_touch(c: &mut Criterion) {
    let mut group = c.benchmark_group("write_first_touch");
    group.sample_size(20);
    for config in [DEFAULT, WIDE] {
        let row = numbers(config.token_width());
        group.throughput(bytes(config, config.max_tokens_per_seq));
        group.bench_function(BenchmarkId::new("fill", shape(config)), |b| {
            b.iter_batched_ref(
                || initialized(config),
                |cache| {
                    for token in 0..config.max_tokens_per_seq {
                        write_token(cache, token, black_box(&row));
                    }
                },
                BatchSize::PerIteration,
            );
        });
    }
}

fn append(c: &mut Criterion) {
    for (tokens, times) in GROWTH {
        let cache = filled(DEFAULT);
        let rows = numbers(tokens * DEFAULT.token_width());
        let mut group = c.benchmark_group(format!("append_{tokens}"));
        group.throughput(bytes(DEFAULT, tokens));
        group.bench_function(shape(DEFAULT), |b| {
            b.iter_custom(|calls| {
                time_in_chunks(
                    calls,
                    times,
                    || cache.reset().expect("nobody has a view"),
                    || {
                        let range = cache.append(black_box(&rows), black_box(&rows));
                        black_box(range.expect("there is room"));
                    },
                )
            });
        });
    }
}

fn write_batch_64(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let rows = numbers(BATCH * DEFAULT.token_width());
    let mut group = c.benchmark_group("write_batch_64");
    group.throughput(bytes(DEFAULT, BATCH));
    for (name, step) in [("contiguous", 1), ("scattered", 31)] {
        let row = |(index, row)| (TOKEN + index * step, row, row);
        let entries =
            rows.chunks_exact(DEFAULT.token_width()).enumerate().map(row).collect::<Vec<_>>();
        group.bench_function(name, |b| {
            b.iter(|| cache.write_kv_batch(black_box(&entries)).expect("nobody has a view"));
        });
    }
}

fn read_range_into(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("read_range_into");
    for tokens in [1, 256] {
        let mut keys = numbers(tokens * DEFAULT.token_width());
        let mut values = keys.clone();
        group.throughput(bytes(DEFAULT, tokens));
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
            b.iter(|| {
                let read = cache.read_range_into(TOKEN, TOKEN + tokens, &mut keys, &mut values);
                read.expect("the tokens are stored");
                black_box((&keys, &values));
            });
        });
    }
}

fn pin_unpin(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("pin_unpin");
    for others in [0, 16, 256] {
        let _pins = pins_of_other_tokens(&cache, others);
        group.bench_function(BenchmarkId::new("others", others), |b| {
            b.iter(|| drop(black_box(cache.pin_range(0, TOKEN).expect("the tokens are stored"))));
        });
    }
}

fn overwrite_with_pins(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let row = numbers(DEFAULT.token_width());
    let mut group = c.benchmark_group("overwrite_with_pins");
    for others in [0, 16, 256] {
        let _pins = pins_of_other_tokens(&cache, others);
        group.bench_function(BenchmarkId::new("others", others), |b| {
            b.iter(|| write_token(&cache, black_box(TOKEN), black_box(&row)));
        });
    }
}

/// The rows were in use before and have to be zeroed, as for every sequence but a cache's first.
fn reserve_commit(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("reserve_commit");
    for (tokens, times) in GROWTH {
        group.throughput(bytes(DEFAULT, tokens));
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
            b.iter_custom(|calls| {
                time_in_chunks(
                    calls,
                    times,
                    || cache.reset().expect("nobody has a view"),
                    || {
                        let mut rows = cache.reserve(tokens).expect("there is room");
                        let (keys, values) = rows.keys_and_values_mut();
                        keys.fill(black_box(1.5));
                        values.fill(black_box(2.5));
                        black_box(rows.commit());
                    },
                )
            });
        });
    }
}

fn prefault(c: &mut Criterion) {
    let mut group = c.benchmark_group("prefault");
    group.sample_size(10).throughput(bytes(LARGE, LARGE.max_tokens_per_seq));
    group.bench_function("prefault", |b| {
        b.iter_batched_ref(
            || LayerKvCache::new(LARGE),
            |cache| cache.prefault().expect("there is memory"),
            BatchSize::PerIteration,
        );
    });
    let row = numbers(LARGE.token_width());
    group.bench_function("first_touch_by_writes", |b| {
        b.iter_batched_ref(
            || initialized(LARGE),
            |cache| {
                for token in 0..LARGE.max_tokens_per_seq {
                    write_token(cache, token, black_box(&row));
                }
            },
            BatchSize::PerIteration,
        );
    });
    // What a cache in plain memory would pay, unless the system makes huge pages unasked.
    group.bench_function("first_touch_of_a_plain_vec", |b| {
        b.iter_batched_ref(
            || vec![0.0_f32; 2 * LARGE.max_tokens_per_seq * LARGE.token_width()],
            |elements| {
                for page in elements.chunks_mut(SMALL_PAGE / size_of::<f32>()) {
                    black_box(page)[0] = 1.5;
                }
            },
            BatchSize::PerIteration,
        );
    });
}

fn readers_beside_an_appender(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("readers_beside_an_appender");
    for readers in [1, 2, 4] {
        group.throughput(bytes(DEFAULT, readers * CONTEXT));
        group.bench_function(BenchmarkId::new("readers", readers), |b| {
            b.iter_custom(|calls| {
                beside_an_appender(&cache, || {
                    time_on_threads(readers, calls, || sum_tokens(&cache, CONTEXT))
                })
            });
        });
    }
}

fn sum_1024_tokens_two_threads(c: &mut Criterion) {
    let cache = filled(DEFAULT);
    let mut group = c.benchmark_group("sum_1024_tokens_two_threads");
    for threads in [1, 2] {
        group.throughput(bytes(DEFAULT, threads * CONTEXT));
        group.bench_function(BenchmarkId::new("threads", threads), |b| {
            b.iter_custom(|calls| time_on_threads(threads, calls, || sum_tokens(&cache, CONTEXT)));
        });
    }
}

/// A cache that is full.
fn filled(config: KVCacheConfig) -> LayerKvCache {
    let cache = LayerKvCache::new(config);
    let row = numbers(config.token_width());
    for token in 0..config.max_tokens_per_seq {
        assert_eq!(cache.append(&row, &row), Ok(token..token + 1));
    }
    let read = cache.read_kv(config.max_tokens_per_seq - 1).expect("the token is stored");
    assert_eq!((&read.keys, &read.values), (&row, &row));
    cache
}

/// A cache whose memory nobody has touched.
fn initialized(config: KVCacheConfig) -> LayerKvCache {
    let cache = LayerKvCache::new(config);
    cache.initialize(1).expect("there is memory");
    cache
}

fn pins_of_other_tokens(cache: &LayerKvCache, count: usize) -> Vec<PinnedSpan> {
    let pin = |token| cache.pin_range(token, token + 8).expect("the tokens are stored");
    (2 * TOKEN..2 * TOKEN + count).map(pin).collect()
}

fn write_token(cache: &LayerKvCache, token: usize, row: &[f32]) {
    cache.write_kv(token, row, row).expect("nobody has a view of the token");
}

fn sum_tokens(cache: &LayerKvCache, tokens: usize) {
    let sum = cache.with_read_range(0, tokens, |span| sum(span.keys) + sum(span.values));
    black_box(sum.expect("the tokens are stored"));
}

/// Sums in as many lanes as the registers hold, so that memory is what limits it.
fn sum(elements: &[f32]) -> f32 {
    let (chunks, rest) = elements.as_chunks::<32>();
    let mut lanes = [0.0; 32];
    for chunk in chunks {
        for (lane, element) in lanes.iter_mut().zip(chunk) {
            *lane += element;
        }
    }
    lanes.iter().chain(rest).sum()
}

fn numbers(len: usize) -> Vec<f32> {
    (1..=251_u8).map(f32::from).cycle().take(len).collect()
}

fn shape(config: KVCacheConfig) -> String {
    format!("{}x{}", config.num_heads, config.hidden_dim_per_head)
}

/// The keys and the values of `tokens` tokens.
fn bytes(config: KVCacheConfig, tokens: usize) -> Throughput {
    let bytes = 2 * tokens * config.token_width() * size_of::<f32>();
    Throughput::Bytes(bytes.try_into().expect("a size fits 64 bits"))
}

/// Times `calls` calls, with `prepare`, which is not timed, before every `chunk` of them.
fn time_in_chunks(calls: u64, chunk: u64, prepare: impl Fn(), call: impl Fn()) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = calls;
    while left > 0 {
        let now = left.min(chunk);
        prepare();
        let start = Instant::now();
        (0..now).for_each(|_| call());
        total += start.elapsed();
        left -= now;
    }
    total
}

/// The time until each of `threads` threads has made `calls` calls.
fn time_on_threads(threads: usize, calls: u64, call: impl Fn() + Sync) -> Duration {
    let start = Barrier::new(threads + 1);
    thread::scope(|scope| {
        let work = || {
            start.wait();
            (0..calls).for_each(|_| call());
        };
        let workers = (0..threads).map(|_| scope.spawn(work)).collect::<Vec<_>>();
        start.wait();
        let begin = Instant::now();
        for worker in workers {
            worker.join().expect("a reader does not fail");
        }
        begin.elapsed()
    })
}

/// Runs `timed` while another thread appends token after token behind the first [`CONTEXT`].
fn beside_an_appender(cache: &LayerKvCache, timed: impl FnOnce() -> Duration) -> Duration {
    let row = numbers(cache.config.token_width());
    thread::scope(|scope| {
        // Dropping the sender, be it by a panic, ends the appender.
        let (_stop, stopped) = channel::<()>();
        scope.spawn(move || {
            while stopped.recv_timeout(APPEND_EVERY) == Err(RecvTimeoutError::Timeout) {
                if cache.len() == cache.capacity() {
                    cache.truncate(CONTEXT).expect("nobody has a view");
                }
                cache.append(&row, &row).expect("there is room");
            }
        });
        timed()
    })
}

criterion_group! {
    name = layer;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets =
        closure_read,
        write_warm,
        write_first_touch,
        append,
        write_batch_64,
        read_range_into,
        pin_unpin,
        overwrite_with_pins,
        reserve_commit,
        prefault,
        readers_beside_an_appender,
        sum_1024_tokens_two_threads
}
criterion_main!(layer);
