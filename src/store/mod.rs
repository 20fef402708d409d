//! The blocks' bytes, and everything known about the blocks behind one mutex.
//!
//! A [`Lease`] is a sequence's hold on its blocks. The store keeps its own list of them, so that no
//! list that a caller can touch is ever believed.
//!
//! * The **fence** of a lease is held shared by whoever uses its blocks, and exclusively by whoever
//!   frees them: a block can not go to another sequence while somebody still writes to it.
//! * The **state** is all bookkeeping. Nothing is copied or zeroed while it is held.
//!
//! Lock order: fences, then the state or the locks of blocks, none of which is taken under the other;
//! under both only registers of pins.

mod lease;
mod report;
mod state;

use std::sync::Arc;

pub(crate) use lease::{Entered, Growth, Lease, PinnedBlocks, Want, close_many};
pub use report::{BlockCopy, BlockPicture, Inspection, LeakReport, ManagerStats, SequenceReport};

use crate::config::{BlockGeometry, BlockShape};
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::hash::BlockKey;
use crate::ids::BlockId;
use crate::memory::BlockRows;
use crate::prefix::{Duplicates, PrefixCache};
use crate::sync::{Mutex, MutexGuard};
use lease::Fence;
use state::{Grant, Opened, State};

/// Blocks that sequences share.
#[derive(Debug)]
pub(crate) struct Store<T> {
    shape: BlockShape,
    /// `None` if only the bookkeeping is wanted.
    rows: Option<Arc<BlockRows<T>>>,
    state: Mutex<State>,
}

/// What a new sequence asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening<'a> {
    /// Of the blocks that can be shared.
    pub(crate) keys: &'a [BlockKey],
    pub(crate) num_blocks: usize,
    /// Tokens that were asked for, for the statistics.
    pub(crate) num_tokens: usize,
    pub(crate) request_id: Option<&'a str>,
}

/// Blocks of a sequence that are to be found from now on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Commit<'a> {
    pub(crate) id: u64,
    /// Index of the first.
    pub(crate) first: usize,
    pub(crate) keys: &'a [BlockKey],
}

/// What becomes of a call that needs blocks to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    Made,
    /// It fails, since nobody who has the bytes would learn of them.
    Refused,
}

impl Copies {
    /// Of `block`, the first that would be copied.
    fn check(self, block: Option<BlockId>) -> Result<()> {
        match block.filter(|_| self == Self::Refused) {
            Some(block) => Err(KvError::UnreportedCopy { block: block.get() }),
            None => Ok(()),
        }
    }
}

/// A look at the bookkeeping.
#[derive(Debug)]
pub(crate) struct Look<'a, T> {
    store: &'a Store<T>,
    state: MutexGuard<'a, State>,
}

impl<T: Element> Look<'_, T> {
    pub(crate) fn store(&self) -> &Store<T> {
        self.store
    }

    /// Whether a block has one owner, and nobody else has anything to do with it.
    #[inline]
    pub(crate) fn is_private(&self, block: BlockId) -> bool {
        self.state.cache.pool().is_private(block)
    }
}

impl<T: Element> Store<T> {
    pub(crate) fn new(
        num_blocks: usize,
        shape: BlockShape,
        duplicates: Duplicates,
        has_storage: bool,
    ) -> Result<Self> {
        let rows = if has_storage {
            let geometry = BlockGeometry::new::<T>(num_blocks, shape)?;
            Some(Arc::new(BlockRows::new(geometry)?))
        } else {
            None
        };
        let state = Mutex::new(State::new(PrefixCache::new(num_blocks, duplicates)?));
        Ok(Self { shape, rows, state })
    }

    pub(crate) fn shape(&self) -> &BlockShape {
        &self.shape
    }

