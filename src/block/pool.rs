//! Who holds a block.

use std::fmt;

use super::free_queue::FreeQueue;
use super::per_block;
use crate::error::{KvError, Result};
use crate::ids::{BlockId, widen};

/// The blocks of one memory: how often each is held, and in which order they are reused.
///
/// Sequences *hold* blocks, several the same one if they share its content; views *pin* them. A block
/// whose content has a name is *kept*: it can be held again after its last owner gave it back, until
/// it is reused.
///
/// ```text
///  state     holders  pins   kept  waits for reuse
///  InUse     some     any    any   no
///  Pinned    none     some   any   no: the view has to go first
///  Cached    none     none   yes   yes, behind the blocks that were given back before it
///  Free      none     none   no    yes, before all others
/// ```
///
/// # Errors
///
/// A call that fails leaves the pool as it was. A block id that the pool does not have is
/// [`KvError::UnknownBlock`] everywhere.
///
/// # Complexity
///
/// O(1) for each block of a call, whatever the size of the pool, and no allocation beyond the
/// caller's list; only [`new`](Self::new) and [`check_integrity`](Self::check_integrity) look at all
/// blocks. A block costs 20 bytes.
///
/// # Source
///
/// `PagedAttention` (Kwon et al., 2023), with the reuse order of vLLM's block pool.
///
/// # Examples
///
/// ```
/// use kvspan::{BlockPool, BlockState, KvError};
///
/// let mut pool = BlockPool::new(4)?;
/// let mut blocks = Vec::new();
/// pool.take(3, &mut blocks, |_| ())?;
/// assert_eq!(pool.num_free(), 1);
///
/// // All or nothing.
/// let refused = pool.take(2, &mut blocks, |_| ());
/// assert_eq!(refused, Err(KvError::OutOfBlocks { needed: 2, free: 1, evictable: 0, pinned: 0 }));
/// assert_eq!(blocks.len(), 3);
///
/// pool.keep(blocks[0])?; // its content has a name now
/// pool.give_back(&blocks)?;
/// assert_eq!(pool.state(blocks[0])?, BlockState::Cached);
/// assert_eq!(pool.state(blocks[1])?, BlockState::Free);
///
/// // Twice is an error where it happens.
/// assert!(matches!(pool.give_back(&blocks), Err(KvError::WrongBlockState { block: 3, .. })));
/// # Ok::<(), KvError>(())
/// ```
#[derive(Clone)]
pub struct BlockPool {
    /// The truth, by block id. The entry of the null block stays as it was made.
    slots: Vec<Slot>,
    /// Exactly the blocks without holders and pins.
    queue: FreeQueue,
    /// Blocks in the queue that are kept.
    num_cached: usize,
    /// Blocks with pins and without holders.
    num_pinned: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Sequences that hold the block.
    holders: u32,
    /// Views that pin it.
    pins: u32,
    /// Whether the content has a name, by which it may be found again.
    kept: bool,
    /// Whether the block was ever taken.
    used: bool,
    /// Whether the owner got it with the bytes of a former one and has not said that it zeroes them.
    dirty: bool,
}

/// What a block is to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Nobody has it, and it holds nothing that could be found.
    Free,
    /// Nobody has it, but until it is reused it can be held again for its content.
    Cached,
    /// At least one sequence holds it.
    InUse,
    /// No sequence holds it, but a view pins it. Becomes free, or cached, with the last pin.
    Pinned,
}

impl BlockState {
    const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Cached => "cached",
            Self::InUse => "in use",
            Self::Pinned => "given back and pinned",
        }
    }
}

impl Slot {
    const fn state(&self) -> BlockState {
        match self {
            Slot { holders: 1.., .. } => BlockState::InUse,
            Slot { pins: 1.., .. } => BlockState::Pinned,
            Slot { kept: true, .. } => BlockState::Cached,
            Slot { .. } => BlockState::Free,
        }
    }

    fn refuse<T>(&self, block: BlockId, wanted: &'static str) -> Result<T> {
        Err(KvError::WrongBlockState { block: block.get(), state: self.state().name(), wanted })
    }
}

