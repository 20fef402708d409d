//! What the bookkeeping of blocks costs, for prompts in blocks of 16 tokens.
//!
//! ```text
//! cargo bench --bench blocks               # all groups; about three minutes
//! cargo bench --bench blocks -- evicting   # one group
//! cargo bench --bench blocks -- --test     # each benchmark once, to see that it works
//! ```
//!
//! | group | question |
//! |---|---|
//! | `keys` | What do the keys of a prompt cost? |
//! | `keys_of_a_decode_step` | What does one more token of a long sequence cost? |
//! | `match_full_prefix`, `match_miss` | What does it cost to find out what is cached? |
//! | `acquire_full_hit` | What does it cost to share a cached prompt? |
//! | `allocate_and_commit` | What does a prompt cost that finds free blocks? |
//! | `evicting` | What does it cost if all blocks are cached? |
//! | `give_back` | What does the end of a sequence cost, if all its blocks stay cached? |
//! | `fork` | What does it cost to share a sequence, and to drop that again? |
//! | `table` | What does a table cost, from no blocks to the slots of a prompt? |
//! | `in_a_pool_of` | Do these depend on the size of the pool, which is to say on the caches of the CPU? |
//!
//! What prepares a call is never in what is timed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvspan::{BlockId, BlockKey, BlockTable, Duplicates, KeyChain, KeyRoot, PrefixCache};

const BLOCK_SIZE: usize = 16;
/// Tokens of a prompt.
const PROMPTS: [usize; 3] = [1_024, 16_384, 131_072];
/// Of the pools that are not asked for their size.
const NUM_BLOCKS: usize = 32_768;
const POOLS: [usize; 3] = [4_096, 65_536, 1_048_576];

fn tokens(prompt: u32, len: usize) -> Vec<u32> {
    (0..).step_by(7).map(|token: u32| token.wrapping_mul(31) ^ prompt << 20).take(len).collect()
}

fn chain(prompt: u32, len: usize) -> KeyChain {
    let root = KeyRoot::default().key().expect("there is nothing in it");
    let mut chain = KeyChain::new(root, BLOCK_SIZE).expect("16 is a block size");
    chain.extend(&tokens(prompt, len));
    chain
}

fn keys(prompt: u32, len: usize) -> Vec<BlockKey> {
    chain(prompt, len).block_keys().to_vec()
}

fn cache(num_blocks: usize) -> PrefixCache {
    PrefixCache::new(num_blocks, Duplicates::Merge).expect("it fits into memory")
}

fn acquire(cache: &mut PrefixCache, keys: &[BlockKey], num_blocks: usize) -> (Vec<BlockId>, usize) {
    let mut blocks = Vec::with_capacity(num_blocks);
    let hits = cache.acquire(keys, num_blocks, &mut blocks).expect("there is room");
    (blocks, hits)
}

/// What a prompt that nobody has seen costs, without its keys.
fn allocate_and_commit(cache: &mut PrefixCache, keys: &[BlockKey]) -> Vec<BlockId> {
    let (mut blocks, _) = acquire(cache, keys, keys.len());
    for (block, key) in blocks.iter_mut().zip(keys) {
        *block = cache.commit(*block, key).expect("it was just taken");
    }
    blocks
}

fn give_back(cache: &mut PrefixCache, blocks: &[BlockId]) {
    cache.give_back(black_box(blocks)).expect("they are in use");
}

/// A cache in which every block was committed and given back, prompt after prompt.
fn full_cache(num_blocks: usize, len: usize) -> PrefixCache {
    let mut cache = cache(num_blocks);
    for prompt in (1_000..).take(num_blocks.div_ceil(len / BLOCK_SIZE)) {
        let blocks = allocate_and_commit(&mut cache, &keys(prompt, len));
        give_back(&mut cache, &blocks);
    }
    assert_eq!(cache.pool().num_free(), 0);
    cache
}

/// Times `call`, and nothing of what `prepare` and `clean_up` do before and after it.
fn time<S, R>(
    calls: u64,
    state: &mut S,
    mut prepare: impl FnMut(&mut S),
    mut call: impl FnMut(&mut S) -> R,
    mut clean_up: impl FnMut(&mut S, R),
) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..calls {
        prepare(state);
        let start = Instant::now();
        let result = black_box(call(state));
        total += start.elapsed();
        clean_up(state, result);
    }
    total
}

fn elements(number: usize) -> Throughput {
    Throughput::Elements(number.try_into().expect("it is small"))
}

fn making_keys(c: &mut Criterion) {
    let mut group = c.benchmark_group("keys");
    for len in PROMPTS {
        let tokens = tokens(0, len);
        let empty = chain(0, 0);
        group.throughput(elements(len));
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter(|| {
                let mut chain = empty.clone();
                chain.extend(black_box(&tokens));
                assert_eq!(chain.block_keys().len(), len / BLOCK_SIZE);
                chain
            });
        });
    }
    group.finish();
    c.bench_function("keys_of_a_decode_step", |b| {
        let mut chain = chain(0, PROMPTS[1]);
        b.iter(|| chain.extend(black_box(&[7])));
    });
}

