//! Layer caches beside the crate whose API they follow, `ghostlink-core`.
//!
//! What does each shared call cost beside the original's? What do several readers get done beside one
//! writer, and how long does that writer wait? How well does kvspan's own closure read scale from one
//! thread to two?

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::{Cache, Shape, filled, numbers, sum};
use crate::report::{self, Target};
use crate::timing::{Pace, interleave, nanos, nanos_per_call, quantile, repeated};
use ghostlink_core::LayerKvCache as Peer;
use kvspan::LayerKvCache as Ours;

const DEFAULT: Shape = Shape { name: "8192x4x64", capacity: 8192, heads: 4, head_dim: 64 };
const MIDDLE: Shape = Shape { name: "4096x8x128", capacity: 4096, heads: 8, head_dim: 128 };
const WIDE: Shape = Shape { name: "2048x32x128", capacity: 2048, heads: 32, head_dim: 128 };

/// What calls for one token read and write, as in the original's own benchmark.
const TOKEN: usize = 128;
const BATCH: usize = 64;
/// How often the writer beside the readers writes: as a decode loop, not as fast as it can.
const WRITE_EVERY: Duration = Duration::from_micros(50);

/// Prints all rows.
pub fn run(pace: Pace) {
    for shape in [DEFAULT, MIDDLE, WIDE] {
        one_thread(pace, shape);
        first_touch(pace, shape);
    }
    // 2 MiB fit the caches of a core or nearly; 8 MiB come from the last level.
    readers_beside_a_writer(pace, DEFAULT, 1024);
    readers_beside_a_writer(pace, WIDE, 256);
    gain_of_two_threads(pace, DEFAULT, 1024);
}

/// The calls one by one, on one thread, over rows that are hot.
fn one_thread(pace: Pace, shape: Shape) {
    let (ours, peer) = (filled::<Ours>(shape), filled::<Peer>(shape));
    let (a, b) = (&ours, &peer);
    report::header(&format!("one thread, {}", shape.name));
    let table = Table { pace, shape };
    table.row("closure_touch_nothing", touch_nothing(a), touch_nothing(b), Target::AtMost(0.6));
    table.row("closure_sum_1", sum_one(a), sum_one(b), Target::None);
    table.row("closure_sum_64", sum_range(a, 64), sum_range(b, 64), Target::None);
    table.row("closure_sum_1024", sum_range(a, 1024), sum_range(b, 1024), Target::None);
    table.row("write_kv_warm", overwrite(a, shape), overwrite(b, shape), Target::None);
    table.row("write_kv_batch_64", write_batch(a, shape), write_batch(b, shape), Target::None);
    table.row("read_range_into_1", copy_out(a, shape, 1), copy_out(b, shape, 1), Target::None);
    table.row(
        "read_range_into_256",
        copy_out(a, shape, 256),
        copy_out(b, shape, 256),
        Target::None,
    );
}

struct Table {
    pace: Pace,
    shape: Shape,
}

impl Table {
    fn row(&self, name: &str, ours: impl FnMut(), peer: impl FnMut(), target: Target) {
        let (mut ours, mut peer) = (repeated(self.pace, ours), repeated(self.pace, peer));
        let samples = interleave(self.pace.rounds, [&mut ours, &mut peer]);
        report::beside(&format!("{name}/{}", self.shape.name), samples, target);
    }
}

fn touch_nothing<C: Cache>(cache: &C) -> impl FnMut() {
    || {
        cache.with_read_kv(black_box(TOKEN), |keys, values| {
            black_box((keys.as_ptr(), values.as_ptr(), values.len()));
        });
    }
}

fn sum_one<C: Cache>(cache: &C) -> impl FnMut() {
    || {
        black_box(cache.with_read_kv(black_box(TOKEN), |keys, values| sum(keys) + sum(values)));
    }
}

fn sum_range<C: Cache>(cache: &C, tokens: usize) -> impl Fn() {
    move || {
        black_box(cache.with_read_range(black_box(tokens), |keys, values| sum(keys) + sum(values)));
    }
}

fn overwrite<C: Cache>(cache: &C, shape: Shape) -> impl FnMut() {
    let (keys, values) = (numbers(shape.width(), 1), numbers(shape.width(), 2));
    move || cache.write_kv(black_box(TOKEN), black_box(&keys), black_box(&values))
}

fn write_batch<C: Cache>(cache: &C, shape: Shape) -> impl FnMut() {
    let rows = numbers(BATCH * shape.width(), 1);
    move || {
        let mut entries = [(0, [].as_slice(), [].as_slice()); BATCH];
        for ((token, entry), row) in entries.iter_mut().enumerate().zip(rows.chunks(shape.width()))
        {
            *entry = (TOKEN + token, row, row);
        }
        cache.write_kv_batch(black_box(&entries));
    }
}

