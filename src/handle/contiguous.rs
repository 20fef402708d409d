//! A sequence with a [`LayerKvCache`] for each layer.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::tensor::planes;
use super::{CacheHandleStats, Device, KvCacheHandle, TensorRef};
use crate::block::BlockTable;
use crate::dtype::{Element, Transfer};
use crate::error::{KvError, Result};
use crate::ids::{BlockId, serial_number, share};
use crate::layer::{LayerKvCache, PinnedSpan};
use crate::memory::{Deadline, Source};

/// One sequence in one [`LayerKvCache`] a layer.
///
/// To the [`BlockTable`] that is a single block, number 1, as large as the capacity. The table's
/// length is that of the last call that had `&mut` on the handle; [`num_tokens`] counts the tokens
/// that all layers have.
///
/// Handles that share their layers, because one is the clone of the other, do so until one of them
/// writes, which copies the layers. Layers that someone else has a clone of are not copied: what
/// happens to them there, the handle sees.
///
/// [`num_tokens`]: KvCacheHandle::num_tokens
///
/// # Examples
///
/// ```
/// use kvspan::{ContiguousKvCacheHandle, KVCacheConfig, KvCacheHandle, LayerKvCache};
///
/// let config = KVCacheConfig { max_tokens_per_seq: 16, num_heads: 2, hidden_dim_per_head: 4 };
/// let mut handle = ContiguousKvCacheHandle::new(vec![LayerKvCache::new(config); 1])?;
/// handle.append(0, &[1.0; 16], &[2.0; 16])?;
/// assert_eq!(handle.num_tokens(), 2);
///
/// let keys = handle.key_cache(0)?.expect("layer 0 has tokens");
/// assert_eq!((keys.shape(), keys.num_segments()), ([2, 2, 4], 1));
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Debug)]
pub struct ContiguousKvCacheHandle<T: Element = f32> {
    /// `None` once the handle is closed. Shared with clones of the handle.
    layers: Option<Arc<[LayerKvCache<T>]>>,
    num_layers: usize,
    capacity: usize,
    token_shape: [usize; 2],
    table: BlockTable,
    id: u64,
    last_access: Mutex<Instant>,
}

impl<T: Element> ContiguousKvCacheHandle<T> {
    /// Makes a handle over the caches of a model's layers, the first layer first.
    ///
    /// # Errors
    ///
    /// [`KvError::InvalidConfig`] without layers, [`KvError::LayersDiffer`] if they do not all have
    /// one shape and capacity, and what is wrong with their configuration.
    pub fn new(layers: Vec<LayerKvCache<T>>) -> Result<Self> {
        let Some(first) = layers.first() else {
            return Err(KvError::InvalidConfig { field: "num_layers" });
        };
        let geometry = *first.geometry()?;
        for (layer, cache) in layers.iter().enumerate() {
            let other = cache.geometry()?;
            let differs = (other.capacity, other.token_shape())
                != (geometry.capacity, geometry.token_shape());
            if differs {
                return Err(KvError::LayersDiffer { layer });
            }
        }
        let mut table = BlockTable::new(geometry.capacity);
        table.adopt(BlockId::from_index(1).as_slice());
        let mut handle = Self {
            num_layers: layers.len(),
            layers: Some(layers.into()),
            capacity: geometry.capacity,
            token_shape: geometry.token_shape(),
            table,
            id: serial_number(),
            last_access: Mutex::new(Instant::now()),
        };
        handle.table.sequence_length = handle.num_tokens();
        Ok(handle)
    }

    /// Returns the cache of a layer.
    ///
    /// # Errors
    ///
    /// [`KvError::StaleHandle`], [`KvError::InconsistentTable`], [`KvError::LayerOutOfRange`].
    pub fn layer(&self, layer: usize) -> Result<&LayerKvCache<T>> {
        let layers = self.layers.as_ref().ok_or_else(|| self.stale())?;
        self.check_table()?;
        let num_layers = layers.len();
        layers.get(layer).ok_or(KvError::LayerOutOfRange { layer, num_layers })
    }

    /// Adds tokens to one layer, and returns their positions.
    ///
    /// # Errors
    ///
    /// Those of [`layer`](Self::layer) and of [`LayerKvCache::append`].
    pub fn append<S: Element>(
        &mut self,
        layer: usize,
        keys: &[S],
        values: &[S],
    ) -> Result<Range<usize>>
    where
        T: Transfer<S>,
    {
        self.append_from(layer, keys.into(), values.into())
    }

