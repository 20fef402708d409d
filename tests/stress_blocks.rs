//! All operations on blocks at once, at random, on few of them, for as long as wanted:
//! `KVSPAN_STRESS_OPS` is the number of operations of each thread, and `KVSPAN_STRESS_POOL` of threads
//! that attend for one of them. Made for the sanitizers.

mod common {
    pub(crate) mod rng;
    pub(crate) mod stamped;
    pub(crate) mod watchdog;
}

use std::env;
use std::fmt::Debug;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use common::rng::Rng;
use common::stamped::{self, check_equal};
use common::watchdog::within;
use kvspan::{
    Attention, AttentionPool, Context, Element, KvCacheHandle, KvCacheManager,
    KvCacheManagerConfig, KvError, PagedKvCacheHandle, PagedSpan, Query, RequestOptions, Result,
    TensorRef, bf16, f16,
};
use parking_lot::Mutex;

const BLOCK_SIZE: usize = 4;
const NUM_LAYERS: usize = 2;
const NUM_HEADS: usize = 2;
const HEAD_DIM: usize = 12;
const WIDTH: usize = NUM_HEADS * HEAD_DIM;
const NUM_BLOCKS: usize = 24;
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

const THREADS: u64 = 4;
const OPS: u32 = 10_000;
/// After so many operations the manager is given up, while views of it live on.
const OPS_OF_A_ROUND: u32 = 500;

/// A view, and the keys it showed when it was made.
type View<T> = (PagedSpan<T>, Vec<f32>);

/// What the threads pass to each other. Of locks that the sanitizers see through, unlike the standard
/// library's.
struct Market<T: Element> {
    handles: Mutex<Vec<PagedKvCacheHandle<T>>>,
    views: Mutex<Vec<View<T>>>,
    tensors: Mutex<Vec<TensorRef>>,
}

