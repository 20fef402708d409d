//! What attention costs, beside reading the same bytes.
//!
//! ```text
//! cargo bench --bench attention
//! cargo bench --bench attention -- decode/8192
//! ```
//!
//! | group | question |
//! |---|---|
//! | `read` | How long does it take to do nothing but read keys and values, on 1 and on 2 threads? |
//! | `decode` | How long does one query token take, by context, element type and threads? |
//! | `instructions` | How much do the vector instructions matter? |
//! | `paged` | What does it cost that the tokens lie in blocks? |
//! | `chunk` | How long does a chunk of a prompt take? |
//!
//! 32 query heads and 8 KV heads of 128 elements. Contexts of 8,192 tokens and more are out of the
//! cache; the data is not zero. The throughput is that of the bytes of keys and values, and so in
//! `read` the machine's own.

use std::hint::black_box;
use std::thread;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch};
use kvspan::{
    Attention, AttentionPool, Context, DType, Element, Instructions, KVCacheConfig, KvCacheHandle,
    KvCacheManager, KvCacheManagerConfig, LayerKvCache, PinnedSpan, Query, RequestOptions, bf16,
    f16,
};

const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const CONTEXTS: [usize; 3] = [1024, 8192, 32_768];
/// Out of the cache.
const CONTEXT: usize = 8192;

fn read(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    for tokens in CONTEXTS {
        let span = filled::<f32>(tokens);
        group.throughput(bytes(DType::F32, tokens));
        group.bench_function(BenchmarkId::new("1 thread", tokens), |b| {
            b.iter(|| (sum(span.keys()), sum(span.values())));
        });
        group.bench_function(BenchmarkId::new("2 threads", tokens), |b| {
            b.iter(|| {
                thread::scope(|scope| {
                    let keys = scope.spawn(|| sum(span.keys()));
                    (sum(span.values()), keys.join())
                })
            });
        });
    }
}

fn decode(c: &mut Criterion) {
    fn of<T: Element>(c: &mut Criterion) {
        let mut group = c.benchmark_group("decode");
        for tokens in CONTEXTS {
            let span = filled::<T>(tokens);
            group.throughput(bytes(T::DTYPE, tokens));
            for num_threads in [1, 2] {
                let pool = AttentionPool::new(num_threads).expect("a thread or two");
                let name = format!("{tokens}/{}", T::DTYPE.name());
                group.bench_function(BenchmarkId::new(name, num_threads), |b| {
                    let context = Context::of_span(span.span()).expect("it is a whole span");
                    b.iter(attend(&context, 1, &pool));
                });
            }
        }
    }
    of::<f32>(c);
    of::<f16>(c);
    of::<bf16>(c);
    of::<i8>(c);
}

fn instructions(c: &mut Criterion) {
    let span = filled::<f32>(CONTEXT);
    let mut group = c.benchmark_group("instructions");
    group.throughput(bytes(DType::F32, CONTEXT));
    for instructions in Instructions::available() {
        let pool = AttentionPool::with_instructions(1, instructions);
        let pool = pool.expect("this thread").expect("the processor has them");
        group.bench_function(format!("{instructions:?}"), |b| {
            let context = Context::of_span(span.span()).expect("it is a whole span");
            b.iter(attend(&context, 1, &pool));
        });
    }
}

fn paged(c: &mut Criterion) {
    let span = filled::<f32>(CONTEXT);
    let tokens: Vec<u32> = (0..).take(CONTEXT).collect();
    let mut group = c.benchmark_group("paged");
    group.throughput(bytes(DType::F32, CONTEXT));
    for block_size in [16, 128] {
        let manager = KvCacheManager::new(KvCacheManagerConfig {
            num_blocks: CONTEXT / block_size,
            block_size,
            num_kv_heads: KV_HEADS,
            head_dim: DIM,
            ..KvCacheManagerConfig::default()
        });
        let manager = manager.expect("there is memory");
        let handle = manager.allocate(&tokens, &RequestOptions::default());
        let mut handle = handle.expect("there are as many blocks");
        let written = manager.write(&mut handle, 0, 0, span.keys(), span.values());
        written.expect("the sequence has its blocks");
        let (pool, query) = (AttentionPool::default(), numbers(Q_HEADS * DIM));
        let mut out = vec![0.0; query.len()];
        group.bench_function(BenchmarkId::new("block_size", block_size), |b| {
            let handle: &dyn KvCacheHandle = &handle;
            b.iter(|| {
                let query = Query::new(&query, [1, Q_HEADS, DIM]).expect("one token");
                let done = Attention::default().attend_handle(query, handle, 0, &pool, &mut out);
                done.expect("the handle is alive");
            });
        });
    }
}

fn chunk(c: &mut Criterion) {
    let span = filled::<f32>(CONTEXT);
    let mut group = c.benchmark_group("chunk");
    group.sample_size(10);
    for q_tokens in [8, 64, 256] {
        let pool = AttentionPool::default();
        group.throughput(Throughput::Elements(q_tokens.try_into().expect("a small number")));
        group.bench_function(BenchmarkId::new("q_tokens", q_tokens), |b| {
            let context = Context::of_span(span.span()).expect("it is a whole span");
            b.iter(attend(&context, q_tokens, &pool));
        });
    }
}

/// A call with so many query tokens.
fn attend<'a>(context: &'a Context<'a>, q_tokens: usize, pool: &'a AttentionPool) -> impl FnMut() {
    let query = numbers(q_tokens * Q_HEADS * DIM);
    let mut out = vec![0.0; query.len()];
    move || {
        let query = Query::new(&query, [q_tokens, Q_HEADS, DIM]).expect("whole tokens");
        let done = Attention::default().attend(query, context, pool, &mut out);
        done.expect("the shapes fit");
        black_box(&out);
    }
}

fn filled<T: Element>(tokens: usize) -> PinnedSpan<T> {
    let cache = LayerKvCache::<T>::with_element(KVCacheConfig {
        max_tokens_per_seq: tokens,
        num_heads: KV_HEADS,
        hidden_dim_per_head: DIM,
    });
    let rows = numbers(tokens * KV_HEADS * DIM);
    cache.append(&rows, &rows).expect("there is room");
    cache.pin_range(0, tokens).expect("they are stored")
}

/// Numbers between -1 and 1, of which none is zero.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(state >> 9 | 0x3f80_0001) * 2.0 - 3.0
    };
    (0..count).map(|_| next()).collect()
}

fn sum(elements: &[f32]) -> f32 {
    #[expect(clippy::inline_always, reason = "it is to be compiled for the instructions of `simd`")]
    #[inline(always)]
    fn with<S: Simd>(simd: S, elements: &[f32]) -> f32 {
        let mut sums = [S::f32s::splat(simd, 0.0); 8];
        for lines in elements.chunks_exact(8 * S::f32s::LEN) {
            for (sum, line) in sums.iter_mut().zip(lines.chunks_exact(S::f32s::LEN)) {
                *sum += S::f32s::from_slice(simd, line);
            }
        }
        sums.into_iter().map(SimdBase::reduce_sum).sum()
    }
    dispatch!(Level::new(), simd => with(simd, elements))
}

fn bytes(dtype: DType, tokens: usize) -> Throughput {
    let bytes = 2 * tokens * KV_HEADS * DIM * dtype.itemsize();
    Throughput::Bytes(bytes.try_into().expect("memory is counted in 64 bits"))
}

criterion_group!(benches, read, decode, instructions, paged, chunk);
criterion_main!(benches);
