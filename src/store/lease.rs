//! A sequence's hold on its blocks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::report::BlockCopy;
use super::state::{Grant, cache_id, stale};
use super::{Copies, Store};
use crate::block::segments;
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::ids::{BlockId, serial_number};
use crate::memory::{BlockSlots, PinnedBlockRows};
use crate::sync::{AtomicBool, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The blocks of one sequence, until it is closed or dropped, or freed by its name.
///
/// Who changes a sequence has `&mut` on its handle, so that only freeing can come in between; for that
/// there is the fence.
pub(crate) struct Lease<T: Element> {
    store: Arc<Store<T>>,
    fence: Arc<Fence>,
}

/// What keeps a sequence from being freed while its blocks are used. See the module above.
#[derive(Debug)]
pub(crate) struct Fence {
    /// The number of the sequence.
    id: u64,
    users: RwLock<()>,
    /// Cleared with `users` held exclusively, before the blocks go back. Who finds it set while it has
    /// the state can therefore be sure that they have not gone back yet.
    open: AtomicBool,
}

/// Proof that the sequence is not freed meanwhile.
pub(crate) type Entered<'a> = RwLockReadGuard<'a, ()>;

impl Fence {
    pub(super) fn new() -> Self {
        Self { id: serial_number(), users: RwLock::new(()), open: AtomicBool::new(true) }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.is_open() { Ok(()) } else { Err(stale(self.id)) }
    }

    /// Keeps the sequence from being freed. Not for a thread that has it already.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let entered = self.users.read();
        self.check_open().map(|()| entered)
    }

    fn wait_until_unused(&self) -> RwLockWriteGuard<'_, ()> {
        self.users.write()
    }
}

/// Slots of one block of a sequence that are about to change.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    pub(crate) id: u64,
    pub(crate) block_index: usize,
    pub(crate) block: BlockId,
    /// All layers if `None`.
    pub(crate) layer: Option<usize>,
    pub(crate) slots: Range<usize>,
}

/// What it takes to make a sequence longer.
#[derive(Clone, Debug)]
pub(crate) struct Growth<'a> {
    pub(super) fence: &'a Fence,
    /// All of the sequence.
    blocks: &'a [BlockId],
    block_size: usize,
    /// The new tokens that lie in `blocks`.
    tokens: Range<usize>,
    /// Those of them whose slots are not zero.
    pub(super) dirty: Range<usize>,
    /// Blocks that it needs besides.
    pub(crate) num_new: usize,
}

impl<'a> Growth<'a> {
    pub(crate) fn enter(&self) -> Result<Entered<'a>> {
        self.fence.enter()
    }

    /// What changes in the blocks that are there.
    pub(super) fn wants(&self) -> impl Iterator<Item = Want> {
        wants(self.fence.id, self.blocks, self.block_size, None, self.tokens.clone())
    }

    /// The slots that are not zero, in the blocks that the sequence has after `grant`.
    pub(super) fn dirty_slots(
        &self,
        grant: &Grant,
    ) -> impl Iterator<Item = (BlockId, Range<usize>)> {
        segments(self.dirty.clone(), self.block_size).map(move |(block_index, slots)| {
            let is_here = |(id, copy): &&(u64, BlockCopy)| {
                *id == self.fence.id && copy.block_index == block_index
            };
            let copy = grant.copies.iter().find(is_here);
            (copy.map_or(self.blocks[block_index], |(_, copy)| copy.to), slots)
        })
    }
}

fn wants(
    id: u64,
    blocks: &[BlockId],
    block_size: usize,
    layer: Option<usize>,
    tokens: Range<usize>,
) -> impl Iterator<Item = Want> {
    segments(tokens, block_size).map(move |(block_index, slots)| {
        let block = blocks[block_index];
        Want { id, block_index, block, layer, slots }
    })
}

impl<T: Element> Lease<T> {
    pub(super) fn new(store: Arc<Store<T>>, fence: Arc<Fence>) -> Self {
        Self { store, fence }
    }

    pub(crate) fn store(&self) -> &Arc<Store<T>> {
        &self.store
    }

    pub(crate) fn id(&self) -> u64 {
        self.fence.id
    }

    pub(crate) fn cache_id(&self) -> String {
        cache_id(self.id())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.fence.is_open()
    }

    /// Whether it is one of `store`, and open.
    pub(crate) fn is_open_in(&self, store: &Store<T>) -> bool {
        std::ptr::eq(&raw const *self.store, store) && self.fence.is_open()
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        self.fence.check_open()
    }

