//! The front door to blocks: hands out sequences, and finds what they can share.

mod batch;
mod keyed;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::BlockShape;
use crate::dtype::{Element, Transfer};
use crate::error::{KvError, Result};
use crate::handle::{NewSequence, PagedKvCacheHandle, PagedSpan};
use crate::hash::{KeyChain, KeyRoot};
use crate::memory::{Source, Target};
use crate::prefix::Duplicates;
use crate::store::{BlockCopy, Inspection, LeakReport, ManagerStats, Store};

pub use batch::BlockTables;
pub use keyed::KeyedRequest;
pub(crate) use keyed::Prompt;

/// What a [`KvCacheManager`] is made of.
///
/// # Examples
///
/// ```
/// use kvspan::KvCacheManagerConfig;
///
/// let config = KvCacheManagerConfig { num_blocks: 512, num_layers: 24, ..Default::default() };
/// assert_eq!((config.block_size, config.num_kv_heads, config.head_dim), (16, 4, 64));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCacheManagerConfig {
    /// Blocks that sequences can have. The null block comes on top.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Layers of the model.
    pub num_layers: usize,
    /// KV heads of a layer (not query heads).
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether there is memory for the blocks' content.
    pub storage: Storage,
    /// Whether sequences share what they have in common.
    pub prefix_caching: bool,
    /// What becomes of full blocks with equal content.
    pub duplicates: Duplicates,
    /// What keys and values depend on besides the tokens: the model, for example.
    pub namespace: Option<Vec<u8>>,
    /// What the manager begins with, and [`advance_epoch`](KvCacheManager::advance_epoch) raises, to make
    /// everything older unreachable.
    pub epoch: u64,
}

impl Default for KvCacheManagerConfig {
    fn default() -> Self {
        Self {
            num_blocks: 1024,
            block_size: 16,
            num_layers: 1,
            num_kv_heads: crate::config::DEFAULT_NUM_HEADS,
            head_dim: crate::config::DEFAULT_HIDDEN_DIM_PER_HEAD,
            storage: Storage::default(),
            prefix_caching: true,
            duplicates: Duplicates::default(),
            namespace: None,
            epoch: 0,
        }
    }
}

impl KvCacheManagerConfig {
    /// The chain of a sequence that is still empty.
    fn chain(&self, options: &RequestOptions<'_>, epoch: u64) -> Result<KeyChain> {
        let root = KeyRoot {
            namespace: self.namespace.as_deref(),
            cache_salt: options.cache_salt,
            lora_id: options.lora_id,
            epoch,
        };
        let mut chain = KeyChain::new(root.key()?, self.block_size)?;
        for (block_index, extra_keys) in options.extra_keys {
            chain.set_extra_keys(*block_index, extra_keys)?;
        }
        Ok(chain)
    }
}

/// Where the content of blocks is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Storage {
    /// In one allocation, `[block][layer][K or V][slot][head][dim]`, that the manager owns. The scales
    /// of an int8 block follow its elements, `[layer][K or V][slot][head]`.
    #[default]
    Owned,
    /// Somewhere else: the manager keeps count of blocks alone, and what would read or write content
    /// is [`KvError::NoStorage`]. Before it is written there,
    /// [`prepare_write`](KvCacheManager::prepare_write) says what to copy.
    Elsewhere,
}

/// What a sequence is, besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestOptions<'a> {
    /// A name, by which the sequence can be [freed](KvCacheManager::free_request), and that no other
    /// live one has.
    pub request_id: Option<&'a str>,
    /// A secret that only those know who may share.
    pub cache_salt: Option<&'a [u8]>,
    /// The adapter that is applied.
    pub lora_id: Option<&'a [u8]>,
    /// What else decides the content of a block, the digests of its images for example: the index of
    /// the block in the sequence, and its keys.
    pub extra_keys: &'a [(usize, &'a [&'a [u8]])],
    /// Tokens to have blocks for beyond those that are given.
    pub lookahead: usize,
}

