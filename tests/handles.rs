//! What every [`KvCacheHandle`] promises, whoever implements it.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use kvspan::{
    BlockTable, CacheHandleStats, ContiguousKvCacheHandle, DType, Device, KVCacheConfig,
    KvCacheHandle, KvCacheManager, KvCacheManagerConfig, KvError, LayerKvCache, PagedKvCacheHandle,
    RequestOptions, Result, TensorLike, TensorRef,
};

const NUM_LAYERS: usize = 2;
const NUM_HEADS: usize = 2;
const HEAD_DIM: usize = 3;
const WIDTH: usize = NUM_HEADS * HEAD_DIM;
const NUM_TOKENS: usize = 5;

/// Keys of the tokens, each of which has its own number.
fn keys() -> Vec<f32> {
    (0..NUM_TOKENS).flat_map(|token| [[1.0, 2.0, 3.0, 4.0, 5.0][token]; WIDTH]).collect()
}

fn values() -> Vec<f32> {
    keys().iter().map(|key| -key).collect()
}

/// Says what cannot be said through the trait.
trait Subject: KvCacheHandle {
    /// Five tokens.
    fn make() -> Self;
    fn overwrite_or_append(&mut self);
    fn close(&mut self);
}

fn manager() -> KvCacheManager {
    let config = KvCacheManagerConfig {
        num_blocks: 16,
        block_size: 2,
        num_layers: NUM_LAYERS,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
        ..KvCacheManagerConfig::default()
    };
    KvCacheManager::new(config).expect("a small pool")
}

/// Brings its manager along, which alone can write.
#[derive(Debug)]
struct Paged(KvCacheManager, PagedKvCacheHandle);

macro_rules! delegate {
    ($($method:ident() -> $result:ty),* ; $($fallible:ident),*) => {
        $(fn $method(&self) -> $result { self.1.$method() })*
        $(fn $fallible(&self, layer: usize) -> Result<Option<TensorRef>> { self.1.$fallible(layer) })*
    };
}

impl KvCacheHandle for Paged {
    delegate!(block_table() -> &BlockTable, as_any() -> &dyn Any, device() -> Device,
        num_layers() -> usize, num_heads() -> usize, head_dim() -> usize,
        clone_handle() -> Result<Arc<dyn KvCacheHandle>>, stats() -> CacheHandleStats,
        is_valid() -> bool, cache_id() -> String; key_cache, value_cache);

    fn block_table_mut(&mut self) -> &mut BlockTable {
        self.1.block_table_mut()
    }
}

impl Subject for Paged {
    fn make() -> Self {
        let manager = manager();
        let mut handle =
            manager.allocate(&[1, 2, 3, 4, 5], &RequestOptions::default()).expect("there is room");
        for layer in 0..NUM_LAYERS {
            manager.write(&mut handle, layer, 0, &keys(), &values()).expect("it has its blocks");
        }
        Self(manager, handle)
    }

    fn overwrite_or_append(&mut self) {
        let row = [9.0; WIDTH];
        self.0.write(&mut self.1, 0, 0, &row, &row).expect("there is room for a copy");
    }

    fn close(&mut self) {
        self.1.close();
    }
}

impl Subject for ContiguousKvCacheHandle {
    fn make() -> Self {
        let config = KVCacheConfig {
            max_tokens_per_seq: 8,
            num_heads: NUM_HEADS,
            hidden_dim_per_head: HEAD_DIM,
        };
        let layers = (0..NUM_LAYERS).map(|_| LayerKvCache::new(config)).collect();
        let mut handle = Self::new(layers).expect("the layers have one shape");
        for layer in 0..NUM_LAYERS {
            handle.append(layer, &keys(), &values()).expect("there is room");
        }
        handle
    }

    fn overwrite_or_append(&mut self) {
        let row = [9.0; WIDTH];
        self.append(0, &row, &row).expect("there is room");
    }

    fn close(&mut self) {
        ContiguousKvCacheHandle::close(self);
    }
}

/// The least that fulfils the contract: all tokens in two lists, which are copied to be shared.
#[derive(Clone, Debug)]
struct Tiny {
    table: BlockTable,
    planes: [Vec<f32>; 2],
    open: bool,
    id: Arc<()>,
}

#[derive(Debug)]
struct TinyTensor(Vec<f32>);

