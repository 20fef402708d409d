//! Blocks by the name of their content, so that sequences with equal beginnings share them.

mod index;

use std::fmt;

use crate::block::{BlockPool, BlockState};
use crate::error::{KvError, Result};
use crate::hash::BlockKey;
use crate::ids::BlockId;
use index::KeyIndex;

/// A pool whose full blocks can be found by their [`BlockKey`]s.
///
/// A block that is [committed](Self::commit) stays findable after its last owner gave it back, until
/// it is reused for something else; the least recently used goes first, and of one sequence the end
/// before the beginning.
///
/// The [`BlockPool`] is the truth about who holds a block and whether its content has a name. The
/// index says which name, and is kept in step by the methods here.
///
/// # Errors
///
/// A call that fails leaves everything as it was. A block id that the pool does not have is
/// [`KvError::UnknownBlock`] everywhere.
///
/// # Complexity
///
/// O(1) for each block of a call, whatever the size of the pool. If duplicates are kept, then a
/// look-up costs O(duplicates of a block).
///
/// # Source
///
/// vLLM's automatic prefix caching.
///
/// # Examples
///
/// ```
/// use kvspan::{Duplicates, KeyChain, KeyRoot, PrefixCache};
///
/// let mut cache = PrefixCache::new(8, Duplicates::Merge)?;
/// let mut chain = KeyChain::new(KeyRoot::default().key()?, 4)?;
/// chain.extend(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
///
/// // The first sequence computes everything, and commits the blocks that are full.
/// let mut first = Vec::new();
/// assert_eq!(cache.acquire(chain.reusable_keys(), 3, &mut first)?, 0);
/// for (block, key) in first.iter_mut().zip(chain.block_keys()) {
///     *block = cache.commit(*block, key)?;
/// }
///
/// // An equal one shares them, and needs one new block.
/// let mut second = Vec::new();
/// assert_eq!(cache.acquire(chain.reusable_keys(), 3, &mut second)?, 2);
/// assert_eq!(second[..2], first[..2]);
/// assert_ne!(second[2], first[2]);
///
/// cache.give_back(&first)?;
/// cache.give_back(&second)?;
/// assert_eq!(cache.match_prefix(chain.block_keys()).count(), 2);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone)]
pub struct PrefixCache {
    pool: BlockPool,
    /// Has exactly the blocks that the pool keeps.
    index: KeyIndex,
    duplicates: Duplicates,
    num_evictions: u64,
}

/// What becomes of a block at its commit if another block has the same content already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Duplicates {
    /// The sequence gives it back and shares the other one.
    #[default]
    Merge,
    /// Both stay. A look-up finds one that is in use, if there is one, so that those that nobody has
    /// can be reused.
    Keep,
}