/// Blocks of keys and values that sequences with equal beginnings share.
///
/// A clone is another door to the same blocks. All methods can be called from any thread at any time.
///
/// # Life of a sequence
///
/// ```text
/// allocate     the cached beginning is found and held, and new blocks are taken, in one step
/// write        keys and values of the tokens from num_cached_tokens on, layer by layer
/// commit       says which tokens were written: full blocks can be found from then on
/// extend       makes room for more; write and commit them
/// fork         another sequence with the same tokens; a block is copied when one of them writes it
/// truncate     gives up tokens at the end
/// free         gives the blocks back; committed ones can be found until they are reused
/// ```
///
/// # Shapes
///
/// Keys and values are `[tokens, num_kv_heads, head_dim]` in C order. What element types there are, and
/// how numbers are rounded to them, is as [`LayerKvCache`](crate::LayerKvCache) says.
///
/// # Units
///
/// Positions and lengths are tokens; ranges are half-open.
///
/// # Errors
///
/// After any error everything is as it was: no order and no content has changed, and no count but that
/// of the allocations refused. Every use of a handle can be [`KvError::StaleHandle`] if its sequence was freed, [`KvError::ForeignHandle`] if
/// it belongs to another manager, and [`KvError::InconsistentTable`] after nonsense was written to its
/// block table.
///
/// # Threads
///
/// One mutex covers all bookkeeping, and nothing is copied under it. Content is guarded block by
/// block. Freeing a sequence by its name waits for whoever is writing to it.
///
/// # Memory
///
/// One allocation for all blocks, as zeros, which cost no physical memory until they are written. A
/// sequence finds zeros in its new blocks, whatever was there before. Views keep the memory.
///
/// # Source
///
/// `PagedAttention` and automatic prefix caching of vLLM.
///
/// # Examples
///
/// ```
/// use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions};
///
/// let manager = KvCacheManager::new(KvCacheManagerConfig {
///     num_blocks: 8,
///     block_size: 2,
///     num_kv_heads: 1,
///     head_dim: 1,
///     ..KvCacheManagerConfig::default()
/// })?;
/// let prompt = [11, 12, 13, 14, 15];
///
/// let mut first = manager.allocate(&prompt, &RequestOptions::default())?;
/// assert_eq!(first.num_cached_tokens(), 0);
/// manager.write(&mut first, 0, 0, &[1.0, 2.0, 3.0, 4.0, 5.0], &[0.0; 5])?;
/// manager.commit(&mut first, &prompt)?;
///
/// // Another sequence with the same prompt computes the last token only.
/// let second = manager.allocate(&prompt, &RequestOptions::default())?;
/// assert_eq!(second.num_cached_tokens(), 4);
/// let view = manager.view(&second, 0, 0, 4)?;
/// let keys: Vec<f32> = view.segments().flat_map(|segment| segment.keys.to_vec()).collect();
/// assert_eq!(keys, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
pub struct KvCacheManager<T: Element = f32> {
    config: Arc<KvCacheManagerConfig>,
    epoch: Arc<AtomicU64>,
    store: Arc<Store<T>>,
}

/// The slot of every token is an integer with a sign, as arrays have them.
const MAX_SLOTS: usize = isize::MAX.cast_unsigned();

impl KvCacheManager {
    /// Makes a manager of `f32`. For another element type see
    /// [`with_element`](KvCacheManager::with_element).
    ///
    /// # Errors
    ///
    /// Those of [`with_element`](KvCacheManager::with_element).
    pub fn new(config: KvCacheManagerConfig) -> Result<Self> {
        Self::with_element(config)
    }
}