impl TensorLike for TinyTensor {
    fn shape(&self) -> [usize; 3] {
        [self.0.len() / WIDTH, NUM_HEADS, HEAD_DIM]
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_segments(&self) -> usize {
        1
    }

    fn segment(&self, index: usize) -> Option<&[u8]> {
        (index == 0).then(|| bytemuck::cast_slice(&self.0))
    }
}

impl Tiny {
    fn tensor(&self, layer: usize, plane: usize) -> Result<Option<TensorRef>> {
        if !self.open {
            return Err(KvError::StaleHandle { cache_id: self.cache_id() });
        }
        if layer >= NUM_LAYERS {
            return Err(KvError::LayerOutOfRange { layer, num_layers: NUM_LAYERS });
        }
        Ok(Some(Arc::new(TinyTensor(self.planes[plane].clone()))))
    }
}

impl KvCacheHandle for Tiny {
    fn block_table(&self) -> &BlockTable {
        &self.table
    }

    fn block_table_mut(&mut self) -> &mut BlockTable {
        &mut self.table
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_layers(&self) -> usize {
        NUM_LAYERS
    }

    fn num_heads(&self) -> usize {
        NUM_HEADS
    }

    fn head_dim(&self) -> usize {
        HEAD_DIM
    }

    fn key_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensor(layer, 0)
    }

    fn value_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensor(layer, 1)
    }

    fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>> {
        self.tensor(0, 0)?;
        Ok(Arc::new(Self { id: Arc::default(), ..self.clone() }))
    }

    fn stats(&self) -> CacheHandleStats {
        CacheHandleStats {
            memory_bytes: size_of_val(self.planes[0].as_slice()) * 2,
            blocks_allocated: 3,
            tokens_stored: NUM_TOKENS,
            utilization: 5.0 / 6.0,
            last_access: Instant::now(),
        }
    }

    fn is_valid(&self) -> bool {
        self.open
    }

    fn cache_id(&self) -> String {
        format!("tiny-{:?}", Arc::as_ptr(&self.id))
    }
}

impl Subject for Tiny {
    fn make() -> Self {
        let mut table = BlockTable::new(2);
        let blocks = [1, 2, 3].map(|id| kvspan::BlockId::new(id).expect("not the null block"));
        table.add_blocks(&blocks).expect("three blocks");
        table.extend_sequence(NUM_TOKENS).expect("they fit");
        Self { table, planes: [keys(), values()], open: true, id: Arc::default() }
    }

    fn overwrite_or_append(&mut self) {
        self.planes[0][..WIDTH].fill(9.0);
    }

    fn close(&mut self) {
        self.open = false;
    }
}

fn contents(handle: &dyn KvCacheHandle, layer: usize) -> [Vec<f32>; 2] {
    let (keys, values) = handle.kv_cache(layer).expect("the handle is alive");
    [keys, values].map(|tensor| {
        let tensor = tensor.expect("the layer is held as a tensor");
        assert_eq!((tensor.dtype(), tensor.device()), (DType::F32, Device::Cpu));
        assert!((0..tensor.num_segments()).all(|index| tensor.segment(index).is_some()));
        assert_eq!(tensor.segment(tensor.num_segments()), None);
        let elements = tensor.to_vec::<f32>().expect("the elements are f32");
        assert_eq!(elements.len(), tensor.shape().iter().product::<usize>());
        elements
    })
}

