//! All bookkeeping, as a plain structure: what happens in one critical section is one method here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;

use super::Opening;
use super::lease::Want;
use super::report::{
    BlockCopy, BlockPicture, Inspection, LeakReport, ManagerStats, SequenceReport,
};
use crate::error::{KvError, Result};
use crate::hash::BlockKey;
use crate::ids::{BlockId, lengthen, serial_number};
use crate::prefix::PrefixCache;

/// Says whether the lease is open. See the module above.
pub(super) type Fence = RwLock<bool>;

/// Who has what.
///
/// # Invariants
///
/// A block of the pool has as many holders as it stands in `blocks` and `originals` of all sequences.
#[derive(Debug)]
pub(super) struct State {
    pub(super) cache: PrefixCache,
    sequences: BTreeMap<u64, Sequence>,
    requests: BTreeMap<String, u64>,
    counters: Counters,
}

#[derive(Debug)]
struct Sequence {
    request_id: Option<String>,
    /// In the order of its tokens.
    blocks: Vec<BlockId>,
    /// Blocks that are being copied, and that are given back afterwards.
    originals: Vec<BlockId>,
    fence: Arc<Fence>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    query_tokens: u64,
    hit_tokens: u64,
    num_allocations: u64,
    num_failures: u64,
    num_copies: u64,
}

/// A sequence that was just opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) id: u64,
    pub(super) blocks: Vec<BlockId>,
    pub(super) num_hits: usize,
    /// New blocks that are not zero.
    pub(super) dirty: Vec<BlockId>,
}

/// Blocks that a sequence was just given.
#[derive(Debug, Default)]
pub(crate) struct Grant {
    /// New ones, at its end.
    pub(crate) new: Vec<BlockId>,
    /// New ones in the place of others, whose content they get, and the sequence of each.
    pub(crate) copies: Vec<(u64, BlockCopy)>,
    /// New blocks that are not zero.
    pub(super) dirty: Vec<BlockId>,
}

/// The name of the handle of a sequence.
pub(super) fn cache_id(id: u64) -> String {
    format!("paged-{id}")
}

impl State {
    pub(super) fn new(cache: PrefixCache) -> Self {
        let (sequences, requests, counters) = Default::default();
        Self { cache, sequences, requests, counters }
    }

    pub(super) fn open(
        &mut self,
        opening: &Opening<'_>,
        block_size: usize,
        fence: &Arc<Fence>,
    ) -> Result<Opened> {
        let opened = self.try_open(opening, fence);
        match &opened {
            Ok(opened) => {
                let hit_tokens = opened.num_hits.saturating_mul(block_size);
                self.counters.num_allocations += 1;
                self.counters.query_tokens += lengthen(opening.num_tokens);
                self.counters.hit_tokens += lengthen(hit_tokens);
            }
            Err(_) => self.counters.num_failures += 1,
        }
        opened
    }

    fn try_open(&mut self, opening: &Opening<'_>, fence: &Arc<Fence>) -> Result<Opened> {
        self.check_request_id(opening.request_id)?;
        let mut blocks = Vec::new();
        let num_hits = self.cache.acquire(opening.keys, opening.num_blocks, &mut blocks)?;
        let dirty = self.take_dirty(&blocks[num_hits..])?;
        let id = self.register(opening.request_id, blocks.clone(), fence);
        Ok(Opened { id, blocks, num_hits, dirty })
    }

    /// Opens a sequence on the blocks that another one has.
    pub(super) fn fork(
        &mut self,
        id: u64,
        num_blocks: usize,
        request_id: Option<&str>,
    ) -> Result<(u64, Arc<Fence>)> {
        self.check_request_id(request_id)?;
        let blocks = self.sequence(id)?.blocks[..num_blocks].to_vec();
        self.cache.hold(&blocks)?;
        let fence = Arc::new(Fence::new(true));
        Ok((self.register(request_id, blocks, &fence), fence))
    }

    fn check_request_id(&self, request_id: Option<&str>) -> Result<()> {
        match request_id.filter(|&request_id| self.requests.contains_key(request_id)) {
            Some(taken) => Err(KvError::RequestExists { request_id: taken.to_owned() }),
            None => Ok(()),
        }
    }

    fn register(
        &mut self,
        request_id: Option<&str>,
        blocks: Vec<BlockId>,
        fence: &Arc<Fence>,
    ) -> u64 {
        let id = serial_number();
        if let Some(request_id) = request_id {
            self.requests.insert(request_id.to_owned(), id);
        }
        let (request_id, originals) = (request_id.map(str::to_owned), Vec::new());
        let sequence = Sequence { request_id, blocks, originals, fence: Arc::clone(fence) };
        self.sequences.insert(id, sequence);
        id
    }

    pub(super) fn find_request(&self, request_id: &str) -> Option<(u64, Arc<Fence>)> {
        let id = *self.requests.get(request_id)?;
        Some((id, Arc::clone(&self.sequences.get(&id)?.fence)))
    }

