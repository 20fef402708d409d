//! The bookkeeping of blocks beside the crate `ferrum-kv`, which shares no prefixes: both sides find no
//! keys, and have no content.
//!
//! What does a sequence cost from its first block to the last given back, and one more token of it?
//! What is left of that when several threads do it? Afterwards no block may be missing on either side.

use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use ferrum_kv::{
    AllocationRequest, DataType, Device, KvCacheManagerInterface, PagedKvCacheConfig,
    PagedKvCacheHandle, PagedKvCacheManager as Peer, RequestId,
};
use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions, Storage};

use crate::report::{self, Target};
use crate::timing::{Pace, interleave, nanos, nanos_per_call, repeated};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 32_768;
/// Tokens of the sequences of several threads.
const SHORT: usize = 1_024;
const LONG: usize = 16_384;
/// Decode steps of a sample, from `SHORT` tokens on.
const STEPS: usize = 4_096;

thread_local! {
    /// No two threads may have one name.
    static REQUEST: AllocationRequest = request(SHORT);
}

/// Prints all rows.
pub fn run(pace: Pace) {
    let (ours, peer) = (ours(), peer());
    report::header("blocks of 16 tokens, one thread");
    for len in [SHORT, LONG] {
        let (tokens, request) = (vec![7; len], request(len));
        let mut ours = repeated(pace, || start_and_end(&ours, &tokens));
        let mut peer = repeated(pace, || start_and_end_of_peer(&peer, &request));
        let samples = interleave(pace.rounds, [&mut ours, &mut peer]);
        report::beside(&format!("allocate_and_free/{len}"), samples, Target::None);
    }
    let samples =
        interleave(pace.threaded_rounds, [&mut || grow(&ours), &mut || grow_of_peer(&peer)]);
    report::beside("one_token_more", samples, Target::None);

    report::header("blocks of 16 tokens, several threads");
    for threads in [1, 2, 4] {
        let tokens = vec![7; SHORT];
        let mut ours = || nanos_per_call(pace, threads, || start_and_end(&ours, &tokens), |_| ()).0;
        let mut peer = || {
            let one = || REQUEST.with(|request| start_and_end_of_peer(&peer, request));
            nanos_per_call(pace, threads, one, |_| ()).0
        };
        let samples = interleave(pace.threaded_rounds, [&mut ours, &mut peer]);
        report::beside(&format!("allocate_and_free_on_{threads}_threads"), samples, Target::None);
    }

    let stats = ours.stats();
    assert_eq!((stats.num_in_use, stats.num_free), (0, NUM_BLOCKS), "a block of ours is lost");
    assert!(ours.leak_report().is_empty());
    ours.check_integrity().unwrap();
    let stats = peer.gpu_pool().stats();
    assert_eq!(stats.free_blocks, stats.total_blocks, "a block of theirs is lost");
}

fn ours() -> KvCacheManager {
    let config = KvCacheManagerConfig {
        num_blocks: NUM_BLOCKS,
        block_size: BLOCK_SIZE,
        storage: Storage::Elsewhere,
        prefix_caching: false,
        ..KvCacheManagerConfig::default()
    };
    KvCacheManager::new(config).unwrap()
}

fn peer() -> Peer {
    let config = PagedKvCacheConfig {
        block_size: BLOCK_SIZE,
        max_gpu_blocks: NUM_BLOCKS,
        max_cpu_blocks: 0,
        enable_swapping: false,
        num_layers: 1,
        num_heads: 1,
        head_dim: 1,
        ..PagedKvCacheConfig::default()
    };
    Peer::new(Device::CPU, config).unwrap()
}

fn start_and_end(manager: &KvCacheManager, tokens: &[u32]) {
    let handle = manager.allocate(black_box(tokens), &RequestOptions::default()).unwrap();
    manager.free(black_box(&handle)).unwrap();
}

fn request(initial_tokens: usize) -> AllocationRequest {
    AllocationRequest {
        request_id: RequestId::new(),
        initial_tokens,
        max_sequence_length: LONG,
        num_layers: 1,
        num_heads: 1,
        head_dim: 1,
        device: Device::CPU,
        dtype: DataType::FP32,
        priority: Default::default(),
    }
}

fn start_and_end_of_peer(manager: &Peer, request: &AllocationRequest) {
    black_box(manager.allocate_sync(black_box(request)).unwrap());
    manager.deallocate_sync(&request.request_id).unwrap();
}

/// Nanoseconds of one token more.
fn grow(manager: &KvCacheManager) -> f64 {
    let mut handle = manager.allocate(&[7; SHORT], &RequestOptions::default()).unwrap();
    let start = Instant::now();
    for _ in 0..STEPS {
        black_box(manager.extend(&mut handle, 1).unwrap());
    }
    nanos(start.elapsed()) / STEPS as f64
}

fn grow_of_peer(manager: &Peer) -> f64 {
    let (id, device) = (RequestId::new(), Device::CPU);
    let mut handle = PagedKvCacheHandle::new(id, device, BLOCK_SIZE, 1, 1, 1);
    let mut blocks = manager.allocate_blocks(&handle, SHORT / BLOCK_SIZE).unwrap();
    handle.set_num_tokens(SHORT);
    let start = Instant::now();
    for _ in 0..STEPS {
        ready(manager.extend(&mut handle, 1)).unwrap();
    }
    let elapsed = nanos(start.elapsed()) / STEPS as f64;
    blocks.clear();
    let ids = handle.get_physical_blocks().into_iter().map(ferrum_kv::PhysicalBlockId::new);
    blocks.extend(ids);
    manager.free_blocks(&blocks).unwrap();
    elapsed
}

/// The result of a future that waits for nothing.
fn ready<R>(future: impl Future<Output = R>) -> R {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("there is nothing to wait for"),
    }
}
