//! What an engine holds of one sequence's cache, whatever kind of cache it is.

mod contiguous;
mod paged;
mod tensor;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

pub use contiguous::ContiguousKvCacheHandle;
pub(crate) use paged::{Known, NewSequence, check_count, in_batch};
pub use paged::{PagedKvCacheHandle, PagedSpan};
pub use tensor::{TensorLike, TensorRef};

use crate::block::BlockTable;
use crate::error::Result;

/// One sequence's keys and values in all layers of a model.
///
/// # Contract
///
/// * `num_heads` means KV heads.
/// * A layer that does not exist is an error. `Ok(None)` means that the cache does not hold the layer
///   as a tensor.
/// * A tensor is a view: it stays as it is, whatever happens to the handle.
/// * A handle that is not [valid](Self::is_valid) refuses every use with
///   [`KvError::StaleHandle`](crate::KvError::StaleHandle); its plain accessors still answer.
/// * What is done to the table through [`block_table_mut`](Self::block_table_mut) is checked at the
///   next use of the handle. It never decides which block belongs to whom.
/// * Dropping a handle gives its memory back, once.
///
/// # Source
///
/// The trait of the same name in the crate `ferrum-interfaces`, the traits and types of the inference
/// engine Ferrum, which leaves most of this open.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use kvspan::{KvCacheHandle, KvCacheManager, KvCacheManagerConfig, RequestOptions};
///
/// fn describe(handle: &dyn KvCacheHandle) -> String {
///     format!("{} tokens in {} layers", handle.num_tokens(), handle.num_layers())
/// }
///
/// let manager = KvCacheManager::new(KvCacheManagerConfig {
///     num_blocks: 8,
///     num_layers: 2,
///     ..KvCacheManagerConfig::default()
/// })?;
/// let handle = manager.allocate(&[1, 2, 3], &RequestOptions::default())?;
/// assert_eq!(describe(&handle), "3 tokens in 2 layers");
///
/// let shared: Arc<dyn KvCacheHandle> = handle.clone_handle()?;
/// let keys = shared.key_cache(0)?.expect("the manager has storage");
/// assert_eq!(keys.shape(), [3, 4, 64]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
///
/// A handle of one's own, here for keys and values that are there already, works wherever a
/// `dyn KvCacheHandle` does:
///
/// ```
/// use std::any::Any;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::time::Instant;
///
/// use kvspan::{
///     Attention, AttentionPool, BlockId, BlockTable, CacheHandleStats, DType, Device, KvCacheHandle,
///     KvError, Query, Result, TensorLike, TensorRef,
/// };
///
/// /// Tokens of one head with two elements.
/// #[derive(Debug)]
/// struct Rows(Vec<f32>);
///
/// impl TensorLike for Rows {
///     fn shape(&self) -> [usize; 3] {
///         [self.0.len() / 2, 1, 2]
///     }
///
///     fn dtype(&self) -> DType {
///         DType::F32
///     }
///
///     fn device(&self) -> Device {
///         Device::Cpu
///     }
///
///     fn num_segments(&self) -> usize {
///         1
///     }
///
///     fn segment(&self, index: usize) -> Option<&[u8]> {
///         (index == 0).then(|| bytemuck::cast_slice(&self.0))
///     }
/// }
///
/// /// One layer that never changes.
/// #[derive(Debug)]
/// struct Recorded {
///     id: u64,
///     table: BlockTable,
///     keys: Arc<Rows>,
///     values: Arc<Rows>,
/// }
///
/// impl Recorded {
///     fn new(keys: Vec<f32>, values: Vec<f32>) -> Result<Self> {
///         let num_tokens = keys.len() / 2;
///         let mut table = BlockTable::new(num_tokens); // one block with all of them
///         table.add_blocks(&[BlockId::new(1).expect("not the null block")])?;
///         table.extend_sequence(num_tokens)?;
///         Ok(Self::of(table, Arc::new(Rows(keys)), Arc::new(Rows(values))))
///     }
///
///     fn of(table: BlockTable, keys: Arc<Rows>, values: Arc<Rows>) -> Self {
///         static IDS: AtomicU64 = AtomicU64::new(0);
///         Self { id: IDS.fetch_add(1, Ordering::Relaxed), table, keys, values }
///     }
///
///     fn tensor(&self, layer: usize, rows: &Arc<Rows>) -> Result<Option<TensorRef>> {
///         match layer {
///             0 => Ok(Some(Arc::clone(rows) as TensorRef)),
///             _ => Err(KvError::LayerOutOfRange { layer, num_layers: 1 }),
///         }
///     }
/// }
///
/// impl KvCacheHandle for Recorded {
///     fn block_table(&self) -> &BlockTable {
///         &self.table
///     }
///
///     fn block_table_mut(&mut self) -> &mut BlockTable {
///         &mut self.table
///     }
///
///     fn as_any(&self) -> &dyn Any {
///         self
///     }
///
///     fn device(&self) -> Device {
///         Device::Cpu
///     }
///
///     fn num_layers(&self) -> usize {
///         1
///     }
///
///     fn num_heads(&self) -> usize {
///         1
///     }
///
///     fn head_dim(&self) -> usize {
///         2
///     }
///
///     fn key_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
///         self.tensor(layer, &self.keys)
///     }
///
///     fn value_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
///         self.tensor(layer, &self.values)
///     }
///
///     fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>> {
///         let (keys, values) = (Arc::clone(&self.keys), Arc::clone(&self.values));
///         Ok(Arc::new(Self::of(self.table.clone(), keys, values)))
///     }
///
///     fn stats(&self) -> CacheHandleStats {
///         CacheHandleStats {
///             memory_bytes: size_of_val(&self.keys.0[..]) + size_of_val(&self.values.0[..]),
///             blocks_allocated: 1,
///             tokens_stored: self.num_tokens(),
///             utilization: 1.0,
///             last_access: Instant::now(),
///         }
///     }
///
///     fn is_valid(&self) -> bool {
///         true
///     }
///
///     fn cache_id(&self) -> String {
///         format!("recorded-{}", self.id)
///     }
/// }
///
/// let handle = Recorded::new(vec![0.0; 4], vec![1.0, 2.0, 3.0, 4.0])?;
/// let query = Query::new(&[1.0, 1.0], [1, 1, 2])?;
/// let mut out = [0.0; 2];
/// Attention::default().attend_handle(query, &handle, 0, &AttentionPool::default(), &mut out)?;
/// assert_eq!((handle.num_tokens(), out), (2, [2.0, 3.0]));
/// # Ok::<(), KvError>(())
/// ```
pub trait KvCacheHandle: Send + Sync + fmt::Debug {
    /// Returns which blocks the sequence has.
    fn block_table(&self) -> &BlockTable;