    /// Takes back everything that the sequence holds.
    pub(super) fn close(&mut self, id: u64) -> Result<()> {
        let Some(sequence) = self.sequences.remove(&id) else { return Ok(()) };
        if let Some(request_id) = &sequence.request_id {
            self.requests.remove(request_id);
        }
        self.cache.give_back(&sequence.originals)?;
        self.cache.give_back(&sequence.blocks)
    }

    /// Decides first, then takes everything or nothing; see [`Store::prepare`](super::Store).
    pub(super) fn prepare(
        &mut self,
        wanted: impl Iterator<Item = Want>,
        grow: Option<(u64, usize)>,
        is_pinned: impl Fn(BlockId, &Want) -> bool,
    ) -> Result<Grant> {
        let (mut replaced, mut renamed) = (Vec::new(), Vec::new());
        // How many of the sequences that have a block leave it to the others; the last one keeps it.
        let mut leaving = BTreeMap::new();
        for want in wanted {
            let block = self.block(want.id, want.block_index)?;
            let others = self.cache.pool().reference_count(block)?.saturating_sub(1);
            let is_shared = others > 0 && others > *leaving.get(&block).unwrap_or(&0);
            if is_shared || is_pinned(block, &want) {
                replaced.push((want.id, want.block_index, block));
                if others > 0 {
                    *leaving.entry(block).or_insert(0) += 1;
                }
            } else if self.cache.key(block)?.is_some() {
                renamed.push(block);
            }
        }
        let num_new = grow.map_or(0, |(_, num_new)| num_new);
        if replaced.is_empty() && renamed.is_empty() && num_new == 0 {
            return Ok(Grant::default());
        }
        let mut new = Vec::new();
        self.cache.acquire(&[], replaced.len().saturating_add(num_new), &mut new)?;
        let grown = new.split_off(replaced.len());
        let dirty = self.take_dirty(&grown)?;
        for block in renamed {
            self.cache.forget(block)?;
        }
        if let Some((id, _)) = grow {
            self.sequence_mut(id)?.blocks.extend_from_slice(&grown);
        }
        let copies = self.replace(replaced.into_iter().zip(new))?;
        Ok(Grant { new: grown, copies, dirty })
    }

    /// Puts new blocks in the place of others, which stay held until they are copied.
    fn replace(
        &mut self,
        replaced: impl Iterator<Item = ((u64, usize, BlockId), BlockId)>,
    ) -> Result<Vec<(u64, BlockCopy)>> {
        let mut copies = Vec::new();
        for ((id, block_index, from), to) in replaced {
            // The copy overwrites all of it.
            self.cache.clear_dirty(to)?;
            let sequence = self.sequence_mut(id)?;
            sequence.blocks[block_index] = to;
            sequence.originals.push(from);
            copies.push((id, BlockCopy { block_index, from, to }));
        }
        self.counters.num_copies += lengthen(copies.len());
        Ok(copies)
    }

    pub(super) fn release_originals(&mut self, grant: &Grant) -> Result<()> {
        for &(id, _) in &grant.copies {
            let originals = std::mem::take(&mut self.sequence_mut(id)?.originals);
            self.cache.give_back(&originals)?;
        }
        Ok(())
    }

    /// Takes the blocks from `num_blocks` on back. If the last one of the rest is `cut`, and its
    /// content has a name, then it loses that, or is replaced by a copy.
    pub(super) fn shrink(&mut self, id: u64, num_blocks: usize, cut: bool) -> Result<Grant> {
        let blocks = &self.sequence(id)?.blocks;
        let tail = blocks[num_blocks..].to_vec();
        let last = if cut { blocks[..num_blocks].last().copied() } else { None };
        let pool = self.cache.pool();
        let (mut replaced, mut renamed) = (None, None);
        if let Some(last) = last.filter(|&last| pool.is_kept(last) == Ok(true)) {
            if pool.reference_count(last)? > 1 {
                replaced = Some((id, num_blocks - 1, last));
                let comes_free = |&block: &BlockId| {
                    pool.reference_count(block) == Ok(1) && pool.pin_count(block) == Ok(0)
                };
                if !tail.iter().any(comes_free) {
                    pool.check_room(1, 0)?;
                }
            } else {
                renamed = Some(last);
            }
        }
        self.cache.give_back(&tail)?;
        self.sequence_mut(id)?.blocks.truncate(num_blocks);
        if let Some(block) = renamed {
            self.cache.forget(block)?;
        }
        let mut new = Vec::new();
        self.cache.acquire(&[], usize::from(replaced.is_some()), &mut new)?;
        let copies = self.replace(replaced.into_iter().zip(new))?;
        Ok(Grant { copies, ..Grant::default() })
    }