fn keeps_the_contract<S: Subject + 'static>() {
    let mut handle = S::make();
    assert_eq!(handle.device(), Device::Cpu);
    assert_eq!(
        (handle.num_layers(), handle.num_heads(), handle.head_dim()),
        (NUM_LAYERS, NUM_HEADS, HEAD_DIM)
    );
    assert_eq!(handle.num_tokens(), NUM_TOKENS);
    assert_eq!(handle.block_table().sequence_length, NUM_TOKENS);
    assert_eq!(handle.block_table().validate(), Ok(()));

    // Tensors, and what is none.
    for layer in 0..NUM_LAYERS {
        assert_eq!(contents(&handle, layer), [keys(), values()]);
    }
    let tensor = handle.key_cache(0).expect("layer 0 exists").expect("it is held as a tensor");
    assert_eq!(tensor.shape(), [NUM_TOKENS, NUM_HEADS, HEAD_DIM]);
    let layer = KvError::LayerOutOfRange { layer: NUM_LAYERS, num_layers: NUM_LAYERS };
    assert_eq!(handle.key_cache(NUM_LAYERS).err(), Some(layer.clone()));
    assert_eq!(handle.value_cache(NUM_LAYERS).err(), Some(layer.clone()));
    assert!(handle.kv_cache(usize::MAX).is_err());

    // Real figures.
    let stats = handle.stats();
    assert!(stats.memory_bytes >= 2 * WIDTH * NUM_TOKENS * size_of::<f32>());
    assert_eq!(stats.tokens_stored, NUM_TOKENS);
    assert_eq!(stats.blocks_allocated, handle.block_table().num_blocks());
    assert!((0.5..=1.0).contains(&stats.utilization));

    // A clone has the same tokens, a name of its own, and does not see what the other writes.
    let clone = handle.clone_handle().expect("the handle is alive");
    assert_ne!(clone.cache_id(), handle.cache_id());
    handle.overwrite_or_append();
    assert_ne!(contents(&handle, 0)[0], keys());
    assert_eq!(contents(&*clone, 0), [keys(), values()]);
    assert_eq!(tensor.to_vec::<f32>(), Some(keys()));

    // A closed handle refuses everything, and the others live on.
    let id = handle.cache_id();
    handle.close();
    handle.close();
    assert!(!handle.is_valid() && clone.is_valid());
    let stale = KvError::StaleHandle { cache_id: id };
    assert_eq!(handle.key_cache(0).err(), Some(stale.clone()));
    assert_eq!(handle.value_cache(0).err(), Some(stale.clone()));
    assert_eq!(handle.clone_handle().err(), Some(stale));
    drop(handle);
    assert_eq!(contents(&*clone, 1), [keys(), values()]);
    drop(clone);
    assert_eq!(tensor.to_vec::<f32>(), Some(keys()));
}

#[test]
fn a_paged_handle_keeps_the_contract() {
    keeps_the_contract::<Paged>();
}

#[test]
fn a_contiguous_handle_keeps_the_contract() {
    keeps_the_contract::<ContiguousKvCacheHandle>();
}

#[test]
fn a_handle_of_somebody_else_can_keep_the_contract() {
    keeps_the_contract::<Tiny>();
}

#[test]
fn a_handle_can_be_used_without_knowing_which_it_is() {
    let handles: [Arc<dyn KvCacheHandle>; 3] = [
        Arc::new(Paged::make().1),
        Arc::new(ContiguousKvCacheHandle::<f32>::make()),
        Arc::new(Tiny::make()),
    ];
    for handle in &handles {
        assert_eq!(contents(&**handle, 1), [keys(), values()]);
    }
    assert!(handles[0].as_any().is::<PagedKvCacheHandle>());
    assert!(handles[1].as_any().is::<ContiguousKvCacheHandle>());
    assert!(handles[2].as_any().downcast_ref::<PagedKvCacheHandle>().is_none());
}

#[test]
fn a_clone_that_is_dropped_gives_its_blocks_back_once() {
    let Paged(manager, handle) = Paged::make();
    let clones = [handle.clone_handle().unwrap(), handle.clone_handle().unwrap()];
    assert_eq!((manager.stats().num_sequences, manager.stats().num_in_use), (3, 3));
    drop(handle);
    assert_eq!(manager.stats().num_in_use, 3);
    drop(clones);
    assert_eq!(manager.stats().num_in_use, 0);
    manager.check_integrity().unwrap();
}

#[test]
fn layers_of_different_shapes_make_no_handle() {
    let config = |max_tokens_per_seq| KVCacheConfig {
        max_tokens_per_seq,
        num_heads: NUM_HEADS,
        hidden_dim_per_head: HEAD_DIM,
    };
    let layers = |capacities: &[usize]| {
        let layers = capacities.iter().map(|&capacity| LayerKvCache::new(config(capacity)));
        ContiguousKvCacheHandle::new(layers.collect()).err()
    };
    assert_eq!(layers(&[]), Some(KvError::InvalidConfig { field: "num_layers" }));
    assert_eq!(layers(&[4, 4, 5]), Some(KvError::LayersDiffer { layer: 2 }));
    assert_eq!(layers(&[0]), Some(KvError::InvalidConfig { field: "max_tokens_per_seq" }));
    assert_eq!(layers(&[4, 4]), None);
}