impl BlockPool {
    /// Makes a pool of the blocks `1..=num_blocks`, all of them free.
    ///
    /// # Errors
    ///
    /// [`KvError::InvalidConfig`] if `num_blocks` is 0, [`KvError::TooLarge`] if ids can not name as
    /// many, [`KvError::OutOfMemory`].
    pub fn new(num_blocks: usize) -> Result<Self> {
        if num_blocks == 0 {
            return Err(KvError::InvalidConfig { field: "num_blocks" });
        }
        if num_blocks > BlockId::MAX_BLOCKS {
            let (what, max) = ("num_blocks", BlockId::MAX_BLOCKS);
            return Err(KvError::TooLarge { what, given: num_blocks, max });
        }
        Ok(Self {
            slots: per_block(num_blocks, Slot::default())?,
            queue: FreeQueue::new(num_blocks)?,
            num_cached: 0,
            num_pinned: 0,
        })
    }

    // Holding

    /// Takes `num_blocks` blocks that nobody has and appends them to `out`.
    ///
    /// They come from the head of the [queue](Self::free_queue): free blocks first, then cached ones,
    /// of which the least recently used first. `on_reuse` is told of each block that was cached: its
    /// content is gone. Consecutive ids come from a new pool, and from blocks that were given back
    /// together without being kept.
    ///
    /// What a former owner left in a block is still there: see [`clear_dirty`](Self::clear_dirty).
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`] if there are fewer.
    pub fn take(
        &mut self,
        num_blocks: usize,
        out: &mut Vec<BlockId>,
        mut on_reuse: impl FnMut(BlockId),
    ) -> Result<()> {
        self.check_room(num_blocks, 0)?;
        out.reserve(num_blocks);
        for _ in 0..num_blocks {
            let Some(block) = self.queue.pop_front() else { break };
            let slot = &mut self.slots[block.index()];
            slot.holders = 1;
            slot.dirty = slot.used;
            slot.used = true;
            if slot.kept {
                slot.kept = false;
                self.num_cached -= 1;
                on_reuse(block);
            }
            out.push(block);
        }
        Ok(())
    }

    /// Checks whether `needed` blocks can be taken, of which none may be one of `spared` blocks that
    /// are cached.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`] if not.
    pub(crate) fn check_room(&self, needed: usize, spared: usize) -> Result<()> {
        let (free, evictable) = (self.num_free(), self.num_cached.saturating_sub(spared));
        if needed > free + evictable {
            let pinned = self.num_pinned;
            return Err(KvError::OutOfBlocks { needed, free, evictable, pinned });
        }
        Ok(())
    }

    /// Adds a holder to each of `blocks`, which are in use, or kept and not reused yet.
    ///
    /// # Errors
    ///
    /// * [`KvError::WrongBlockState`] if a block has no holder and no content.
    /// * [`KvError::TooLarge`] if a block has more holders than can be counted.
    pub fn hold(&mut self, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            let slot = self.slot(block)?;
            if slot.holders == 0 && !slot.kept {
                return slot.refuse(block, "in use or cached");
            }
            let added = u32::try_from(blocks.len()).ok();
            if added.and_then(|added| slot.holders.checked_add(added)).is_none() {
                return too_many("the number of holders");
            }
        }
        for &block in blocks {
            self.add_holder(block);
        }
        Ok(())
    }

    /// Takes a holder away from each of `blocks`, the last one first.
    ///
    /// A block that then has none is put at the head of the queue, or, if it is kept, at its tail.
    /// With a sequence's blocks in order, its end is therefore reused before its beginning, which
    /// more sequences share. While a view pins the block it waits outside.
    ///
    /// # Errors
    ///
    /// [`KvError::WrongBlockState`] if a block is not in use: it was given back before.
    pub fn give_back(&mut self, blocks: &[BlockId]) -> Result<()> {
        for (given, &block) in blocks.iter().rev().enumerate() {
            if let Err(error) = self.remove_holder(block) {
                // Those that were queued went to its ends, so that the rest keeps its order.
                for &block in &blocks[blocks.len() - given..] {
                    self.add_holder(block);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn remove_holder(&mut self, block: BlockId) -> Result<()> {
        let slot = self.slot_mut(block)?;
        match slot.holders {
            0 => return slot.refuse(block, "in use"),
            1 => {
                slot.holders = 0;
                match slot.state() {
                    BlockState::Pinned => self.num_pinned += 1,
                    _ => self.enqueue(block),
                }
            }
            _ => slot.holders -= 1,
        }
        Ok(())
    }

    fn add_holder(&mut self, block: BlockId) {
        let slot = &mut self.slots[block.index()];
        let state = slot.state();
        slot.holders += 1;
        match state {
            BlockState::InUse => {}
            BlockState::Pinned => self.num_pinned -= 1,
            BlockState::Free => self.queue.unlink(block),
            BlockState::Cached => {
                self.num_cached -= 1;
                self.queue.unlink(block);
            }
        }
    }

    /// Puts a block without holders and pins where it waits for reuse.
    fn enqueue(&mut self, block: BlockId) {
        if self.slots[block.index()].kept {
            self.num_cached += 1;
            self.queue.push_back(block);
        } else {
            self.queue.push_front(block);
        }
    }

    // Pinning

    /// Adds a pin to a block that is in use, or that is pinned already.
    ///
    /// # Errors
    ///
    /// * [`KvError::WrongBlockState`] if it is neither.
    /// * [`KvError::TooLarge`] if it has more pins than can be counted.
    pub fn pin(&mut self, block: BlockId) -> Result<()> {
        let slot = self.slot_mut(block)?;
        match slot.state() {
            BlockState::InUse | BlockState::Pinned => {}
            BlockState::Free | BlockState::Cached => return slot.refuse(block, "in use"),
        }
        let Some(pins) = slot.pins.checked_add(1) else { return too_many("the number of pins") };
        slot.pins = pins;
        Ok(())
    }

    /// Takes a pin away. With the last one, a block that was given back meanwhile can be reused.
    ///
    /// # Errors
    ///
    /// [`KvError::WrongBlockState`] if the block is not pinned.
    pub fn unpin(&mut self, block: BlockId) -> Result<()> {
        let slot = self.slot_mut(block)?;
        if slot.pins == 0 {
            return slot.refuse(block, "pinned");
        }
        slot.pins -= 1;
        if slot.pins == 0 && slot.holders == 0 {
            self.num_pinned -= 1;
            self.enqueue(block);
        }
        Ok(())
    }

    // Content

    /// Notes that the content of a block has a name, so that the block can be held again after it was
    /// given back.
    ///
    /// # Errors
    ///
    /// [`KvError::WrongBlockState`] if the block is not in use.
    pub fn keep(&mut self, block: BlockId) -> Result<()> {
        let slot = self.slot_mut(block)?;
        if slot.holders == 0 {
            return slot.refuse(block, "in use");
        }
        slot.kept = true;
        Ok(())
    }

    /// Notes that the content of a block has no name any more. A cached block becomes free, and is the
    /// next to be reused.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn forget(&mut self, block: BlockId) -> Result<()> {
        let slot = self.slot_mut(block)?;
        let was_cached = slot.state() == BlockState::Cached;
        slot.kept = false;
        if was_cached {
            self.num_cached -= 1;
            self.queue.unlink(block);
            self.queue.push_front(block);
        }
        Ok(())
    }

    /// Returns whether a block still holds what a former owner wrote, and notes that the caller zeroes
    /// it.
    ///
    /// Meant for each block from [`take`](Self::take). The memory of a new pool is taken to be zero.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::BlockPool;
    ///
    /// let mut pool = BlockPool::new(1)?;
    /// let mut blocks = Vec::new();
    /// pool.take(1, &mut blocks, |_| ())?;
    /// assert!(!pool.clear_dirty(blocks[0])?); // it is new
    /// pool.give_back(&blocks)?;
    ///
    /// pool.take(1, &mut blocks, |_| ())?;
    /// assert!(pool.clear_dirty(blocks[1])?); // the former owner may have written to it
    /// assert!(!pool.clear_dirty(blocks[1])?);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn clear_dirty(&mut self, block: BlockId) -> Result<bool> {
        Ok(std::mem::take(&mut self.slot_mut(block)?.dirty))
    }

    // Asking

    /// Returns the number of blocks, whatever their state.
    pub fn num_blocks(&self) -> usize {
        self.slots.len() - 1
    }

    /// Returns the number of free blocks.
    pub fn num_free(&self) -> usize {
        self.queue.len() - self.num_cached
    }

    /// Returns the number of cached blocks.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// Returns the number of blocks that can not be taken, because a sequence or a view has them.
    ///
    /// At every instant this, [`num_free`](Self::num_free) and [`num_cached`](Self::num_cached) add
    /// up to [`num_blocks`](Self::num_blocks).
    pub fn num_in_use(&self) -> usize {
        self.num_blocks() - self.queue.len()
    }

    /// Returns how many of the blocks in use only a view has.
    pub fn num_pinned(&self) -> usize {
        self.num_pinned
    }

    /// Returns what a block is.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn state(&self, block: BlockId) -> Result<BlockState> {
        Ok(self.slot(block)?.state())
    }

    /// Returns the number of sequences that hold a block.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn reference_count(&self, block: BlockId) -> Result<usize> {
        Ok(widen(self.slot(block)?.holders))
    }

    /// Returns the number of views that pin a block.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn pin_count(&self, block: BlockId) -> Result<usize> {
        Ok(widen(self.slot(block)?.pins))
    }

    /// Returns whether the content of a block has a name.
    ///
    /// # Errors
    ///
    /// [`KvError::UnknownBlock`] only.
    pub fn is_kept(&self, block: BlockId) -> Result<bool> {
        Ok(self.slot(block)?.kept)
    }

    /// Returns whether a block has one holder, no pins and no name, so that its holder can change it as
    /// it likes.
    pub(crate) fn is_private(&self, block: BlockId) -> bool {
        let slot = self.slots.get(block.index());
        slot.is_some_and(|slot| matches!(slot, Slot { holders: 1, pins: 0, kept: false, .. }))
    }

    /// Returns the blocks that nobody has, from the one that is reused next to the last.
    pub fn free_queue(&self) -> impl Iterator<Item = BlockId> {
        self.queue.iter()
    }

    /// Returns all blocks by number.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + use<> {
        (1..=self.num_blocks()).filter_map(BlockId::from_index)
    }

    /// Counts everything again that the pool keeps count of.
    ///
    /// # Errors
    ///
    /// [`KvError::Corrupted`], which would be a bug in this crate.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn check_integrity(&self) -> Result<()> {
        let count = |state| self.slots.iter().skip(1).filter(|slot| slot.state() == state).count();
        let (free, cached) = (count(BlockState::Free), count(BlockState::Cached));
        expect_equal("free blocks", self.num_free(), free)?;
        expect_equal("cached blocks", self.num_cached, cached)?;
        expect_equal("pinned blocks", self.num_pinned, count(BlockState::Pinned))?;
        expect_equal("ends of the free queue", 1, usize::from(self.queue.is_ring()))?;
        let waiting = |block: &BlockId| {
            let slot = &self.slots[block.index()];
            (slot.holders, slot.pins) == (0, 0)
        };
        expect_equal(
            "blocks in the free queue",
            free + cached,
            self.queue.iter().filter(waiting).count(),
        )
    }

    /// Counts the holders again, given every block of every sequence.
    ///
    /// # Errors
    ///
    /// [`KvError::Corrupted`] if a block is held more or less often than it is given here.
    ///
    /// # Complexity
    ///
    /// O(blocks).
    pub fn check_holders(&self, held: impl IntoIterator<Item = BlockId>) -> Result<()> {
        let mut counted = per_block(self.num_blocks(), 0)?;
        for block in held {
            self.slot(block)?;
            counted[block.index()] += 1;
        }
        self.slots.iter().zip(counted).try_for_each(|(slot, counted)| {
            expect_equal("holders of a block", widen(slot.holders), counted)
        })
    }

    fn slot(&self, block: BlockId) -> Result<&Slot> {
        self.slots.get(block.index()).ok_or_else(|| unknown(block, self.num_blocks()))
    }

    fn slot_mut(&mut self, block: BlockId) -> Result<&mut Slot> {
        let num_blocks = self.num_blocks();
        self.slots.get_mut(block.index()).ok_or_else(|| unknown(block, num_blocks))
    }
}

/// Prints the numbers of blocks, not the blocks.
impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool")
            .field("num_blocks", &self.num_blocks())
            .field("num_free", &self.num_free())
            .field("num_cached", &self.num_cached())
            .field("num_in_use", &self.num_in_use())
            .field("num_pinned", &self.num_pinned())
            .finish_non_exhaustive()
    }
}

fn unknown(block: BlockId, num_blocks: usize) -> KvError {
    KvError::UnknownBlock { block: block.get(), num_blocks }
}

fn too_many<T>(what: &'static str) -> Result<T> {
    Err(KvError::TooLarge { what, given: widen(u32::MAX).saturating_add(1), max: widen(u32::MAX) })
}

fn expect_equal(what: &'static str, recorded: usize, counted: usize) -> Result<()> {
    if recorded == counted { Ok(()) } else { Err(KvError::Corrupted { what, recorded, counted }) }
}
