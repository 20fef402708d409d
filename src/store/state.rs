//! All bookkeeping, as a plain structure: what happens in one critical section is one method here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::lease::{Fence, Growth, Want};
use super::report::{
    BlockCopy, BlockPicture, Inspection, LeakReport, ManagerStats, SequenceReport,
};
use super::{Commit, Copies, Opening};
use crate::error::{KvError, Result};
use crate::ids::{BlockId, lengthen};
use crate::prefix::PrefixCache;

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
pub(crate) struct Opened {
    pub(crate) blocks: Vec<BlockId>,
    /// How many of the first of them matched.
    pub(crate) num_hits: usize,
    /// New blocks that are not zero.
    pub(super) dirty: Vec<BlockId>,
}

/// Blocks that sequences were just given, in the order of the sequences.
#[derive(Debug, Default)]
pub(crate) struct Grant {
    /// New ones, at their ends.
    pub(crate) new: Vec<BlockId>,
    /// New ones in the place of others, whose content they get, and the sequence of each.
    pub(crate) copies: Vec<(u64, BlockCopy)>,
    /// New blocks that are not zero.
    pub(super) dirty: Vec<BlockId>,
}

/// What sequences need before they can change the content of their blocks.
#[derive(Debug, Default)]
struct Plan {
    needs: Vec<Need>,
    /// How many of the sequences that have a block leave it to the others; the last one keeps it.
    leaving: BTreeMap<BlockId, usize>,
    /// Blocks that can be found, and may not be any more.
    renamed: Vec<BlockId>,
}

#[derive(Debug)]
enum Need {
    /// A block in the place of one that others need as it is.
    Copy { id: u64, block_index: usize, from: BlockId },
    /// Blocks at the end.
    New { id: u64, num_blocks: usize },
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