impl<T: Element> KvCacheManager<T> {
    /// Makes a manager of any element type, as [`new`](KvCacheManager::new) does of `f32`.
    ///
    /// # Errors
    ///
    /// [`KvError::InvalidConfig`] if a number is 0, [`KvError::TooLarge`] if ids can not name as many
    /// blocks, keys as many tokens of one, or a 64-bit integer as many slots, [`KvError::PoolSizeOverflow`],
    /// [`KvError::OutOfMemory`].
    pub fn with_element(config: KvCacheManagerConfig) -> Result<Self> {
        let KvCacheManagerConfig { num_blocks, block_size, num_layers, num_kv_heads, .. } = config;
        for (field, value) in [
            ("block_size", block_size),
            ("num_layers", num_layers),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", config.head_dim),
        ] {
            if value == 0 {
                return Err(KvError::InvalidConfig { field });
            }
        }
        // Whatever no sequence could have a key of.
        config.chain(&RequestOptions::default(), config.epoch)?;
        let shape = BlockShape { block_size, num_layers, num_kv_heads, head_dim: config.head_dim };
        let has_storage = config.storage == Storage::Owned;
        let store = Store::new(num_blocks, shape, config.duplicates, has_storage)?;
        let (given, max) = (num_blocks.saturating_add(1).saturating_mul(block_size), MAX_SLOTS);
        if given > max {
            return Err(KvError::TooLarge { what: "the number of slots", given, max });
        }
        let epoch = Arc::new(AtomicU64::new(config.epoch));
        Ok(Self { config: Arc::new(config), epoch, store: Arc::new(store) })
    }

    /// Returns what the manager was made of. Its epoch is the first one.
    pub fn config(&self) -> &KvCacheManagerConfig {
        &self.config
    }

    /// Returns the bytes of all blocks, the null block included; 0 without storage.
    pub fn nbytes(&self) -> usize {
        self.store.nbytes()
    }

    // Sequences

    /// Starts a sequence on `tokens`.
    ///
    /// The longest beginning that is cached is held, in whole blocks, before the blocks for the rest
    /// are taken. At least one token is left to compute, since its output is needed.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`]; [`KvError::RequestExists`] if the name is taken;
    /// [`KvError::TooLarge`] if a salt or key has more bytes than a u32 can count.
    pub fn allocate(
        &self,
        tokens: &[u32],
        options: &RequestOptions<'_>,
    ) -> Result<PagedKvCacheHandle<T>> {
        self.open(self.new_sequence(Prompt::Tokens(tokens.to_vec()), options)?)
    }

    /// Returns how many of `tokens` would be cached, without any effect.
    ///
    /// # Errors
    ///
    /// [`KvError::TooLarge`] as in [`allocate`](Self::allocate).
    pub fn probe(&self, tokens: &[u32], options: &RequestOptions<'_>) -> Result<usize> {
        if !self.config.prefix_caching {
            return Ok(0);
        }
        self.probe_keyed(&self.block_keys(tokens, options)?)
    }

    /// Makes room for `additional` tokens at the end, which are zero.
    ///
    /// Returns what was copied, if the first of them lie in a block that others have as well. See
    /// [`BlockCopy`] for what that means without storage.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`].
    pub fn extend(
        &self,
        handle: &mut PagedKvCacheHandle<T>,
        additional: usize,
    ) -> Result<Option<BlockCopy>> {
        self.check(handle)?;
        handle.extend(&self.store, additional)
    }

    /// Makes `new_len` the length of a sequence, and gives back the blocks that it needs no more, those
    /// of a [lookahead](RequestOptions::lookahead) included. Extra keys of blocks that lose their last
    /// token are forgotten.
    ///
    /// If that cuts a committed block, then the sequence gets a copy of it, which is returned; or the
    /// block can not be found any more, if nobody else has it.
    ///
    /// # Errors
    ///
    /// [`KvError::RangeOutOfBounds`] if the sequence is shorter; [`KvError::OutOfBlocks`] if there is
    /// none for the copy.
    pub fn truncate(
        &self,
        handle: &mut PagedKvCacheHandle<T>,
        new_len: usize,
    ) -> Result<Option<BlockCopy>> {
        self.check(handle)?;
        handle.truncate(new_len)
    }

