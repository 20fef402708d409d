//! Samples of both sides, taken in turn.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Samples of each side.
    pub rounds: usize,
    /// Least length of a sample on one thread.
    pub sample: Duration,
    /// Samples of each side with several threads, and their length.
    pub threaded_rounds: usize,
    pub window: Duration,
}

impl Pace {
    pub const FULL: Self = Self {
        rounds: 41,
        sample: Duration::from_millis(5),
        threaded_rounds: 11,
        window: Duration::from_millis(100),
    };
    pub const QUICK: Self = Self {
        rounds: 3,
        sample: Duration::from_micros(500),
        threaded_rounds: 3,
        window: Duration::from_millis(10),
    };
}

/// Calls the samplers in turn, first the one first and then the other, `rounds` times.
pub fn interleave<const N: usize, S>(
    rounds: usize,
    samplers: [&mut dyn FnMut() -> S; N],
) -> [Vec<S>; N] {
    let mut samples = [const { Vec::new() }; N];
    for round in 0..rounds {
        for turn in 0..N {
            let side = if round % 2 == 0 { turn } else { N - 1 - turn };
            samples[side].push(samplers[side]());
        }
    }
    samples
}

/// Makes a sampler of an operation: mean nanoseconds over as many calls as fill a sample.
pub fn repeated(pace: Pace, mut operation: impl FnMut()) -> impl FnMut() -> f64 {
    let mut calls = 1_u32;
    while nanos_each(calls, &mut operation) * f64::from(calls) < nanos(pace.sample) {
        calls *= 2;
    }
    move || nanos_each(calls, &mut operation)
}

fn nanos_each(calls: u32, operation: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..calls {
        operation();
    }
    nanos(start.elapsed()) / f64::from(calls)
}

pub fn nanos(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e9
}

/// Wall nanoseconds per call when `threads` threads call `operation` for the length of a window,
/// while `meanwhile` runs on one more thread until its flag is set.
pub fn nanos_per_call<R: Send>(
    pace: Pace,
    threads: usize,
    operation: impl Fn() + Sync,
    meanwhile: impl FnOnce(&AtomicBool) -> R + Send,
) -> (f64, R) {
    let (stop, start) = (AtomicBool::new(false), Barrier::new(threads + 2));
    let calls_per_nano = || {
        start.wait();
        let (begin, mut calls) = (Instant::now(), 0_u32);
        while !stop.load(Ordering::Relaxed) {
            operation();
            calls += 1;
        }
        f64::from(calls) / nanos(begin.elapsed())
    };
    thread::scope(|scope| {
        let callers = (0..threads).map(|_| scope.spawn(calls_per_nano)).collect::<Vec<_>>();
        let other = scope.spawn(|| {
            start.wait();
            meanwhile(&stop)
        });
        start.wait();
        thread::sleep(pace.window);
        stop.store(true, Ordering::Relaxed);
        let rate = callers.into_iter().map(|caller| caller.join().unwrap()).sum::<f64>();
        (1.0 / rate, other.join().unwrap())
    })
}

/// The sample that `fraction` of the others are below.
pub fn quantile(mut samples: Vec<f64>, fraction: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * fraction).round() as usize]
}