    /// Opens sequences, all of them or none.
    pub(super) fn open(
        &mut self,
        openings: &[Opening<'_>],
        block_size: usize,
        fences: &[Arc<Fence>],
    ) -> Result<Vec<Opened>> {
        let opened = self.try_open(openings, fences);
        match &opened {
            Ok(opened) => {
                for (opening, opened) in openings.iter().zip(opened) {
                    let hit_tokens = opened.num_hits.saturating_mul(block_size);
                    self.counters.num_allocations += 1;
                    self.counters.query_tokens += lengthen(opening.num_tokens);
                    self.counters.hit_tokens += lengthen(hit_tokens);
                }
            }
            Err(_) => self.counters.num_failures += lengthen(openings.len()),
        }
        opened
    }

    fn try_open(&mut self, openings: &[Opening<'_>], fences: &[Arc<Fence>]) -> Result<Vec<Opened>> {
        let mut names = BTreeSet::new();
        for name in openings.iter().filter_map(|opening| opening.request_id) {
            if !names.insert(name) {
                return Err(KvError::DuplicateRequest { request_id: name.to_owned() });
            }
            self.check_request_id(Some(name))?;
        }
        let asked = openings.iter().map(|opening| (opening.keys, opening.num_blocks));
        let acquired = self.cache.acquire_many(asked)?;
        let mut opened = Vec::with_capacity(acquired.len());
        for ((blocks, num_hits), (opening, fence)) in
            acquired.into_iter().zip(openings.iter().zip(fences))
        {
            let mut dirty = Vec::new();
            self.take_dirty(&blocks[num_hits..], &mut dirty)?;
            self.register(opening.request_id, blocks.clone(), fence);
            opened.push(Opened { blocks, num_hits, dirty });
        }
        Ok(opened)
    }

    /// Opens a sequence on the blocks that another one has.
    pub(super) fn fork(
        &mut self,
        id: u64,
        num_blocks: usize,
        request_id: Option<&str>,
    ) -> Result<Arc<Fence>> {
        self.check_request_id(request_id)?;
        let blocks = self.sequence(id)?.blocks[..num_blocks].to_vec();
        self.cache.hold(&blocks)?;
        let fence = Arc::new(Fence::new());
        self.register(request_id, blocks, &fence);
        Ok(fence)
    }

    fn check_request_id(&self, request_id: Option<&str>) -> Result<()> {
        match request_id.filter(|&request_id| self.requests.contains_key(request_id)) {
            Some(taken) => Err(KvError::RequestExists { request_id: taken.to_owned() }),
            None => Ok(()),
        }
    }

    fn register(&mut self, request_id: Option<&str>, blocks: Vec<BlockId>, fence: &Arc<Fence>) {
        let id = fence.id();
        if let Some(request_id) = request_id {
            self.requests.insert(request_id.to_owned(), id);
        }
        let (request_id, originals) = (request_id.map(str::to_owned), Vec::new());
        let sequence = Sequence { request_id, blocks, originals, fence: Arc::clone(fence) };
        self.sequences.insert(id, sequence);
    }

    pub(super) fn find_request(&self, request_id: &str) -> Option<Arc<Fence>> {
        let id = self.requests.get(request_id)?;
        Some(Arc::clone(&self.sequences.get(id)?.fence))
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
        is_pinned: impl Fn(BlockId, &Want) -> bool,
    ) -> Result<Grant> {
        let mut plan = Plan::default();
        for want in wanted {
            self.plan(&mut plan, &want, &is_pinned)?;
        }
        self.carry_out(plan)
    }

    /// Decides first, then takes everything or nothing; see [`Store::grow`](super::Store).
    pub(super) fn grow<'a>(
        &mut self,
        growths: impl Iterator<Item = Growth<'a>>,
        copies: Copies,
        is_pinned: impl Fn(BlockId, &Want) -> bool,
    ) -> Result<Grant> {
        let mut plan = Plan::default();
        for growth in growths {
            for want in growth.wants() {
                self.plan(&mut plan, &want, &is_pinned)?;
            }
            if growth.num_new > 0 {
                let (id, num_blocks) = (growth.fence.id(), growth.num_new);
                plan.needs.push(Need::New { id, num_blocks });
            }
        }
        copies.check(plan.leaving.keys().next().copied())?;
        self.carry_out(plan)
    }

    /// Finds out what must be done before some slots of a block change.
    #[inline]
    fn plan(
        &self,
        plan: &mut Plan,
        want: &Want,
        is_pinned: impl Fn(BlockId, &Want) -> bool,
    ) -> Result<()> {
        if self.cache.pool().is_private(want.block) {
            return Ok(());
        }
        let Want { id, block_index, .. } = *want;
        let block = self.block(id, block_index)?;
        let num_leaving = plan.leaving.get(&block).unwrap_or(&0);
        if self.cache.pool().reference_count(block)? > 1 + num_leaving || is_pinned(block, want) {
            plan.needs.push(Need::Copy { id, block_index, from: block });
            *plan.leaving.entry(block).or_insert(0) += 1;
        } else if self.cache.key(block)?.is_some() {
            plan.renamed.push(block);
        }
        Ok(())
    }

    /// Takes the blocks for all needs, in their order, or none.
    fn carry_out(&mut self, plan: Plan) -> Result<Grant> {
        let Plan { needs, renamed, .. } = plan;
        let mut grant = Grant::default();
        if !needs.is_empty() {
            let num_blocks = |need: &Need| match need {
                Need::Copy { .. } => 1,
                Need::New { num_blocks, .. } => *num_blocks,
            };
            let needed = needs.iter().map(num_blocks).fold(0, usize::saturating_add);
            let mut taken = Vec::new();
            self.cache.acquire(&[], needed, &mut taken)?;
            let mut taken = &*taken;
            for need in needs {
                let (own, others) = taken.split_at(num_blocks(&need));
                taken = others;
                match need {
                    Need::Copy { id, block_index, from } => {
                        let copies = own.iter().map(|&to| BlockCopy { block_index, from, to });
                        self.replace(id, copies, &mut grant)?;
                    }
                    Need::New { id, .. } => {
                        self.take_dirty(own, &mut grant.dirty)?;
                        grant.new.extend_from_slice(own);
                        self.sequence_mut(id)?.blocks.extend_from_slice(own);
                    }
                }
            }
        }
        for block in renamed {
            self.cache.forget(block)?;
        }
        Ok(grant)
    }

    /// Puts new blocks in the place of others, which stay held until they are copied.
    fn replace(
        &mut self,
        id: u64,
        copies: impl Iterator<Item = BlockCopy>,
        grant: &mut Grant,
    ) -> Result<()> {
        for copy in copies {
            // The copy overwrites all of it.
            self.cache.clear_dirty(copy.to)?;
            let sequence = self.sequence_mut(id)?;
            sequence.blocks[copy.block_index] = copy.to;
            sequence.originals.push(copy.from);
            grant.copies.push((id, copy));
            self.counters.num_copies += 1;
        }
        Ok(())
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
    pub(super) fn shrink(
        &mut self,
        id: u64,
        num_blocks: usize,
        cut: bool,
        copies: Copies,
    ) -> Result<Grant> {
        let blocks = &self.sequence(id)?.blocks;
        let tail = blocks[num_blocks..].to_vec();
        let last = if cut { blocks[..num_blocks].last().copied() } else { None };
        let pool = self.cache.pool();
        let (mut replaced, mut renamed) = (None, None);
        if let Some(last) = last.filter(|&last| pool.is_kept(last) == Ok(true)) {
            if pool.reference_count(last)? > 1 {
                copies.check(Some(last))?;
                replaced = Some(last);
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
        let (mut new, mut grant) = (Vec::new(), Grant::default());
        self.cache.acquire(&[], usize::from(replaced.is_some()), &mut new)?;
        let block_index = num_blocks.saturating_sub(1);
        let made = replaced.into_iter().zip(new);
        let made = made.map(|(from, to)| BlockCopy { block_index, from, to });
        self.replace(id, made, &mut grant)?;
        Ok(grant)
    }

    /// Commits blocks of sequences, all of them or none; returns those that were merged with others:
    /// the place of the commit, the block's index, and the other block.
    pub(super) fn commit(
        &mut self,
        commits: &[Commit<'_>],
    ) -> Result<Vec<(usize, usize, BlockId)>> {
        self.check_commits(commits)?;
        let mut merged = Vec::new();
        for (place, commit) in commits.iter().enumerate() {
            let Self { sequences, cache, .. } = self;
            let sequence = sequences.get_mut(&commit.id).ok_or_else(|| stale(commit.id))?;
            let blocks = (commit.first..).zip(&mut sequence.blocks[commit.first..]);
            for ((index, block), key) in blocks.zip(commit.keys) {
                let other = cache.commit(*block, key)?;
                if other != *block {
                    *block = other;
                    merged.push((place, index, other));
                }
            }
        }
        Ok(merged)
    }

    /// No block may get a key if it has another one, or gets another one from a sequence that shares
    /// it.
    fn check_commits(&self, commits: &[Commit<'_>]) -> Result<()> {
        let mut shared = BTreeMap::new();
        for &Commit { id, first, keys } in commits {
            let blocks = self.blocks(id, first..first.saturating_add(keys.len()))?;
            for (&block, key) in blocks.iter().zip(keys) {
                let mut own = self.cache.key(block)?;
                if own.is_none() && commits.len() > 1 && !self.cache.pool().is_private(block) {
                    own = shared.insert(block, key);
                }
                if own.is_some_and(|own| own != key) {
                    let (state, wanted) = ("committed under another key", "uncommitted");
                    return Err(KvError::WrongBlockState { block: block.get(), state, wanted });
                }
            }
        }
        Ok(())
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

    /// Notes those of `new` that are not zero.
    fn take_dirty(&mut self, new: &[BlockId], dirty: &mut Vec<BlockId>) -> Result<()> {
        for &block in new {
            if self.cache.clear_dirty(block)? {
                dirty.push(block);
            }
        }
        Ok(())
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