#[test]
fn a_contiguous_handle_counts_the_tokens_that_all_layers_have() {
    let mut handle = ContiguousKvCacheHandle::make();
    let row = [6.0; WIDTH];
    assert_eq!(handle.append(0, &row, &row), Ok(5..6));
    assert_eq!((handle.num_tokens(), handle.key_cache(0).unwrap().unwrap().shape()[0]), (5, 6));
    assert_eq!(handle.append(1, &row, &row), Ok(5..6));
    assert_eq!((handle.num_tokens(), handle.block_table().sequence_length), (6, 6));
    let layer = KvError::LayerOutOfRange { layer: 2, num_layers: 2 };
    assert_eq!(handle.append(2, &row, &row), Err(layer));
}

#[test]
fn the_tensor_of_a_layer_that_is_emptied_meanwhile_has_what_is_left() {
    let handle = ContiguousKvCacheHandle::<f32>::make();
    let cache = handle.layer(0).expect("it is there").clone();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let row = [6.0; WIDTH];
            while !over.load(Ordering::Relaxed) {
                // While there is a tensor, its tokens stay.
                if cache.truncate(0).is_ok() {
                    cache.append(&row, &row).expect("it is empty");
                }
            }
        });
        let mut tensors = (0..200_000).map(|_| handle.key_cache(0).map(|_| ()));
        let failed = tensors.find(Result::is_err);
        over.store(true, Ordering::Relaxed);
        assert_eq!(failed, None);
    });
}

#[test]
fn keys_and_values_are_one_view_which_ends_with_the_last_of_them() {
    let handle = ContiguousKvCacheHandle::<f32>::make();
    let cache = handle.layer(0).expect("it is there").clone();
    let (keys, values) = handle.kv_cache(0).expect("the handle is alive");
    let pinned = Err(KvError::Pinned { range: 0..NUM_TOKENS, pins: 1 });
    assert_eq!(cache.truncate(0), pinned);
    drop(keys);
    assert_eq!(cache.truncate(0), pinned);
    drop(values);
    assert_eq!(cache.truncate(0), Ok(()));

    let Paged(manager, handle) = Paged::make();
    let pins = || manager.inspect().blocks.iter().map(|block| block.pin_count).sum::<usize>();
    let (keys, values) = handle.kv_cache(0).expect("the handle is alive");
    assert_eq!(pins(), 3);
    drop(values);
    assert_eq!(pins(), 3);
    drop(keys);
    assert_eq!(pins(), 0);
}

#[test]
fn keys_and_values_of_a_layer_that_grows_meanwhile_are_equally_long() {
    let config =
        KVCacheConfig { max_tokens_per_seq: 1 << 17, num_heads: 1, hidden_dim_per_head: 1 };
    let cache = LayerKvCache::new(config);
    let handle = ContiguousKvCacheHandle::new(vec![cache.clone()]).expect("it is one layer");
    thread::scope(|scope| {
        let growing = scope.spawn(|| while cache.append(&[1.0], &[2.0]).is_ok() {});
        while !growing.is_finished() {
            let (keys, values) = handle.kv_cache(0).expect("the handle is alive");
            let lens = [keys, values].map(|tensor| tensor.expect("it is a tensor").shape()[0]);
            assert_eq!(lens[0], lens[1]);
        }
    });
}

#[test]
fn a_contiguous_handle_that_is_refused_an_append_shares_its_layers_still() {
    let mut handle = ContiguousKvCacheHandle::make();
    let clone = handle.clone_handle().unwrap();
    let before = handle.layer(0).unwrap().clone();
    let (row, rows) = ([6.0; WIDTH], [6.0; 4 * WIDTH]);
    assert!(matches!(handle.append(0, &rows, &rows), Err(KvError::CapacityExceeded { .. })));
    assert!(matches!(handle.append(0, &row, &rows), Err(KvError::LengthMismatch { .. })));
    before.append(&row, &row).unwrap();
    assert_eq!(handle.layer(0).unwrap().len(), 6);
    drop(clone);
}

#[test]
fn the_table_of_a_contiguous_handle_is_checked() {
    let mut handle = ContiguousKvCacheHandle::make();
    let kept = handle.block_table().clone();
    handle.block_table_mut().block_size = 100;
    let row = [6.0; WIDTH];
    assert!(matches!(handle.append(0, &row, &row), Err(KvError::InconsistentTable { .. })));
    assert!(matches!(handle.key_cache(0), Err(KvError::InconsistentTable { .. })));
    assert!(matches!(handle.clone_handle(), Err(KvError::InconsistentTable { .. })));
    *handle.block_table_mut() = kept;
    assert_eq!(handle.append(0, &row, &row), Ok(5..6));
}