    /// Starts a sequence that shares all tokens of another one. Blocks of a
    /// [lookahead](RequestOptions::lookahead) stay with that one.
    ///
    /// When one of the two writes to a block, that block alone is copied.
    ///
    /// # Errors
    ///
    /// [`KvError::RequestExists`] if the name is taken.
    pub fn fork(
        &self,
        handle: &PagedKvCacheHandle<T>,
        request_id: Option<&str>,
    ) -> Result<PagedKvCacheHandle<T>> {
        self.check(handle)?;
        handle.fork(request_id)
    }

    /// Gives the blocks of a sequence back. Its handle is stale then.
    ///
    /// # Errors
    ///
    /// [`KvError::StaleHandle`] if that was done before. For a call that may be repeated see
    /// [`PagedKvCacheHandle::close`].
    pub fn free(&self, handle: &PagedKvCacheHandle<T>) -> Result<()> {
        self.check(handle)?;
        handle.free()
    }

    /// Gives the blocks of the sequence of this name back, wherever its handle is.
    ///
    /// # Locking
    ///
    /// Waits for a call that is using the sequence.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownRequest`] if there is none, or none any more.
    pub fn free_request(&self, request_id: &str) -> Result<()> {
        self.store.free_request(request_id)
    }

    // Content

    /// Writes keys and values of one or more tokens of a sequence in one layer.
    ///
    /// A block that other sequences have, or of which a view is alive in the way, is copied first. A
    /// committed block, which is a full one, can not be found any more, and neither it nor what follows
    /// is committed: commit those tokens again. Tokens that were committed in a block that is not full
    /// yet stay committed.
    ///
    /// # Errors
    ///
    /// In this order: [`KvError::NoStorage`], [`KvError::LengthMismatch`], [`KvError::WidthMismatch`],
    /// [`KvError::LayerOutOfRange`], [`KvError::RangeOutOfBounds`] past the length, which
    /// [`extend`](Self::extend) moves, [`KvError::NotFinite`] for int8, [`KvError::OutOfBlocks`].
    pub fn write<S: Element>(
        &self,
        handle: &mut PagedKvCacheHandle<T>,
        layer: usize,
        position: usize,
        keys: &[S],
        values: &[S],
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        self.write_from(handle, layer, position, keys.into(), values.into())
    }