#[test]
fn stress_of_all_operations_on_blocks_at_once() {
    let ops = setting("KVSPAN_STRESS_OPS", OPS);
    within(Duration::from_mins(1) + Duration::from_millis(40) * ops, move || {
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

fn setting<N: FromStr<Err: Debug>>(name: &str, default: N) -> N {
    env::var(name).map_or(default, |given| given.parse().expect("a number"))
}

/// Leaves views, which it looks at when the manager is gone.
fn one_round<T: Element>(round: u32, ops: u32) {
    let manager = KvCacheManager::<T>::with_element(KvCacheManagerConfig {
        num_blocks: NUM_BLOCKS,
        block_size: BLOCK_SIZE,
        num_layers: NUM_LAYERS,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
        ..KvCacheManagerConfig::default()
    });
    let manager = manager.expect("there is memory for a small pool");
    let (handles, views, tensors) = Default::default();
    let market = Market { handles, views, tensors };
    let pool = AttentionPool::new(setting("KVSPAN_STRESS_POOL", 2)).expect("a few threads");
    thread::scope(|scope| {
        let threads = (0..THREADS).map(|thread| {
            let (manager, market, pool) = (&manager, &market, &pool);
            let seed = u64::from(round) * THREADS + thread + 1;
            scope.spawn(move || {
                let (rng, own) = (Rng::new(seed), Vec::new());
                let mut worker = Worker { manager, market, pool, rng, own };
                for _ in 0..ops {
                    worker.step();
                }
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            thread.join().expect("the thread is well");
        }
    });
    market.handles.lock().clear();
    let report = manager.leak_report();
    assert!(report.sequences.is_empty(), "{report:?}");
    assert_eq!(manager.stats().num_in_use, manager.stats().num_pinned);
    manager.check_integrity().expect("nothing is lost");
    drop(manager);
    market.views.into_inner().iter().for_each(check_view);
}

struct Worker<'a, T: Element> {
    manager: &'a KvCacheManager<T>,
    market: &'a Market<T>,
    pool: &'a AttentionPool,
    rng: Rng,
    own: Vec<PagedKvCacheHandle<T>>,
}

impl<T: Element> Worker<'_, T> {
    fn step(&mut self) {
        let choice = self.rng.below(26);
        if self.own.is_empty() || choice < 3 {
            return self.allocate();
        }
        let at = self.rng.below(self.own.len());
        let (manager, len) = (self.manager, self.own[at].num_tokens());
        match choice {
            3..6 => self.write(at),
            6 => self.write_many(),
            7 | 8 => attempt(self.commit(at)),
            9 => {
                let additional = self.rng.below(6);
                attempt(manager.extend(&mut self.own[at], additional));
            }
            10 => attempt(manager.truncate(&mut self.own[at], self.rng.below(len + 1))),
            11 => {
                if let Some(fork) = allowed(manager.fork(&self.own[at], None)) {
                    self.give(fork);
                }
            }
            12 => {
                let taken = self.market.handles.lock().pop();
                self.own.extend(taken);
            }
            13 => {
                let given = self.own.swap_remove(at);
                self.give(given);
            }
            14 | 15 => self.view(at),
            16 => {
                let views = std::mem::take(&mut *self.market.views.lock());
                views.iter().for_each(check_view);
                self.market.views.lock().extend(views.into_iter().skip(1));
            }
            17 => self.tensor(at),
            18 => self.read(at),
            19 => attempt(manager.free_request(NAMES[self.rng.below(NAMES.len())])),
            20 => drop(self.own.swap_remove(at)),
            21 => self.many(),
            22 => attempt(manager.reset_prefix_cache()),
            23 => self.attend(),
            24 => self.attend_to_views(),
            _ => {
                manager.check_integrity().expect("nothing is lost");
                let stats = manager.stats();
                let sum = stats.num_free + stats.num_cached + stats.num_in_use;
                assert_eq!((sum, manager.inspect().blocks.len()), (NUM_BLOCKS, NUM_BLOCKS));
            }
        }
        self.own.truncate(3);
    }

    /// Few, so that there are blocks left.
    fn give(&self, handle: PagedKvCacheHandle<T>) {
        let mut handles = self.market.handles.lock();
        handles.push(handle);
        if handles.len() > 2 {
            drop(handles.swap_remove(0));
        }
    }

    fn allocate(&mut self) {
        // Few beginnings, so that they are often shared.
        let len = self.rng.below(14);
        let mut tokens = vec![0; len];
        if len > 0 && self.rng.below(3) == 0 {
            tokens[len - 1] = 1;
        }
        let request_id = Some(NAMES[self.rng.below(NAMES.len())]).filter(|_| len.is_multiple_of(2));
        let options = RequestOptions { request_id, lookahead: len % 3, ..Default::default() };
        let Some(handle) = allowed(self.manager.allocate(&tokens, &options)) else { return };
        let cached = handle.num_cached_tokens() * WIDTH;
        for layer in 0..NUM_LAYERS {
            if let Some(rows) = self.rows(&handle, layer) {
                assert!(rows[cached..].iter().all(|x| x.to_bits() == 0), "a new owner finds zeros");
            }
        }
        self.own.push(handle);
    }

    /// Keys of all tokens, none of them torn; unless the sequence was freed.
    fn rows(&self, handle: &PagedKvCacheHandle<T>, layer: usize) -> Option<Vec<f32>> {
        let len = handle.num_tokens();
        let (mut keys, mut values) = (vec![0.0; len * WIDTH], vec![0.0; len * WIDTH]);
        allowed(self.manager.read_range_into(handle, layer, 0, len, &mut keys, &mut values))?;
        check_rows(&keys, &values);
        Some(keys)
    }

    fn read(&self, at: usize) {
        let rows = |layer| self.rows(&self.own[at], layer);
        if let (Some(first), Some(again)) = (rows(0), rows(0)) {
            assert_eq!(first, again, "nobody else writes to a sequence");
        }
    }

    fn write(&mut self, at: usize) {
        let len = self.own[at].num_tokens();
        let (layer, start) = (self.rng.below(NUM_LAYERS), self.rng.below(len + 1));
        let (keys, values) = rows(&mut self.rng, (len - start).min(6));
        attempt(self.manager.write(&mut self.own[at], layer, start, &keys, &values));
        self.read(at);
    }

    fn write_many(&mut self) {
        let own = self.own.iter_mut().filter(|handle| handle.num_tokens() > 0);
        let mut handles = own.collect::<Vec<_>>();
        let lens = handles.iter().map(|handle| handle.num_tokens()).collect::<Vec<_>>();
        let positions = lens.iter().map(|&len| self.rng.below(len)).collect::<Vec<_>>();
        let (keys, values) = rows(&mut self.rng, handles.len());
        attempt(self.manager.write_many(1, &mut handles, &positions, &keys, &values));
    }

    fn commit(&mut self, at: usize) -> Result<()> {
        let handle = &mut self.own[at];
        let (start, len) = (handle.num_committed_tokens(), handle.num_tokens());
        let mut tokens = handle.tokens().to_vec();
        tokens.resize(len, 0);
        self.manager.commit(handle, &tokens[start..])
    }

    fn many(&mut self) {
        let count = self.own.len();
        let additional = (0..count).map(|_| self.rng.below(3)).collect::<Vec<_>>();
        let mut handles = self.own.iter_mut().collect::<Vec<_>>();
        attempt(self.manager.extend_many(&mut handles, &additional));
        let zeros = vec![&[0_u32; 2][..]; count];
        attempt(self.manager.commit_many(&mut handles, &zeros));
        if self.rng.below(4) == 0 {
            attempt(self.manager.free_many(&self.own.iter().collect::<Vec<_>>()));
            self.own.clear();
        }
    }

    fn view(&mut self, at: usize) {
        let len = self.own[at].num_tokens();
        let (layer, start) = (self.rng.below(NUM_LAYERS), self.rng.below(len + 1));
        let end = start + self.rng.below(len - start + 1);
        if let Some(view) = allowed(self.manager.view(&self.own[at], layer, start, end)) {
            let keys = shown(&view);
            let mut views = self.market.views.lock();
            views.push((view, keys));
            views.truncate(5);
        }
    }

    /// One token of each of its sequences, while others write to sequences that share their blocks.
    fn attend(&mut self) {
        let (layer, elements) = (self.rng.below(NUM_LAYERS), [0.5; WIDTH]);
        let query = Query::new(&elements, [1, NUM_HEADS, HEAD_DIM]).expect("one token");
        let own = self.own.iter().filter(|handle| handle.num_tokens() > 0);
        let batch = own.map(|handle| -> (_, &dyn KvCacheHandle) { (query, handle) });
        let batch = batch.collect::<Vec<_>>();
        let mut out = vec![0.0; batch.len() * WIDTH];
        let attention = Attention::default();
        if allowed(attention.attend_handles(&batch, layer, self.pool, &mut out)).is_some() {
            out.chunks(WIDTH).for_each(check_equal);
        }
    }

    fn attend_to_views(&self) {
        for (view, _) in &*self.market.views.lock() {
            if !view.is_empty() {
                let context = Context::of_paged(view).expect("a view of blocks");
                stamped::attend(&context, [1, NUM_HEADS, HEAD_DIM], self.pool);
            }
        }
    }

    fn tensor(&mut self, at: usize) {
        let tensor = allowed(self.own[at].key_cache(self.rng.below(NUM_LAYERS)));
        let mut tensors = self.market.tensors.lock();
        tensors.extend(tensor.flatten());
        for tensor in &*tensors {
            let elements = tensor.to_vec::<T>().expect("its type is the manager's");
            let whole = |row: &[T]| row.iter().all(|x| *x == row[0]);
            assert!(elements.chunks(WIDTH).all(whole), "torn: {elements:?}");
        }
        if tensors.len() > 2 {
            drop(tensors.swap_remove(0));
        }
    }
}

fn rows(rng: &mut Rng, count: usize) -> (Vec<f32>, Vec<f32>) {
    stamped::rows(rng, count, WIDTH)
}

fn check_rows(keys: &[f32], values: &[f32]) {
    stamped::check_rows(keys, values, WIDTH);
}

fn shown<T: Element>(view: &PagedSpan<T>) -> Vec<f32> {
    let segments = view.segments();
    let keys = segments.flat_map(|segment| {
        let (keys, values) = stamped::shown(segment);
        check_rows(&keys, &values);
        keys
    });
    keys.collect()
}

fn check_view<T: Element>((view, then): &View<T>) {
    assert_eq!(shown(view), *then, "a view changed");
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
            KvError::OutOfBlocks { .. }
            | KvError::StaleHandle { .. }
            | KvError::RequestExists { .. }
            | KvError::UnknownRequest { .. }
            | KvError::BlocksInUse { .. }
            | KvError::RangeOutOfBounds { .. }
            | KvError::NoRoomToCommit { .. }
            | KvError::TokenMismatch { .. }
            | KvError::NothingToAttend
            // By a sequence that shares it, with tokens of its own.
            | KvError::WrongBlockState { .. },
        ) => None,
        Err(KvError::BatchEntry { source, .. }) => allowed(Err(*source)),
        Err(other) => panic!("{other}"),
    }
}