    pub(crate) fn append_from(
        &mut self,
        layer: usize,
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<Range<usize>> {
        self.layer(layer)?;
        let Some(layers) = &mut self.layers else { return Err(self.stale()) };
        let range = if Arc::get_mut(layers).is_some() {
            layers[layer].append_until(keys, values, Deadline::Never)?
        } else {
            let copies =
                layers.iter().map(LayerKvCache::deep_clone).collect::<Result<Arc<[_]>>>()?;
            let range = copies[layer].append_until(keys, values, Deadline::Never)?;
            *layers = copies;
            range
        };
        self.table.sequence_length = self.num_tokens();
        self.touch();
        Ok(range)
    }

    /// The table, with the length that it has now.
    #[cfg(feature = "python")]
    pub(crate) fn current_table(&self) -> BlockTable {
        BlockTable { sequence_length: self.num_tokens(), ..self.table.clone() }
    }

    /// Another handle on the same layers, until one of the two writes.
    pub(crate) fn share(&self) -> Result<Self> {
        let layers = self.layers.clone().ok_or_else(|| self.stale())?;
        self.check_table()?;
        Ok(Self {
            layers: Some(layers),
            num_layers: self.num_layers,
            capacity: self.capacity,
            token_shape: self.token_shape,
            table: self.table.clone(),
            id: serial_number(),
            last_access: Mutex::new(Instant::now()),
        })
    }

    /// Gives the layers up. Does nothing if that was done before.
    pub fn close(&mut self) {
        self.layers = None;
    }

    fn stale(&self) -> KvError {
        KvError::StaleHandle { cache_id: self.cache_id() }
    }

    /// Checks what a caller did to the table. The layers do not go by it.
    fn check_table(&self) -> Result<()> {
        self.table.validate()?;
        let block = BlockId::from_index(1);
        if self.table.physical_blocks != block.as_slice() || self.table.block_size != self.capacity
        {
            let reason = "it names blocks that the sequence does not have there";
            return Err(KvError::InconsistentTable { reason });
        }
        Ok(())
    }

    /// All tokens of a layer, however many those who have its cache as well leave in it meanwhile.
    fn pin(&self, layer: usize) -> Result<PinnedSpan<T>> {
        let cache = self.layer(layer)?;
        self.touch();
        cache.pin_until(0, None, Deadline::Never)
    }

    /// The keys and the values of a layer, of one moment.
    fn tensors(&self, layer: usize) -> Result<[Option<TensorRef>; 2]> {
        Ok(planes(self.pin(layer)?).map(Some))
    }

    fn touch(&self) {
        *self.last_access.lock() = Instant::now();
    }
}

impl<T: Element> KvCacheHandle for ContiguousKvCacheHandle<T> {
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

    fn num_tokens(&self) -> usize {
        self.layers
            .iter()
            .flat_map(|layers| layers.iter())
            .map(LayerKvCache::len)
            .min()
            .unwrap_or(0)
    }

    fn num_layers(&self) -> usize {
        self.num_layers
    }

    fn num_heads(&self) -> usize {
        let [num_heads, _] = self.token_shape;
        num_heads
    }

    fn head_dim(&self) -> usize {
        let [_, head_dim] = self.token_shape;
        head_dim
    }

    fn key_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensors(layer).map(|[keys, _]| keys)
    }

    fn value_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensors(layer).map(|[_, values]| values)
    }

    fn kv_cache(&self, layer: usize) -> Result<(Option<TensorRef>, Option<TensorRef>)> {
        self.tensors(layer).map(<(_, _)>::from)
    }

    fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>> {
        Ok(Arc::new(self.share()?))
    }

    fn stats(&self) -> CacheHandleStats {
        let layers = self.layers.iter().flat_map(|layers| layers.iter());
        let num_tokens = self.num_tokens();
        CacheHandleStats {
            memory_bytes: layers.map(LayerKvCache::nbytes).sum(),
            blocks_allocated: usize::from(self.is_valid()),
            tokens_stored: num_tokens,
            utilization: share(num_tokens, self.capacity),
            last_access: *self.last_access.lock(),
        }
    }

    fn is_valid(&self) -> bool {
        self.layers.is_some()
    }

    fn cache_id(&self) -> String {
        format!("contiguous-{}", self.id)
    }
}
