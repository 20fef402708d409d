//! A sequence's hold on its blocks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLockReadGuard;

use super::Store;
use super::report::BlockCopy;
use super::state::{Fence, cache_id, stale};
use crate::block::pieces;
use crate::dtype::Element;
use crate::error::Result;
use crate::hash::BlockKey;
use crate::ids::BlockId;
use crate::memory::{BlockSlots, PinnedBlockRows};

/// The blocks of one sequence, until it is closed or dropped, or freed by its name.
///
/// Who changes a sequence has `&mut` on its handle, so that only freeing can come in between; for that
/// there is the fence.
pub(crate) struct Lease<T: Element> {
    store: Arc<Store<T>>,
    id: u64,
    fence: Arc<Fence>,
}

/// Slots of one block of a sequence that are about to change.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    pub(crate) id: u64,
    pub(crate) block_index: usize,
    /// All layers if `None`.
    pub(crate) layer: Option<usize>,
    pub(crate) slots: Range<usize>,
}

/// Proof that the sequence is not freed meanwhile.
pub(crate) type Entered<'a> = RwLockReadGuard<'a, bool>;

impl<T: Element> Lease<T> {
    pub(super) fn new(store: Arc<Store<T>>, id: u64, fence: Arc<Fence>) -> Self {
        Self { store, id, fence }
    }

    pub(crate) fn store(&self) -> &Arc<Store<T>> {
        &self.store
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn cache_id(&self) -> String {
        cache_id(self.id)
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.fence.read()
    }

    /// Keeps the sequence from being freed. Not for a thread that has it already.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        let entered = self.fence.read();
        if *entered { Ok(entered) } else { Err(stale(self.id)) }
    }

    /// Gives the blocks back; false if somebody did that before.
    pub(crate) fn close(&self) -> bool {
        close(&self.store, self.id, &self.fence)
    }

    /// The blocks, as the store knows them.
    pub(crate) fn blocks(&self, _entered: &Entered<'_>) -> Result<Vec<BlockId>> {
        Ok(self.store.state.lock().all_blocks(self.id)?.to_vec())
    }

    /// Whether the first blocks are these.
    pub(crate) fn begins_with(&self, blocks: &[BlockId], _entered: &Entered<'_>) -> Result<bool> {
        Ok(self.store.state.lock().all_blocks(self.id)?.starts_with(blocks))
    }

    /// What it takes to change `tokens` in one layer, or in all.
    pub(crate) fn wants(
        &self,
        layer: Option<usize>,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = Want> {
        let id = self.id;
        pieces(tokens, self.store.shape.block_size).map(move |(block_index, slots)| Want {
            id,
            block_index,
            layer,
            slots,
        })
    }

    /// Gets the sequence `num_new` blocks more, and blocks of its own where `tokens` are to change.
    pub(crate) fn grow(
        &self,
        layer: Option<usize>,
        tokens: Range<usize>,
        num_new: usize,
        _entered: &Entered<'_>,
    ) -> Result<(Vec<BlockId>, Vec<BlockCopy>)> {
        let wanted = self.wants(layer, tokens);
        let grant = self.store.prepare(wanted, Some((self.id, num_new)))?;
        Ok((grant.new, grant.copies.into_iter().map(|(_, copy)| copy).collect()))
    }

    /// Gives back all blocks but the first `num_blocks`; `cut` says that a part of the last one's
    /// content is given up as well.
    pub(crate) fn shrink(
        &self,
        num_blocks: usize,
        cut: bool,
        _entered: &Entered<'_>,
    ) -> Result<Option<BlockCopy>> {
        let grant = self.store.state.lock().shrink(self.id, num_blocks, cut)?;
        let grant = self.store.complete(grant)?;
        Ok(grant.copies.first().map(|&(_, copy)| copy))
    }

    /// Commits the blocks from `first` on; returns which were merged with which.
    pub(crate) fn commit(
        &self,
        first: usize,
        keys: &[BlockKey],
        _entered: &Entered<'_>,
    ) -> Result<Vec<(usize, BlockId)>> {
        self.store.state.lock().commit(self.id, first, keys)
    }

    /// A lease of its own on the first `num_blocks` blocks, of which there are as many.
    pub(crate) fn fork(
        &self,
        num_blocks: usize,
        request_id: Option<&str>,
        _entered: &Entered<'_>,
    ) -> Result<Self> {
        let (id, fence) = self.store.state.lock().fork(self.id, num_blocks, request_id)?;
        Ok(Self::new(Arc::clone(&self.store), id, fence))
    }

    /// Pins `tokens` of one layer.
    pub(crate) fn pin(
        &self,
        layer: usize,
        tokens: Range<usize>,
        _entered: &Entered<'_>,
    ) -> Result<PinnedBlocks<T>> {
        let rows = self.store.rows()?;
        let pieces = pieces(tokens, self.store.shape.block_size);
        let indices = pieces.clone().map(|(index, _)| index);
        let blocks = self.store.state.lock().pin(self.id, indices)?;
        // From here on the pins in the pool are given back whatever happens.
        let mut pinned = PinnedBlocks { store: Arc::clone(&self.store), rows: Vec::new(), blocks };
        for (&block, (_, slots)) in pinned.blocks.iter().zip(pieces) {
            pinned.rows.push(rows.pin(BlockSlots { block, layer, slots })?);
        }
        Ok(pinned)
    }
}

/// Gives the blocks of a sequence back, once nobody uses them; false if that was done before.
pub(super) fn close<T: Element>(store: &Store<T>, id: u64, fence: &Fence) -> bool {
    let mut open = fence.write();
    if !std::mem::replace(&mut *open, false) {
        return false;
    }
    let closed = store.state.lock().close(id);
    debug_assert!(closed.is_ok(), "a sequence holds its blocks: {closed:?}");
    true
}

/// Gives the blocks back, unless that was done before.
impl<T: Element> Drop for Lease<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T: Element> fmt::Debug for Lease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).finish_non_exhaustive()
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