    /// Commits the blocks from `first` on under `keys`; returns those that were merged with others.
    pub(super) fn commit(
        &mut self,
        id: u64,
        first: usize,
        keys: &[BlockKey],
    ) -> Result<Vec<(usize, BlockId)>> {
        let blocks = self.blocks(id, first..first.saturating_add(keys.len()))?.to_vec();
        for (&block, key) in blocks.iter().zip(keys) {
            if self.cache.key(block)?.is_some_and(|own| own != key) {
                let (state, wanted) = ("committed under another key", "uncommitted");
                return Err(KvError::WrongBlockState { block: block.get(), state, wanted });
            }
        }
        let mut merged = Vec::new();
        for ((index, block), key) in (first..).zip(blocks).zip(keys) {
            let other = self.cache.commit(block, key)?;
            if other != block {
                self.sequence_mut(id)?.blocks[index] = other;
                merged.push((index, other));
            }
        }
        Ok(merged)
    }

    /// Pins blocks of a sequence, each as often as it is given; returns which they are.
    pub(super) fn pin(
        &mut self,
        id: u64,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Vec<BlockId>> {
        let blocks = indices.map(|index| self.block(id, index)).collect::<Result<Vec<_>>>()?;
        for (pinned, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.cache.pin(block) {
                self.unpin(&blocks[..pinned])?;
                return Err(error);
            }
        }
        Ok(blocks)
    }

    pub(super) fn unpin(&mut self, blocks: &[BlockId]) -> Result<()> {
        // Those of a freed sequence go back as they do without views: the last one first.
        blocks.iter().rev().try_for_each(|&block| self.cache.unpin(block))
    }

    // Asking

    /// All blocks of a sequence.
    pub(super) fn all_blocks(&self, id: u64) -> Result<&[BlockId]> {
        Ok(&self.sequence(id)?.blocks)
    }

    fn blocks(&self, id: u64, indices: Range<usize>) -> Result<&[BlockId]> {
        let blocks = &self.sequence(id)?.blocks;
        let (block_index, num_blocks) = (indices.end.saturating_sub(1), blocks.len());
        blocks.get(indices).ok_or(KvError::BlockIndexOutOfRange { block_index, num_blocks })
    }

    fn block(&self, id: u64, block_index: usize) -> Result<BlockId> {
        let blocks = &self.sequence(id)?.blocks;
        let num_blocks = blocks.len();
        let block = blocks.get(block_index).copied();
        block.ok_or(KvError::BlockIndexOutOfRange { block_index, num_blocks })
    }

    fn sequence(&self, id: u64) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or_else(|| stale(id))
    }

    fn sequence_mut(&mut self, id: u64) -> Result<&mut Sequence> {
        self.sequences.get_mut(&id).ok_or_else(|| stale(id))
    }

    fn take_dirty(&mut self, new: &[BlockId]) -> Result<Vec<BlockId>> {
        let mut dirty = Vec::new();
        for &block in new {
            if self.cache.clear_dirty(block)? {
                dirty.push(block);
            }
        }
        Ok(dirty)
    }

    pub(super) fn stats(&self) -> ManagerStats {
        let (pool, counters) = (self.cache.pool(), self.counters);
        ManagerStats {
            num_blocks: pool.num_blocks(),
            num_free: pool.num_free(),
            num_cached: pool.num_cached(),
            num_in_use: pool.num_in_use(),
            num_pinned: pool.num_pinned(),
            num_committed: self.cache.num_committed(),
            block_bytes: 0,
            num_sequences: self.sequences.len(),
            query_tokens: counters.query_tokens,
            hit_tokens: counters.hit_tokens,
            miss_tokens: counters.query_tokens - counters.hit_tokens,
            num_allocations: counters.num_allocations,
            num_failures: counters.num_failures,
            num_evictions: self.cache.num_evictions(),
            num_copies: counters.num_copies,
        }
    }

    pub(super) fn inspect(&self) -> Inspection {
        let pool = self.cache.pool();
        let picture = |block| -> Result<_> {
            Ok(BlockPicture {
                block,
                state: pool.state(block)?,
                reference_count: pool.reference_count(block)?,
                pin_count: pool.pin_count(block)?,
                key: self.cache.key(block)?.copied(),
            })
        };
        Inspection {
            free_queue: pool.free_queue().collect(),
            blocks: pool.blocks().filter_map(|block| picture(block).ok()).collect(),
        }
    }

    pub(super) fn leak_report(&self) -> LeakReport {
        let report = |(&id, sequence): (&u64, &Sequence)| SequenceReport {
            cache_id: cache_id(id),
            request_id: sequence.request_id.clone(),
            blocks: sequence.blocks.clone(),
        };
        let pins = |block| Some((block, self.cache.pool().pin_count(block).ok()?));
        let pinned_blocks = self.cache.pool().blocks().filter_map(pins);
        LeakReport {
            sequences: self.sequences.iter().map(report).collect(),
            pinned_blocks: pinned_blocks.filter(|&(_, pins)| pins > 0).collect(),
        }
    }

    pub(super) fn check_integrity(&self) -> Result<()> {
        self.cache.check_integrity()?;
        let held = |sequence: &Sequence| [&*sequence.blocks, &*sequence.originals].concat();
        self.cache.pool().check_holders(self.sequences.values().flat_map(held))
    }
}

pub(super) fn stale(id: u64) -> KvError {
    KvError::StaleHandle { cache_id: cache_id(id) }
}