    /// Returns the same for changing, within what the sequence has.
    fn block_table_mut(&mut self) -> &mut BlockTable;

    /// Returns the handle as what it is, to be downcast.
    fn as_any(&self) -> &dyn Any;

    /// Returns where the memory is.
    fn device(&self) -> Device;

    /// Returns the number of tokens of the sequence.
    fn num_tokens(&self) -> usize {
        self.block_table().sequence_length
    }

    /// Returns the number of layers.
    fn num_layers(&self) -> usize;

    /// Returns the number of KV heads.
    fn num_heads(&self) -> usize;

    /// Returns the number of elements of a head.
    fn head_dim(&self) -> usize;

    /// Returns the keys of a layer.
    ///
    /// # Errors
    ///
    /// [`KvError::LayerOutOfRange`](crate::KvError::LayerOutOfRange), and those of the contract.
    fn key_cache(&self, layer: usize) -> Result<Option<TensorRef>>;

    /// Returns the values of a layer.
    ///
    /// # Errors
    ///
    /// Those of [`key_cache`](Self::key_cache).
    fn value_cache(&self, layer: usize) -> Result<Option<TensorRef>>;

    /// Returns the keys and the values of a layer.
    ///
    /// Those that this crate implements are of one moment, and one view, which ends with the last of
    /// the two.
    ///
    /// # Errors
    ///
    /// Those of [`key_cache`](Self::key_cache).
    fn kv_cache(&self, layer: usize) -> Result<(Option<TensorRef>, Option<TensorRef>)> {
        Ok((self.key_cache(layer)?, self.value_cache(layer)?))
    }

    /// Returns a handle of its own, with the same tokens and another [`cache_id`](Self::cache_id).
    ///
    /// The two share memory until one of them writes, which the other does not see.
    ///
    /// # Errors
    ///
    /// Those of the contract.
    fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>>;

    /// Returns how much the sequence has, and how full that is.
    fn stats(&self) -> CacheHandleStats;

    /// Returns whether the handle can be used: false once the sequence was freed.
    fn is_valid(&self) -> bool;

    /// Returns the name of the handle, which no other one in this process has.
    fn cache_id(&self) -> String;
}

/// Where memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The host.
    #[default]
    Cpu,
}

/// What a [`KvCacheHandle`] has, in real figures. Shared memory counts for each who shares it.
#[derive(Clone, Debug)]
pub struct CacheHandleStats {
    /// Bytes of the sequence's memory, whether filled or not.
    pub memory_bytes: usize,
    /// Blocks of the sequence.
    pub blocks_allocated: usize,
    /// Tokens of the sequence.
    pub tokens_stored: usize,
    /// The share of the slots that have a token, from 0 to 1; 0 without blocks.
    pub utilization: f32,
    /// When the handle was last used to read or write, or to make one of its tensors.
    pub last_access: Instant,
}