    /// Keeps the sequence from being freed. Not for a thread that has it already.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        self.fence.enter()
    }

    /// Gives the blocks back; false if somebody did that before.
    pub(crate) fn close(&self) -> bool {
        close(&self.store, &self.fence)
    }

    /// The blocks, as the store knows them.
    pub(crate) fn blocks(&self, _entered: &Entered<'_>) -> Result<Vec<BlockId>> {
        Ok(self.store.state.lock().all_blocks(self.id())?.to_vec())
    }

    /// Whether the first blocks are these.
    pub(crate) fn begins_with(&self, blocks: &[BlockId], _entered: &Entered<'_>) -> Result<bool> {
        Ok(self.store.state.lock().all_blocks(self.id())?.starts_with(blocks))
    }

    /// What it takes to change `tokens`, in all layers if `layer` is `None`, of a sequence that has these
    /// `blocks`.
    pub(crate) fn wants(
        &self,
        blocks: &[BlockId],
        layer: Option<usize>,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = Want> {
        wants(self.id(), blocks, self.store.shape.block_size, layer, tokens)
    }

    /// What it takes to have room for `tokens` more, of a sequence that has these `blocks`, and whose
    /// slots are zero from `high_water` on.
    pub(crate) fn growth<'a>(
        &'a self,
        blocks: &'a [BlockId],
        tokens: Range<usize>,
        high_water: usize,
    ) -> Growth<'a> {
        let block_size = self.store.shape.block_size;
        let Range { start, end } = tokens;
        let capacity = blocks.len() * block_size;
        let inside = start..end.min(capacity);
        let dirty_end = if self.store.has_rows() { high_water } else { 0 };
        let num_new = end.saturating_sub(capacity).div_ceil(block_size);
        let dirty = start..inside.end.min(dirty_end);
        Growth { fence: &self.fence, blocks, block_size, dirty, tokens: inside, num_new }
    }

    /// Gives back all blocks but the first `num_blocks`; `cut` says that a part of the last one's
    /// content is given up as well.
    pub(crate) fn shrink(
        &self,
        num_blocks: usize,
        cut: bool,
        copies: Copies,
        _entered: &Entered<'_>,
    ) -> Result<Option<BlockCopy>> {
        let grant = self.store.state.lock().shrink(self.id(), num_blocks, cut, copies)?;
        self.store.complete(&grant)?;
        Ok(grant.copies.first().map(|&(_, copy)| copy))
    }

    /// A lease of its own on the first `num_blocks` blocks, of which there are as many.
    pub(crate) fn fork(
        &self,
        num_blocks: usize,
        request_id: Option<&str>,
        _entered: &Entered<'_>,
    ) -> Result<Self> {
        let fence = self.store.state.lock().fork(self.id(), num_blocks, request_id)?;
        Ok(Self::new(Arc::clone(&self.store), fence))
    }

    /// Pins `tokens` of one layer.
    pub(crate) fn pin(
        &self,
        layer: usize,
        tokens: Range<usize>,
        _entered: &Entered<'_>,
    ) -> Result<PinnedBlocks<T>> {
        let rows = self.store.rows()?;
        let segments = segments(tokens, self.store.shape.block_size);
        let indices = segments.clone().map(|(index, _)| index);
        let blocks = self.store.state.lock().pin(self.id(), indices)?;
        // From here on the pins in the pool are given back whatever happens.
        let mut pinned = PinnedBlocks { store: Arc::clone(&self.store), rows: Vec::new(), blocks };
        for (&block, (_, slots)) in pinned.blocks.iter().zip(segments) {
            pinned.rows.push(rows.pin(BlockSlots { block, layer, slots })?);
        }
        Ok(pinned)
    }
}

/// Gives the blocks of a sequence back, once nobody uses them; false if that was done before.
pub(super) fn close<T: Element>(store: &Store<T>, fence: &Fence) -> bool {
    let _alone = fence.wait_until_unused();
    if !fence.open.swap(false, Ordering::AcqRel) {
        return false;
    }
    let closed = store.state.lock().close(fence.id);
    debug_assert!(closed.is_ok(), "a sequence holds its blocks: {closed:?}");
    true
}

/// Gives the blocks of many sequences back, one after the other, once nobody uses any of them; or none.
pub(crate) fn close_many<T: Element>(store: &Store<T>, leases: &[&Lease<T>]) -> Result<()> {
    // In the order of their numbers, whoever else does this.
    let mut ordered = leases.to_vec();
    ordered.sort_unstable_by_key(|lease| lease.id());
    if let Some([lease, _]) = ordered.array_windows().find(|[left, right]| left.id() == right.id())
    {
        return Err(KvError::DuplicateHandle { cache_id: lease.cache_id() });
    }
    let _alone = ordered.iter().map(|lease| lease.fence.wait_until_unused()).collect::<Vec<_>>();
    leases.iter().try_for_each(|lease| lease.check_open())?;
    let mut state = store.state.lock();
    for lease in leases {
        lease.fence.open.store(false, Ordering::Release);
        let closed = state.close(lease.id());
        debug_assert!(closed.is_ok(), "a sequence holds its blocks: {closed:?}");
    }
    Ok(())
}

/// Gives the blocks back, unless that was done before.
impl<T: Element> Drop for Lease<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T: Element> fmt::Debug for Lease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// Tokens of one layer that do not change, and whose blocks go to nobody else, while this lives.
pub(crate) struct PinnedBlocks<T: Element> {
    store: Arc<Store<T>>,
    rows: Vec<PinnedBlockRows<T>>,
    /// Have a pin each in the pool.
    blocks: Vec<BlockId>,
}

impl<T: Element> PinnedBlocks<T> {
    pub(crate) fn store(&self) -> &Store<T> {
        &self.store
    }

    /// One for each block, in order.
    pub(crate) fn rows(&self) -> &[PinnedBlockRows<T>] {
        &self.rows
    }
}

impl<T: Element> Drop for PinnedBlocks<T> {
    fn drop(&mut self) {
        // The rows first: who gets a block zeroes it.
        self.rows.clear();
        let unpinned = self.store.state.lock().unpin(&self.blocks);
        debug_assert!(unpinned.is_ok(), "a view has its pins: {unpinned:?}");
    }
}

impl<T: Element> fmt::Debug for PinnedBlocks<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBlocks").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}