fn matching(c: &mut Criterion) {
    for (name, other) in [("match_full_prefix", 0), ("match_miss", 1)] {
        let mut group = c.benchmark_group(name);
        for len in PROMPTS {
            let mut cache = cache(NUM_BLOCKS);
            allocate_and_commit(&mut cache, &keys(0, len));
            let keys = keys(other, len);
            group.bench_function(BenchmarkId::from_parameter(len), |b| {
                b.iter(|| cache.match_prefix(black_box(&keys)).count());
            });
        }
    }
}

fn acquire_full_hit(c: &mut Criterion) {
    let mut group = c.benchmark_group("acquire_full_hit");
    for len in PROMPTS {
        let mut cache = cache(NUM_BLOCKS);
        let keys = keys(0, len);
        let blocks = allocate_and_commit(&mut cache, &keys);
        give_back(&mut cache, &blocks);
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| acquire(cache, black_box(&keys), keys.len()),
                    |cache, (blocks, hits)| {
                        assert_eq!(hits, keys.len());
                        give_back(cache, &blocks);
                    },
                )
            });
        });
    }
}

fn allocating(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate_and_commit");
    for len in PROMPTS {
        let keys = keys(0, len);
        let mut cache = cache(NUM_BLOCKS);
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| allocate_and_commit(cache, black_box(&keys)),
                    |cache, blocks| {
                        give_back(cache, &blocks);
                        cache.reset().expect("nothing is in use");
                    },
                )
            });
        });
    }
}

fn evicting(c: &mut Criterion) {
    let mut group = c.benchmark_group("evicting");
    for len in PROMPTS {
        // As many different prompts as the cache holds, and one more, so that none is there when it
        // comes again.
        let prompts = (0..).take(NUM_BLOCKS * BLOCK_SIZE / len + 1).map(|prompt| keys(prompt, len));
        let prompts = prompts.collect::<Vec<_>>();
        let mut cache = full_cache(NUM_BLOCKS, len);
        let mut next = prompts.iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| allocate_and_commit(cache, next.next().expect("it is endless")),
                    |cache, blocks| give_back(cache, &blocks),
                )
            });
        });
        assert_eq!(cache.pool().num_free(), 0);
    }
}

fn giving_back(c: &mut Criterion) {
    let mut group = c.benchmark_group("give_back");
    for len in PROMPTS {
        let keys = keys(0, len);
        let mut cache = cache(NUM_BLOCKS);
        let blocks = allocate_and_commit(&mut cache, &keys);
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| give_back(cache, &blocks),
                    |cache, ()| cache.hold(&blocks).expect("they are cached"),
                )
            });
        });
    }
}

fn fork(c: &mut Criterion) {
    let mut group = c.benchmark_group("fork");
    for len in PROMPTS {
        let mut cache = cache(NUM_BLOCKS);
        let blocks = allocate_and_commit(&mut cache, &keys(0, len));
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter(|| {
                cache.hold(black_box(&blocks)).expect("they are in use");
                give_back(&mut cache, &blocks);
            });
        });
    }
}

fn table(c: &mut Criterion) {
    let mut group = c.benchmark_group("table");
    for len in PROMPTS {
        let (blocks, _) = acquire(&mut cache(NUM_BLOCKS), &[], len / BLOCK_SIZE);
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter(|| {
                let mut table = BlockTable::new(BLOCK_SIZE);
                table.add_blocks(black_box(&blocks)).expect("no block is there twice");
                table.extend_sequence(len).expect("there are blocks for it");
                table.slot_mapping(0..len).expect("there are slots for it")
            });
        });
    }
}

fn in_a_pool_of(c: &mut Criterion) {
    const LEN: usize = PROMPTS[1];
    let mut group = c.benchmark_group("in_a_pool_of");
    group.sample_size(20);
    for num_blocks in POOLS {
        let prompts = (0..).take(num_blocks * BLOCK_SIZE / LEN + 1).map(|prompt| keys(prompt, LEN));
        let prompts = prompts.collect::<Vec<_>>();
        let mut cache = full_cache(num_blocks, LEN);
        let mut next = prompts.iter().cycle();
        group.bench_function(BenchmarkId::new("evicting", num_blocks), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| allocate_and_commit(cache, next.next().expect("it is endless")),
                    |cache, blocks| give_back(cache, &blocks),
                )
            });
        });
        let last = next.next().expect("it is endless");
        let blocks = allocate_and_commit(&mut cache, last);
        give_back(&mut cache, &blocks);
        group.bench_function(BenchmarkId::new("full_hit", num_blocks), |b| {
            b.iter_custom(|calls| {
                time(
                    calls,
                    &mut cache,
                    |_| (),
                    |cache| acquire(cache, black_box(last), last.len()),
                    |cache, (blocks, _)| give_back(cache, &blocks),
                )
            });
        });
    }
}

criterion_group!(
    benches,
    making_keys,
    matching,
    acquire_full_hit,
    allocating,
    evicting,
    giving_back,
    fork,
    table,
    in_a_pool_of
);
criterion_main!(benches);