    pub(crate) fn write_from(
        &self,
        handle: &mut PagedKvCacheHandle<T>,
        layer: usize,
        position: usize,
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<()> {
        self.check(handle)?;
        handle.write(layer, position, keys, values)
    }

    /// Writes one token of each of many sequences in one layer: that at the position of the same
    /// index, with the row of that index in `keys` and `values`, `[sequences, num_kv_heads,
    /// head_dim]`.
    ///
    /// # Errors
    ///
    /// [`KvError::CountMismatch`] if there are not as many positions as sequences, and those of
    /// [`write`](Self::write), as a [`KvError::BatchEntry`] where only that says which sequence it is
    /// about. Nothing is written then.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions};
    ///
    /// let config = KvCacheManagerConfig { num_kv_heads: 1, head_dim: 2, ..Default::default() };
    /// let manager = KvCacheManager::new(config)?;
    /// let mut one = manager.allocate(&[1, 2], &RequestOptions::default())?;
    /// let mut other = manager.allocate(&[3], &RequestOptions::default())?;
    /// let rows = [1.0, 1.0, 2.0, 2.0];
    /// manager.write_many(0, &mut [&mut one, &mut other], &[1, 0], &rows, &rows)?;
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn write_many<S: Element>(
        &self,
        layer: usize,
        handles: &mut [&mut PagedKvCacheHandle<T>],
        positions: &[usize],
        keys: &[S],
        values: &[S],
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        self.write_many_from(layer, handles, positions, keys.into(), values.into())
    }

    pub(crate) fn write_many_from(
        &self,
        layer: usize,
        handles: &mut [&mut PagedKvCacheHandle<T>],
        positions: &[usize],
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<()> {
        handles.iter().try_for_each(|handle| self.check(handle))?;
        PagedKvCacheHandle::write_many(&self.store, layer, handles, positions, keys, values)
    }

    /// Makes the blocks of the tokens `start..end` the sequence's own, as [`write`](Self::write) does
    /// first, and returns those that were copied for that.
    ///
    /// Whoever keeps the content [elsewhere](Storage::Elsewhere) calls this before each write to slots
    /// of the sequence, and makes the copies: other sequences have the same slots after a
    /// [`fork`](Self::fork), even those that were made room for before it, and what is committed must
    /// not change. As with a write, a committed block can not be found any more, and neither it nor what
    /// follows is committed. It holds until the sequence is forked or those tokens are committed.
    ///
    /// # Errors
    ///
    /// [`KvError::InvertedRange`]; [`KvError::RangeOutOfBounds`] past the length;
    /// [`KvError::OutOfBlocks`] if there are too few for the copies.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions, Storage};
    ///
    /// let config = KvCacheManagerConfig { storage: Storage::Elsewhere, ..Default::default() };
    /// let manager = KvCacheManager::<f32>::new(config)?;
    /// let mut handle = manager.allocate(&[1, 2, 3], &RequestOptions::default())?;
    /// manager.extend(&mut handle, 1)?;
    /// let mut fork = manager.fork(&handle, None)?;
    ///
    /// for copy in manager.prepare_write(&mut fork, 3, 4)? {
    ///     println!("copy block {} to block {}", copy.from, copy.to);
    /// }
    /// assert_ne!(handle.block_table().slot(3)?, fork.block_table().slot(3)?);
    /// # use kvspan::KvCacheHandle;
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn prepare_write(
        &self,
        handle: &mut PagedKvCacheHandle<T>,
        start: usize,
        end: usize,
    ) -> Result<Vec<BlockCopy>> {
        self.check(handle)?;
        handle.prepare_write(start..end)
    }

    /// Borrows the tokens `start..end` of one layer where they lie, for as long as the result lives.
    ///
    /// # Errors
    ///
    /// [`KvError::LayerOutOfRange`], [`KvError::InvertedRange`], [`KvError::RangeOutOfBounds`],
    /// [`KvError::NoStorage`].
    pub fn view(
        &self,
        handle: &PagedKvCacheHandle<T>,
        layer: usize,
        start: usize,
        end: usize,
    ) -> Result<PagedSpan<T>> {
        self.check(handle)?;
        handle.view(layer, start, end)
    }

    /// Copies the tokens `start..end` of one layer to the start of two slices, which can be longer.
    ///
    /// # Errors
    ///
    /// [`KvError::NoStorage`], then [`KvError::OutputTooShort`], then those of [`view`](Self::view).
    pub fn read_range_into<S: Element>(
        &self,
        handle: &PagedKvCacheHandle<T>,
        layer: usize,
        start: usize,
        end: usize,
        keys_out: &mut [S],
        values_out: &mut [S],
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        let (mut keys, mut values) = (keys_out.into(), values_out.into());
        self.read_range_to(handle, layer, start..end, &mut keys, &mut values)
    }

    pub(crate) fn read_range_to(
        &self,
        handle: &PagedKvCacheHandle<T>,
        layer: usize,
        range: Range<usize>,
        keys: &mut Target<'_, T>,
        values: &mut Target<'_, T>,
    ) -> Result<()> {
        self.check(handle)?;
        handle.read_range_into(layer, range, keys, values)
    }

    #[cfg(feature = "python")]
    pub(crate) fn check_readable(
        &self,
        handle: &PagedKvCacheHandle<T>,
        layer: usize,
        start: usize,
        end: Option<usize>,
    ) -> Result<Range<usize>> {
        self.check(handle)?;
        handle.check_readable(layer, start, end)
    }

    /// Says that `tokens` are what follows the committed ones, and that their keys and values are
    /// written in all layers. The blocks that are full can be found from now on.
    ///
    /// A block that has the same content as another one is given back, and the sequence shares the
    /// other, so that its block table and its slots change, unless
    /// [duplicates](KvCacheManagerConfig::duplicates) are [kept](Duplicates::Keep).
    ///
    /// # Errors
    ///
    /// [`KvError::NoRoomToCommit`] if the sequence has no room for as many tokens;
    /// [`KvError::TokenMismatch`] if it was allocated with other ones; [`KvError::WrongBlockState`] if
    /// a sequence that shares the block has committed it with other tokens.
    pub fn commit(&self, handle: &mut PagedKvCacheHandle<T>, tokens: &[u32]) -> Result<()> {
        self.check(handle)?;
        handle.commit(&self.store, tokens)
    }

    /// Returns the epoch of the sequences and keys that are made now.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Raises the epoch by one, and returns it: what was computed before can not be found any more.
    ///
    /// This is what to call once the weights of the model have changed. Nothing has to stop for it:
    /// sequences that live, and their forks, go on in the epoch in which they began, so that what they
    /// commit later can not be found either. Only with a [`KeyChain`] that was made before can it, for
    /// that belongs to its epoch as well: make a new one. Blocks of older epochs are reused when their
    /// turn comes.
    ///
    /// All clones of the manager have one epoch.
    ///
    /// # Errors
    ///
    /// [`KvError::LastEpoch`] if there is no larger one.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions};
    ///
    /// let manager = KvCacheManager::new(KvCacheManagerConfig::default())?;
    /// let options = RequestOptions::default();
    /// let mut handle = manager.allocate(&[7; 40], &options)?;
    /// manager.commit(&mut handle, &[7; 40])?;
    /// assert_eq!(manager.probe(&[7; 40], &options)?, 32);
    ///
    /// assert_eq!(manager.advance_epoch()?, 1);
    /// assert_eq!(manager.probe(&[7; 40], &options)?, 0);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn advance_epoch(&self) -> Result<u64> {
        let next = |epoch: u64| epoch.checked_add(1);
        match self.epoch.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
            Ok(last) => Ok(last + 1),
            Err(epoch) => Err(KvError::LastEpoch { epoch }),
        }
    }