    /// Bytes of a block; 0 without storage.
    pub(crate) fn block_bytes(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.geometry().block_bytes)
    }

    /// Bytes of all blocks, the null block included; 0 without storage.
    pub(crate) fn nbytes(&self) -> usize {
        let places = self.rows.as_ref().map_or(0, |rows| rows.geometry().num_places);
        places * self.block_bytes()
    }

    pub(crate) fn has_rows(&self) -> bool {
        self.rows.is_some()
    }

    /// What becomes of a call that would copy blocks and tell nobody.
    pub(crate) fn unreported_copies(&self) -> Copies {
        if self.has_rows() { Copies::Made } else { Copies::Refused }
    }

    pub(crate) fn rows(&self) -> Result<&Arc<BlockRows<T>>> {
        self.rows.as_ref().ok_or(KvError::NoStorage)
    }

    /// Opens sequences, each on the blocks that match and on new ones, which are zero.
    pub(crate) fn open(
        self: &Arc<Self>,
        openings: &[Opening<'_>],
    ) -> Result<Vec<(Lease<T>, Opened)>> {
        let fences = openings.iter().map(|_| Arc::new(Fence::new())).collect::<Vec<_>>();
        // Before anybody can find a sequence by its name: until the blocks are zero, they can not be
        // freed and go to another one.
        let entered = fences.iter().map(|fence| fence.enter()).collect::<Result<Vec<_>>>()?;
        let opened = self.state.lock().open(openings, self.shape.block_size, &fences)?;
        let zeroed = opened.iter().try_for_each(|opened| self.zero(&opened.dirty));
        drop(entered);
        let leases = opened
            .into_iter()
            .zip(fences)
            .map(|(opened, fence)| (Lease::new(Arc::clone(self), fence), opened));
        let leases = leases.collect();
        zeroed.map(|()| leases)
    }

    /// Gives back the blocks of the sequence with this name, whoever has its handle.
    pub(crate) fn free_request(&self, request_id: &str) -> Result<()> {
        let unknown = || KvError::UnknownRequest { request_id: request_id.to_owned() };
        let found = self.state.lock().find_request(request_id);
        let fence = found.ok_or_else(unknown)?;
        if lease::close(self, &fence) { Ok(()) } else { Err(unknown()) }
    }

    /// How many blocks match, without any effect on them.
    pub(crate) fn probe(&self, keys: &[BlockKey]) -> usize {
        self.state.lock().cache.match_prefix(keys).count()
    }

    pub(crate) fn reset_prefix_cache(&self) -> Result<()> {
        self.state.lock().cache.reset()
    }

    // Asking

    pub(crate) fn stats(&self) -> ManagerStats {
        let mut stats = self.state.lock().stats();
        stats.block_bytes = self.block_bytes();
        stats
    }

    pub(crate) fn inspect(&self) -> Inspection {
        self.state.lock().inspect()
    }

    pub(crate) fn leak_report(&self) -> LeakReport {
        self.state.lock().leak_report()
    }

    pub(crate) fn check_integrity(&self) -> Result<()> {
        self.state.lock().check_integrity()
    }

    // What leases are made of

    /// Zeroes what former owners left. Nobody else can reach the blocks: they were just taken.
    fn zero(&self, blocks: &[BlockId]) -> Result<()> {
        let Some(rows) = &self.rows else { return Ok(()) };
        blocks.iter().try_for_each(|&block| rows.zero(block, 0..self.shape.block_size))
    }

    /// Gives the sequence of each `wanted` block one that it alone has, or has it forget the key of
    /// the one it has, because some of its slots are about to change. The fences of all of them are
    /// held.
    pub(crate) fn prepare(&self, wanted: impl Iterator<Item = Want>) -> Result<Grant> {
        let grant = self.state.lock().prepare(wanted, |block, want| self.is_pinned(block, want))?;
        self.complete(&grant)?;
        Ok(grant)
    }

    /// Makes sequences longer, all of them or none; the slots of their new tokens are zero. The fences
    /// of all of them are held.
    pub(crate) fn grow<'a>(
        &self,
        growths: impl Iterator<Item = Growth<'a>> + Clone,
        copies: Copies,
    ) -> Result<Grant> {
        let is_pinned = |block, want: &Want| self.is_pinned(block, want);
        let grant = self.state.lock().grow(growths.clone(), copies, is_pinned)?;
        self.complete(&grant)?;
        if let Some(rows) = &self.rows {
            // What was truncated must not come back.
            for growth in growths {
                let mut slots = growth.dirty_slots(&grant);
                slots.try_for_each(|(block, slots)| rows.zero(block, slots))?;
            }
        }
        Ok(grant)
    }

    /// Has the bookkeeping stay as it is for a moment.
    pub(crate) fn look(&self) -> Look<'_, T> {
        Look { store: self, state: self.state.lock() }
    }

    /// The same if it need not wait.
    #[cfg(feature = "python")]
    pub(crate) fn try_look(&self) -> Option<Look<'_, T>> {
        self.state.try_lock().map(|state| Look { store: self, state })
    }

    fn is_pinned(&self, block: BlockId, want: &Want) -> bool {
        self.rows.as_ref().is_some_and(|rows| rows.is_pinned(block, want.layer, &want.slots))
    }

    /// Puts the bytes that belong there into blocks that were just taken.
    fn complete(&self, grant: &Grant) -> Result<()> {
        if let Some(rows) = &self.rows {
            grant.copies.iter().try_for_each(|(_, copy)| rows.copy(copy.from, copy.to))?;
        }
        self.zero(&grant.dirty)?;
        if !grant.copies.is_empty() {
            // Only now, so that nobody got the originals while they were copied.
            self.state.lock().release_originals(grant)?;
        }
        Ok(())
    }

    /// Has blocks be found, all of them or none; returns those that were merged with others: the place
    /// of the commit, the index of the block, and the other block. No fence is needed, since no content
    /// is touched.
    pub(crate) fn commit(&self, commits: &[Commit<'_>]) -> Result<Vec<(usize, usize, BlockId)>> {
        self.state.lock().commit(commits)
    }
}