impl PrefixCache {
    /// Makes a cache over a new pool of `num_blocks` blocks.
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::new`].
    pub fn new(num_blocks: usize, duplicates: Duplicates) -> Result<Self> {
        let pool = BlockPool::new(num_blocks)?;
        let index = KeyIndex::new(num_blocks)?;
        Ok(Self { pool, index, duplicates, num_evictions: 0 })
    }

    /// Returns the pool, to ask it about states and numbers.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    // Looking up

    /// Returns the blocks of the longest beginning of `keys` that is cached or in use, without any
    /// effect on them.
    ///
    /// Nothing keeps them as they are: to use them, [`acquire`](Self::acquire) them.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> impl Iterator<Item = BlockId> {
        let in_use = |block| self.pool.state(block) == Ok(BlockState::InUse);
        keys.iter().map_while(move |key| match self.duplicates {
            Duplicates::Merge => self.index.find(key),
            Duplicates::Keep => self.index.find_preferred(key, in_use),
        })
    }

    /// Returns the key of a block; `None` if it is not committed.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn key(&self, block: BlockId) -> Result<Option<&BlockKey>> {
        Ok(self.pool.is_kept(block)?.then(|| self.index.key(block)))
    }

    /// Returns the number of committed blocks, cached or in use.
    pub fn num_committed(&self) -> usize {
        self.index.len()
    }

    /// Returns how many cached blocks have been reused so far.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    // Holding

    /// Gets the blocks of a sequence and appends them to `out`, in order: those that
    /// [match](Self::match_prefix) `keys`, and as many new ones as make `num_blocks` together.
    ///
    /// Returns how many matched. These are held before the new ones are taken, so that no new block
    /// can be one of them. The new ones may have been cached: their content is gone, and for the
    /// bytes see [`clear_dirty`](Self::clear_dirty).
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`] if there are too few blocks for what does not match.
    pub fn acquire(
        &mut self,
        keys: &[BlockKey],
        num_blocks: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<usize> {
        let start = out.len();
        out.extend(self.match_prefix(keys).take(num_blocks));
        let num_hits = out.len() - start;
        let num_new = num_blocks - num_hits;
        if let Err(error) = self.hold_sparing(&out[start..], num_new) {
            out.truncate(start);
            return Err(error);
        }
        self.take(num_new, out)?;
        Ok(num_hits)
    }

    /// Gets the blocks of several sequences, given the keys and the number of blocks of each; returns
    /// them, and how many matched, for each.
    ///
    /// All that match are held before any new one is taken, so that none of the sequences costs
    /// another one a hit.
    pub(crate) fn acquire_many<'a>(
        &mut self,
        sequences: impl Iterator<Item = (&'a [BlockKey], usize)> + Clone,
    ) -> Result<Vec<(Vec<BlockId>, usize)>> {
        let (mut hits, mut num_new) = (Vec::new(), 0_usize);
        let mut acquired = Vec::new();
        for (keys, num_blocks) in sequences.clone() {
            let start = hits.len();
            hits.extend(self.match_prefix(keys).take(num_blocks));
            let num_hits = hits.len() - start;
            num_new = num_new.saturating_add(num_blocks - num_hits);
            acquired.push((Vec::new(), num_hits));
        }
        self.hold_sparing(&hits, num_new)?;
        let mut hits = &*hits;
        for ((blocks, num_hits), (_, num_blocks)) in acquired.iter_mut().zip(sequences) {
            let (own, others) = hits.split_at(*num_hits);
            hits = others;
            blocks.reserve_exact(num_blocks);
            blocks.extend_from_slice(own);
            self.take(num_blocks - *num_hits, blocks)?;
        }
        Ok(acquired)
    }

    /// Adds a holder to each of `hits`, if `num_new` blocks can be taken beside them.
    fn hold_sparing(&mut self, hits: &[BlockId], num_new: usize) -> Result<()> {
        // Mostly there is room enough, and it does not matter which of the hits have owners.
        if self.pool.check_room(num_new, hits.len()).is_err() {
            let cached = |block: &BlockId| self.pool.state(*block) == Ok(BlockState::Cached);
            let mut spared = hits.iter().copied().filter(cached).collect::<Vec<_>>();
            // Several sequences may have hit the same block.
            spared.sort_unstable();
            spared.dedup();
            self.pool.check_room(num_new, spared.len())?;
        }
        self.pool.hold(hits)
    }

    fn take(&mut self, num_new: usize, out: &mut Vec<BlockId>) -> Result<()> {
        let Self { pool, index, num_evictions, .. } = self;
        pool.take(num_new, out, |block| {
            index.remove(block);
            *num_evictions += 1;
        })
    }

    /// Adds a holder to each of `blocks`; see [`BlockPool::hold`].
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::hold`].
    pub fn hold(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.pool.hold(blocks)
    }

    /// Takes a holder away from each of `blocks`, the last one first; see [`BlockPool::give_back`].
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::give_back`].
    pub fn give_back(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.pool.give_back(blocks)
    }

    /// Adds a pin to a block; see [`BlockPool::pin`].
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::pin`].
    pub fn pin(&mut self, block: BlockId) -> Result<()> {
        self.pool.pin(block)
    }

    /// Takes a pin away from a block; see [`BlockPool::unpin`].
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::unpin`].
    pub fn unpin(&mut self, block: BlockId) -> Result<()> {
        self.pool.unpin(block)
    }

    /// Returns whether a block still holds what a former owner wrote; see [`BlockPool::clear_dirty`].
    ///
    /// # Errors
    ///
    /// Those of [`BlockPool::clear_dirty`].
    pub fn clear_dirty(&mut self, block: BlockId) -> Result<bool> {
        self.pool.clear_dirty(block)
    }

    // Naming

    /// Puts a full block in the index, and returns the block that the sequence has from now on.
    ///
    /// It is another one if that has the same content and [duplicates](Duplicates) are merged. The
    /// sequence then has given back `block` and holds the other. To commit a block again under the
    /// same key changes nothing.
    ///
    /// # Errors
    ///
    /// [`KvError::WrongBlockState`] if the block is not in use, or committed under another key.
    pub fn commit(&mut self, block: BlockId, key: &BlockKey) -> Result<BlockId> {
        let committed = self.pool.is_kept(block)?;
        self.pool.keep(block)?;
        if committed {
            return if self.index.key(block) == key {
                Ok(block)
            } else {
                let (state, wanted) = ("committed under another key", "uncommitted");
                Err(KvError::WrongBlockState { block: block.get(), state, wanted })
            };
        }
        let Some(other) = self.index.find_or_insert(block, key) else { return Ok(block) };
        match self.duplicates {
            Duplicates::Keep => {
                self.index.insert_another(block, key);
                Ok(block)
            }
            Duplicates::Merge => {
                self.pool.forget(block)?;
                self.pool.hold(&[other])?;
                self.pool.give_back(&[block])?;
                Ok(other)
            }
        }
    }

    /// Takes a block out of the index, because its content is about to change. A block that is not in
    /// it stays as it is.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn forget(&mut self, block: BlockId) -> Result<()> {
        if self.pool.is_kept(block)? {
            self.index.remove(block);
            self.pool.forget(block)?;
        }
        Ok(())
    }

    /// Takes all blocks out of the index, which are all free then. Those that were cached are reused
    /// first, by number.
    ///
    /// # Errors
    ///
    /// [`KvError::BlocksInUse`] if some are in use or pinned.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn reset(&mut self) -> Result<()> {
        let in_use = self.pool.num_in_use();
        if in_use > 0 {
            return Err(KvError::BlocksInUse { in_use });
        }
        self.index.clear();
        self.pool.blocks().rev().try_for_each(|block| self.pool.forget(block))
    }

    /// Counts everything again that the cache and its pool keep count of, and looks up every key.
    ///
    /// # Errors
    ///
    /// [`KvError::Corrupted`], which would be a bug in this crate.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn check_integrity(&self) -> Result<()> {
        self.pool.check_integrity()?;
        let kept = |block: &BlockId| self.pool.is_kept(*block) == Ok(true);
        let counted = self.pool.blocks().filter(kept).filter(|&block| self.index.leads_to(block));
        let (recorded, counted) = (self.pool.blocks().filter(kept).count(), counted.count());
        let (what, indexed) = ("committed blocks", self.index.len());
        match recorded {
            _ if recorded != indexed => {
                Err(KvError::Corrupted { what, recorded, counted: indexed })
            }
            _ if recorded != counted => Err(KvError::Corrupted { what, recorded, counted }),
            _ => Ok(()),
        }
    }
}

/// Prints the numbers of blocks, not the blocks.
impl fmt::Debug for PrefixCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixCache")
            .field("pool", &self.pool)
            .field("duplicates", &self.duplicates)
            .field("num_committed", &self.num_committed())
            .field("num_evictions", &self.num_evictions)
            .finish_non_exhaustive()
    }
}
