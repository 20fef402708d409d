//! What a call on a manager costs, for sequences in blocks of 16 tokens.
//!
//! ```text
//! cargo bench --bench manager               # all groups; about two minutes
//! cargo bench --bench manager -- --test     # each benchmark once, to see that it works
//! ```
//!
//! | group | question |
//! |---|---|
//! | `decode_bookkeeping` | What does one more token of each sequence cost, without its content? |
//! | `write_token` | What does it cost to write it in one layer: in one call for all, and one by one? |
//! | `view` | What does it cost to borrow all tokens of a layer? |
//! | `prompt` | What does a prompt of 16,384 tokens cost, from its tokens to its freed blocks? |

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use kvspan::{KvCacheManager, KvCacheManagerConfig, PagedKvCacheHandle, RequestOptions, Storage};

/// Tokens of a long sequence.
const LEN: usize = 8_192;
/// Tokens of a prompt.
const PROMPT: usize = 16_384;
const NUM_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const WIDTH: usize = NUM_HEADS * HEAD_DIM;

fn manager(storage: Storage) -> KvCacheManager {
    let config = KvCacheManagerConfig {
        num_blocks: 4_096,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
        storage,
        ..KvCacheManagerConfig::default()
    };
    KvCacheManager::new(config).expect("it fits into memory")
}

fn tokens(prompt: u32, len: usize) -> Vec<u32> {
    (0..).step_by(7).map(|token: u32| token.wrapping_mul(31) ^ prompt << 20).take(len).collect()
}

fn allocate(manager: &KvCacheManager, tokens: &[u32]) -> PagedKvCacheHandle {
    manager.allocate(tokens, &RequestOptions::default()).expect("there is room")
}

/// The numbers are of a step of all sequences.
fn decode_bookkeeping(c: &mut Criterion) {
    /// Steps after which all sequences are as they were, a quarter of them in a new block each time.
    const STEPS: u32 = 512;
    let mut group = c.benchmark_group("decode_bookkeeping");
    for num_sequences in [1, 64] {
        let manager = manager(Storage::Elsewhere);
        let lens = (0..num_sequences).map(|index| LEN / num_sequences + index % 16);
        let prompts = (0..).zip(lens).map(|(prompt, len)| tokens(prompt, len)).collect::<Vec<_>>();
        let mut handles = Vec::new();
        for prompt in &prompts {
            let mut handle = allocate(&manager, prompt);
            manager.commit(&mut handle, prompt).expect("the tokens are its own");
            handles.push(handle);
        }
        let mut run = |commits: bool, iterations: u64| {
            let (ones, token) = (vec![1; num_sequences], vec![&[7][..]; num_sequences]);
            let mut elapsed = Duration::ZERO;
            for _ in 0..iterations {
                let mut batch = handles.iter_mut().collect::<Vec<_>>();
                let start = Instant::now();
                for _ in 0..STEPS {
                    manager.extend_many(&mut batch, &ones).expect("there is room");
                    if commits {
                        manager.commit_many(&mut batch, &token).expect("there is room for it");
                    }
                }
                elapsed += start.elapsed();
                for (handle, prompt) in handles.iter_mut().zip(&prompts) {
                    manager.truncate(handle, prompt.len()).expect("it was as short as that");
                }
            }
            elapsed / STEPS
        };
        group.bench_function(BenchmarkId::new("extend", num_sequences), |bencher| {
            bencher.iter_custom(|iterations| run(false, iterations));
        });
        group.bench_function(BenchmarkId::new("extend_and_commit", num_sequences), |bencher| {
            bencher.iter_custom(|iterations| run(true, iterations));
        });
    }
}

fn write_token(c: &mut Criterion) {
    let mut group = c.benchmark_group("write_token");
    let manager = manager(Storage::Owned);
    for num_sequences in [1, 64] {
        let sequences = 0..num_sequences;
        let mut handles =
            sequences.map(|prompt| allocate(&manager, &tokens(prompt, 512))).collect::<Vec<_>>();
        let rows = vec![1.5; handles.len() * WIDTH];
        let positions = vec![511; handles.len()];
        group.bench_function(BenchmarkId::new("in_one_call", num_sequences), |bencher| {
            let mut handles = handles.iter_mut().collect::<Vec<_>>();
            bencher.iter(|| manager.write_many(0, &mut handles, &positions, &rows, &rows));
        });
        group.bench_function(BenchmarkId::new("one_by_one", num_sequences), |bencher| {
            let row = &rows[..WIDTH];
            bencher.iter(|| {
                for handle in &mut handles {
                    manager.write(handle, 0, 511, row, row).expect("it has its blocks");
                }
            });
        });
    }
}

fn view(c: &mut Criterion) {
    let manager = manager(Storage::Owned);
    let handle = allocate(&manager, &tokens(0, LEN));
    c.bench_function("view", |bencher| {
        bencher.iter(|| black_box(manager.view(&handle, 0, 0, LEN)));
    });
}

fn prompt(c: &mut Criterion) {
    let mut group = c.benchmark_group("prompt");
    let manager = manager(Storage::Elsewhere);
    let cached = tokens(0, PROMPT);
    let mut handle = allocate(&manager, &cached);
    manager.commit(&mut handle, &cached).expect("the tokens are its own");
    group.bench_function("cached", |bencher| {
        bencher.iter(|| drop(black_box(allocate(&manager, &cached))));
    });
    let mut prompts = 1..;
    group.bench_function("new", |bencher| {
        let next = || tokens(prompts.next().unwrap_or_default(), PROMPT);
        let whole = |tokens: Vec<u32>| {
            let mut handle = allocate(&manager, &tokens);
            let new = &tokens[handle.num_cached_tokens()..];
            manager.commit(&mut handle, new).expect("the tokens are its own");
        };
        bencher.iter_batched(next, whole, BatchSize::SmallInput);
    });
}

criterion_group!(benches, decode_bookkeeping, write_token, view, prompt);
criterion_main!(benches);