    /// Makes everything that is cached impossible to find, while no sequence lives. See
    /// [`advance_epoch`](Self::advance_epoch) for what can be called under load.
    ///
    /// # Errors
    ///
    /// [`KvError::BlocksInUse`] if some are in use or pinned.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn reset_prefix_cache(&self) -> Result<()> {
        self.store.reset_prefix_cache()
    }

    // Asking

    /// Returns the numbers, all of one instant.
    pub fn stats(&self) -> ManagerStats {
        self.store.stats()
    }

    /// Returns a picture of all blocks.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn inspect(&self) -> Inspection {
        self.store.inspect()
    }

    /// Returns who holds blocks, and which ones only views keep.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn leak_report(&self) -> LeakReport {
        self.store.leak_report()
    }

    /// Counts everything again that is kept count of.
    ///
    /// # Errors
    ///
    /// [`KvError::Corrupted`], which would be a bug in this crate.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn check_integrity(&self) -> Result<()> {
        self.store.check_integrity()
    }

    fn check(&self, handle: &PagedKvCacheHandle<T>) -> Result<()> {
        handle.check_store(&self.store)
    }

    fn open(&self, sequence: NewSequence<'_>) -> Result<PagedKvCacheHandle<T>> {
        let opened = PagedKvCacheHandle::open(&self.store, vec![sequence])?;
        let none = KvError::Corrupted { what: "sequences opened", recorded: 1, counted: 0 };
        opened.into_iter().next().ok_or(none)
    }
}

/// Shares the blocks and the epoch.
impl<T: Element> Clone for KvCacheManager<T> {
    fn clone(&self) -> Self {
        let (config, epoch) = (Arc::clone(&self.config), Arc::clone(&self.epoch));
        Self { config, epoch, store: Arc::clone(&self.store) }
    }
}

/// Says the configuration and the numbers, never the content.
impl<T: Element> fmt::Debug for KvCacheManager<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCacheManager")
            .field("config", &self.config)
            .field("epoch", &self.epoch())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