fn copy_out<C: Cache>(cache: &C, shape: Shape, tokens: usize) -> impl FnMut() {
    let len = tokens * shape.width();
    let (mut keys, mut values) = (numbers(len, 1), numbers(len, 1));
    move || {
        cache.read_range_into(black_box(tokens), &mut keys, &mut values);
        black_box((&*keys, &*values));
    }
}

/// Writing token after token into memory that nobody has touched, until the cache is full.
fn first_touch(pace: Pace, shape: Shape) {
    // So large that the allocator always asks the system for fresh memory.
    let roomy = Shape { capacity: shape.capacity.max((64 << 20) / (shape.width() * 4)), ..shape };
    let samples = interleave(
        pace.threaded_rounds,
        [&mut || fill::<Ours>(roomy, shape), &mut || fill::<Peer>(roomy, shape)],
    );
    report::beside(&format!("write_kv_first_touch/{}", shape.name), samples, Target::None);
}

fn fill<C: Cache>(roomy: Shape, shape: Shape) -> f64 {
    let row = numbers(shape.width(), 1);
    let cache = C::empty(roomy);
    cache.initialize(1);
    let start = Instant::now();
    for token in 0..shape.capacity {
        cache.write_kv(token, black_box(&row), black_box(&row));
    }
    nanos(start.elapsed()) / shape.capacity as f64
}

/// Readers that sum the first `tokens` tokens over and over, while one writer appends behind them.
fn readers_beside_a_writer(pace: Pace, shape: Shape, tokens: usize) {
    let (ours, peer) = (filled::<Ours>(shape), filled::<Peer>(shape));
    report::header(&format!("readers that sum {tokens} tokens beside a writer, {}", shape.name));
    for readers in [1, 2, 4] {
        let mut ours = || read_and_append(pace, &ours, shape, tokens, readers);
        let mut peer = || read_and_append(pace, &peer, shape, tokens, readers);
        let [ours, peer] = interleave(pace.threaded_rounds, [&mut ours, &mut peer]);
        let each =
            |what: fn(&Sample) -> f64| [&ours, &peer].map(|side| side.iter().map(what).collect());
        let row = |what: &str| format!("{readers}_readers_beside_a_writer_{what}/{}", shape.name);
        report::beside(&row("sum"), each(|sample| sample.read), Target::None);
        report::beside(&row("write_median"), each(|sample| sample.write_median), Target::None);
        report::beside(&row("write_p99"), each(|sample| sample.write_p99), Target::None);
    }
}

/// Nanoseconds per sum, all readers together, and of one write.
struct Sample {
    read: f64,
    write_median: f64,
    write_p99: f64,
}

fn read_and_append<C: Cache>(
    pace: Pace,
    cache: &C,
    shape: Shape,
    tokens: usize,
    readers: usize,
) -> Sample {
    cache.shorten(tokens);
    let row = numbers(shape.width(), 1);
    let append_until = |stop: &AtomicBool| {
        let mut latencies = Vec::new();
        for token in tokens..shape.capacity {
            let start = Instant::now();
            cache.write_kv(token, &row, &row);
            latencies.push(nanos(start.elapsed()));
            if stop.load(Ordering::Relaxed) {
                break;
            }
            thread::sleep(WRITE_EVERY);
        }
        latencies
    };
    let (read, writes) = nanos_per_call(pace, readers, sum_range(cache, tokens), append_until);
    Sample { read, write_median: quantile(writes.clone(), 0.5), write_p99: quantile(writes, 0.99) }
}

/// What two threads that sum get done, as a multiple of what one does.
fn gain_of_two_threads(pace: Pace, shape: Shape, tokens: usize) {
    let (ours, peer) = (filled::<Ours>(shape), filled::<Peer>(shape));
    let on = |threads, read: &(dyn Fn() + Sync)| nanos_per_call(pace, threads, read, |_| ()).0;
    // The same sum without a cache: what the machine has to give.
    let plain = numbers(2 * tokens * shape.width(), 1);
    let (keys, values) = plain.split_at(tokens * shape.width());
    let plain = || {
        black_box(sum(black_box(keys)) + sum(black_box(values)));
    };
    let (ours, peer) = (sum_range(&ours, tokens), sum_range(&peer, tokens));
    let [ours_1, ours_2, peer_1, peer_2, plain_1, plain_2] = interleave(
        pace.threaded_rounds,
        [
            &mut || on(1, &ours),
            &mut || on(2, &ours),
            &mut || on(1, &peer),
            &mut || on(2, &peer),
            &mut || on(1, &plain),
            &mut || on(2, &plain),
        ],
    );
    report::header(&format!("2 threads that sum {tokens} tokens, and 1 (as the peer)"));
    report::gain("gain_of_two_threads_kvspan", [ours_1, ours_2], Target::AtLeast(1.8));
    report::gain("gain_of_two_threads_ghostlink", [peer_1, peer_2], Target::None);
    report::gain("gain_of_two_threads_plain_slices", [plain_1, plain_2], Target::None);
}
