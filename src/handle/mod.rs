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
