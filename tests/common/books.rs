//! What a manager should do, as naively as it can be said: every block for itself in a list, every
//! sequence with numbers of its own, and nothing shared but names and counts.
//!
//! Each method says what the manager must answer, and changes nothing if that is an error.

use std::collections::BTreeMap;
use std::ops::Range;

use kvspan::{BlockState, Duplicates, KvError, ManagerStats, Result};

use super::sequences::{BLOCK_SIZE, NUM_LAYERS};

/// One number for each row, of each layer.
pub(crate) type Rows = [Vec<f32>; NUM_LAYERS];

pub(crate) type Keys = Vec<&'static [u8]>;

/// What decides the content of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) epoch: u64,
    pub(crate) salt: Option<&'static str>,
    pub(crate) lora: Option<&'static str>,
    /// From the first token to the last one of the block.
    pub(crate) tokens: Vec<u32>,
    /// Of this block and of those before it.
    pub(crate) extra_keys: Vec<Keys>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Block {
    pub(crate) holders: usize,
    pub(crate) pins: usize,
    /// Once it is committed; and the rows that were in it then.
    pub(crate) named: Option<(Name, Rows)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) request_id: Option<&'static str>,
    pub(crate) blocks: Vec<usize>,
    /// What is known of the content: the name of all of it, and extra keys that are still to come.
    pub(crate) name: Name,
    pub(crate) extra_keys: BTreeMap<usize, Keys>,
    pub(crate) rows: Rows,
    pub(crate) cached: usize,
    pub(crate) committed: usize,
}

/// A sequence to start.
#[derive(Clone, Debug)]
pub(crate) struct NewSequence {
    pub(crate) request_id: Option<&'static str>,
    pub(crate) name: Name,
    pub(crate) extra_keys: BTreeMap<usize, Keys>,
    pub(crate) lookahead: usize,
    /// What the manager gave it: its hits are those of the blocks of one name that it has.
    pub(crate) found: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) layer: usize,
    pub(crate) segments: Vec<(usize, Range<usize>)>,
    pub(crate) numbers: Vec<f32>,
}

/// A block of a sequence that was replaced, and by which: index, old and new.
pub(crate) type Copy = (usize, usize, usize);

/// A place that is about to change: index of the block, layers, slots.
type Want = (usize, Range<usize>, Range<usize>);

/// What a sequence needs: places that are its own, and new blocks.
type Need = (usize, Vec<Want>, usize);

#[derive(Clone, Debug)]
pub(crate) struct Books {
    pub(crate) epoch: u64,
    pub(crate) duplicates: Duplicates,
    pub(crate) prefix_caching: bool,
    /// Block `n` is at `n - 1`.
    pub(crate) blocks: Vec<Block>,
    /// The one that is reused next first.
    pub(crate) queue: Vec<usize>,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) views: Vec<View>,
    pub(crate) counts: ManagerStats,
}

impl Block {
    pub(crate) fn state(&self) -> BlockState {
        match self {
            Block { holders: 1.., .. } => BlockState::InUse,
            Block { pins: 1.., .. } => BlockState::Pinned,
            Block { named: Some(_), .. } => BlockState::Cached,
            Block { .. } => BlockState::Free,
        }
    }
}

impl Sequence {
    pub(crate) fn len(&self) -> usize {
        self.rows[0].len()
    }

    /// The name of a block of it, if its tokens are known.
    fn name_of(&self, index: usize) -> Name {
        let extra_keys = |index| self.extra_keys.get(&index).cloned().unwrap_or_default();
        let tokens = self.name.tokens[..(index + 1) * BLOCK_SIZE].to_vec();
        Name { tokens, extra_keys: (0..=index).map(extra_keys).collect(), ..self.name }
    }

    fn note_write(&mut self, start: usize) {
        if start / BLOCK_SIZE < self.committed / BLOCK_SIZE {
            self.committed = start / BLOCK_SIZE * BLOCK_SIZE;
        }
    }

    fn resize(&mut self, len: usize) {
        for rows in &mut self.rows {
            rows.resize(len, 0.0);
        }
    }
}

/// Which blocks a range of tokens touches, by index, and which slots of them.
fn segments(range: Range<usize>) -> Vec<(usize, Range<usize>)> {
    let mut segments = Vec::<(usize, Range<usize>)>::new();
    for position in range {
        let (index, slot) = (position / BLOCK_SIZE, position % BLOCK_SIZE);
        match segments.last_mut().filter(|(last, _)| *last == index) {
            Some((_, slots)) => slots.end = slot + 1,
            None => segments.push((index, slot..slot + 1)),
        }
    }
    segments
}

impl Books {
    pub(crate) fn new(num_blocks: usize, duplicates: Duplicates, prefix_caching: bool) -> Self {
        let blocks = (0..num_blocks).map(|_| Block::default()).collect();
        let (queue, counts) = ((1..=num_blocks).collect(), ManagerStats::default());
        let (sequences, views) = Default::default();
        let epoch = 0;
        Self { epoch, duplicates, prefix_caching, blocks, queue, sequences, views, counts }
    }

    fn block(&mut self, block: usize) -> &mut Block {
        &mut self.blocks[block - 1]
    }

    fn count(&self, state: BlockState) -> usize {
        self.blocks.iter().filter(|block| block.state() == state).count()
    }

    fn find(&self, name: &Name) -> Vec<usize> {
        let has_it = |block: &Block| block.named.as_ref().is_some_and(|(own, _)| own == name);
        (1..).zip(&self.blocks).filter(|(_, block)| has_it(block)).map(|(at, _)| at).collect()
    }

    // Blocks

    fn out_of_blocks(&self, needed: usize, spared: usize) -> KvError {
        let (free, cached) = (self.count(BlockState::Free), self.count(BlockState::Cached));
        let pinned = self.count(BlockState::Pinned);
        KvError::OutOfBlocks { needed, free, evictable: cached - spared, pinned }
    }

    fn take(&mut self, num_blocks: usize) -> Result<Vec<usize>> {
        if num_blocks > self.queue.len() {
            return Err(self.out_of_blocks(num_blocks, 0));
        }
        let taken = self.queue.drain(..num_blocks).collect::<Vec<_>>();
        for &block in &taken {
            let block = self.block(block);
            block.holders = 1;
            let was_cached = block.named.take().is_some();
            self.counts.num_evictions += u64::from(was_cached);
        }
        Ok(taken)
    }

    fn hold(&mut self, blocks: &[usize]) {
        for &block in blocks {
            self.queue.retain(|&queued| queued != block);
            self.block(block).holders += 1;
        }
    }

    fn give_back(&mut self, blocks: &[usize]) {
        for &block in blocks.iter().rev() {
            self.block(block).holders -= 1;
            self.enqueue_if_unused(block);
        }
    }

    fn enqueue_if_unused(&mut self, block: usize) {
        match self.block(block).state() {
            BlockState::Free => self.queue.insert(0, block),
            BlockState::Cached => self.queue.push(block),
            BlockState::InUse | BlockState::Pinned => {}
        }
    }

    // Sequences

    fn check_request_ids(
        &self,
        request_ids: impl Iterator<Item = Option<&'static str>>,
    ) -> Result<()> {
        let mut names = Vec::new();
        for name in request_ids.flatten() {
            let request_id = name.to_owned();
            if names.contains(&name) {
                return Err(KvError::DuplicateRequest { request_id });
            }
            if self.sequences.iter().any(|sequence| sequence.request_id == Some(name)) {
                return Err(KvError::RequestExists { request_id });
            }
            names.push(name);
        }
        Ok(())
    }

    /// Starts sequences, all of them or none.
    pub(crate) fn allocate(&mut self, requests: Vec<NewSequence>) -> Result<()> {
        let count = u64::try_from(requests.len()).expect("a small number");
        let allocated = self.try_allocate(requests);
        match allocated {
            Ok(()) => self.counts.num_allocations += count,
            Err(_) => self.counts.num_failures += count,
        }
        allocated
    }

    fn try_allocate(&mut self, requests: Vec<NewSequence>) -> Result<()> {
        self.check_request_ids(requests.iter().map(|request| request.request_id))?;
        let mut new = Vec::new();
        for NewSequence { request_id, name, extra_keys, lookahead, found } in requests {
            let num_tokens = name.tokens.len();
            let (blocks, rows) = Default::default();
            let mut sequence =
                Sequence { request_id, blocks, name, extra_keys, rows, cached: 0, committed: 0 };
            let reusable = if self.prefix_caching { num_tokens.saturating_sub(1) } else { 0 };
            for index in 0..reusable / BLOCK_SIZE {
                let has_it = self.find(&sequence.name_of(index));
                let chosen = found.get(index).filter(|block| has_it.contains(block));
                let Some(&block) = chosen.or(has_it.first()) else { break };
                sequence.blocks.push(block);
            }
            let needed = (num_tokens + lookahead).div_ceil(BLOCK_SIZE) - sequence.blocks.len();
            new.push((sequence, needed));
        }
        let needed = new.iter().map(|(_, needed)| needed).sum::<usize>();
        let is_hit = |block: &&usize| new.iter().any(|(new, _)| new.blocks.contains(block));
        let spared = self.queue.iter().filter(is_hit).count();
        if needed > self.queue.len() - spared {
            return Err(self.out_of_blocks(needed, spared));
        }
        for (sequence, _) in &new {
            self.hold(&sequence.blocks);
        }
        for (mut sequence, needed) in new {
            for &block in &sequence.blocks {
                let (_, rows) = self.blocks[block - 1].named.as_ref().expect("it was found by it");
                for (own, rows) in sequence.rows.iter_mut().zip(rows) {
                    own.extend(rows);
                }
            }
            let num_tokens = sequence.name.tokens.len();
            sequence.cached = sequence.len();
            sequence.committed = sequence.cached;
            sequence.resize(num_tokens);
            sequence.blocks.extend(self.take(needed)?);
            self.counts.query_tokens += u64::try_from(num_tokens).expect("a small number");
            self.counts.hit_tokens += u64::try_from(sequence.cached).expect("a small number");
            self.sequences.push(sequence);
        }
        Ok(())
    }

    pub(crate) fn fork(&mut self, at: usize, request_id: Option<&'static str>) -> Result<()> {
        self.check_request_ids([request_id].into_iter())?;
        let mut fork = Sequence { request_id, ..self.sequences[at].clone() };
        fork.blocks.truncate(fork.len().div_ceil(BLOCK_SIZE));
        self.hold(&fork.blocks);
        self.sequences.push(fork);
        Ok(())
    }

    pub(crate) fn free(&mut self, at: usize) {
        let blocks = self.sequences.remove(at).blocks;
        self.give_back(&blocks);
    }

    /// Makes sequences longer, all of them or none; returns what was copied, and for which of them.
    pub(crate) fn extend(&mut self, additional: &[(usize, usize)]) -> Result<Vec<(usize, Copy)>> {
        let needs = additional.iter().map(|&(at, additional)| {
            let sequence = &self.sequences[at];
            let (len, num_blocks) = (sequence.len(), sequence.blocks.len());
            let inside = len..(len + additional).min(num_blocks * BLOCK_SIZE);
            let wants = segments(inside).into_iter();
            let wants = wants.map(|(index, slots)| (index, 0..NUM_LAYERS, slots)).collect();
            (at, wants, (len + additional).div_ceil(BLOCK_SIZE).saturating_sub(num_blocks))
        });
        let copies = self.prepare(&needs.collect::<Vec<_>>())?;
        for &(at, additional) in additional {
            let len = self.sequences[at].len();
            self.sequences[at].resize(len + additional);
        }
        Ok(copies)
    }

    /// One row for each number of each write, which is a sequence and a position.
    pub(crate) fn write(&mut self, layer: usize, writes: &[(usize, usize, &[f32])]) -> Result<()> {
        let needs = writes.iter().map(|&(at, start, numbers)| {
            self.need(at, layer..layer + 1, start..start + numbers.len())
        });
        self.prepare(&needs.collect::<Result<Vec<_>>>()?)?;
        for &(at, start, numbers) in writes.iter().filter(|(.., numbers)| !numbers.is_empty()) {
            let sequence = &mut self.sequences[at];
            sequence.rows[layer][start..start + numbers.len()].copy_from_slice(numbers);
            sequence.note_write(start);
        }
        Ok(())
    }

    pub(crate) fn prepare_write(&mut self, at: usize, range: Range<usize>) -> Result<Vec<Copy>> {
        let need = self.need(at, 0..NUM_LAYERS, range.clone())?;
        let copies = self.prepare(&[need])?;
        if !range.is_empty() {
            self.sequences[at].note_write(range.start);
        }
        Ok(copies.into_iter().map(|(_, copy)| copy).collect())
    }

    fn need(&self, at: usize, layers: Range<usize>, range: Range<usize>) -> Result<Need> {
        let (Range { start, end }, len) = (range.clone(), self.sequences[at].len());
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let wants = segments(range).into_iter();
        Ok((at, wants.map(|(index, slots)| (index, layers.clone(), slots)).collect(), 0))
    }

    /// Who is to change rows that others see gets a block of its own; and there are new ones as well.
    fn prepare(&mut self, needs: &[Need]) -> Result<Vec<(usize, Copy)>> {
        // Of a block to copy its index.
        let mut plan = Vec::<(usize, Option<usize>)>::new();
        let (mut left, mut renamed) = (Vec::new(), Vec::new());
        for (at, wants, num_new) in needs {
            for (index, layers, slots) in wants {
                let block = self.sequences[*at].blocks[*index];
                let leaving = left.iter().filter(|&&left| left == block).count();
                if self.blocks[block - 1].holders - leaving > 1
                    || self.is_viewed(block, layers, slots)
                {
                    plan.push((*at, Some(*index)));
                    left.push(block);
                } else {
                    renamed.push(block);
                }
            }
            plan.extend(vec![(*at, None); *num_new]);
        }
        let mut copies = Vec::new();
        let taken = self.take(plan.len())?;
        for ((at, index), to) in plan.into_iter().zip(taken) {
            let blocks = &mut self.sequences[at].blocks;
            match index {
                Some(index) => {
                    copies.push((at, (index, std::mem::replace(&mut blocks[index], to), to)));
                }
                None => blocks.push(to),
            }
        }
        for block in renamed {
            self.block(block).named = None;
        }
        for (at, ..) in needs {
            let own = copies.iter().filter(|(owner, _)| owner == at);
            self.give_back(&own.map(|&(_, (_, from, _))| from).collect::<Vec<_>>());
        }
        self.counts.num_copies += u64::try_from(copies.len()).expect("a small number");
        Ok(copies)
    }

    fn is_viewed(&self, block: usize, layers: &Range<usize>, slots: &Range<usize>) -> bool {
        let overlaps = |(viewed, rows): &(usize, Range<usize>)| {
            *viewed == block && rows.start < slots.end && slots.start < rows.end
        };
        let mut views = self.views.iter().filter(|view| layers.contains(&view.layer));
        views.any(|view| view.segments.iter().any(overlaps))
    }

    pub(crate) fn truncate(&mut self, at: usize, new_len: usize) -> Result<Option<Copy>> {
        let sequence = &self.sequences[at];
        let len = sequence.len();
        if new_len > len {
            return Err(KvError::RangeOutOfBounds { start: 0, end: new_len, len });
        }
        let num_blocks = new_len.div_ceil(BLOCK_SIZE);
        let tail = sequence.blocks[num_blocks..].to_vec();
        let is_cut = new_len < len && !new_len.is_multiple_of(BLOCK_SIZE);
        let cut = is_cut.then(|| (num_blocks - 1, sequence.blocks[num_blocks - 1]));
        let cut = cut.filter(|&(_, block)| self.blocks[block - 1].named.is_some());
        let shared = cut.filter(|&(_, block)| self.blocks[block - 1].holders > 1);
        let comes_free = |&&block: &&usize| {
            let block = &self.blocks[block - 1];
            (block.holders, block.pins) == (1, 0)
        };
        if shared.is_some() && self.queue.len() + tail.iter().filter(comes_free).count() == 0 {
            return Err(self.out_of_blocks(1, 0));
        }
        self.give_back(&tail);
        let sequence = &mut self.sequences[at];
        sequence.blocks.truncate(num_blocks);
        sequence.resize(new_len);
        sequence.name.tokens.truncate(new_len);
        let emptied = num_blocks..len.div_ceil(BLOCK_SIZE);
        sequence.extra_keys.retain(|index, _| !emptied.contains(index));
        sequence.cached = sequence.cached.min(new_len);
        sequence.committed = sequence.committed.min(new_len);
        match (cut, shared) {
            (_, Some((index, from))) => {
                let to = self.take(1)?[0];
                self.sequences[at].blocks[index] = to;
                self.give_back(&[from]);
                self.counts.num_copies += 1;
                Ok(Some((index, from, to)))
            }
            (Some((_, block)), None) => {
                self.block(block).named = None;
                Ok(None)
            }
            (None, None) => Ok(None),
        }
    }

    /// Makes a sequence as long as a table says, which has the blocks for it.
    pub(crate) fn edit_length(&mut self, at: usize, len: usize, has_storage: bool) -> Result<()> {
        let (before, old_len) = (self.clone(), self.sequences[at].len());
        let copied = if len < old_len {
            self.truncate(at, len)
        } else {
            let copies = self.extend(&[(at, len - old_len)]);
            copies.map(|copies| copies.first().map(|&(_, copy)| copy))
        };
        if !has_storage && copied != Ok(None) {
            *self = before;
            let reason = "its new length needs a block to be copied, which without storage only \
                          extend and truncate can report";
            return Err(KvError::InconsistentTable { reason });
        }
        copied.map(|_| ())
    }

    /// Commits tokens of sequences, all of them or none. An error comes with its place in the list.
    pub(crate) fn commit(&mut self, commits: &[(usize, Vec<u32>)]) -> Result<(), (usize, KvError)> {
        let mut changed = Vec::new();
        for (place, (at, tokens)) in commits.iter().enumerate() {
            let mut committed = self.sequences[*at].clone();
            let (start, len) = (committed.committed, committed.len());
            let end = start + tokens.len();
            if end > len {
                return Err((place, KvError::NoRoomToCommit { range: start..end, len }));
            }
            for (token, &given) in (start..).zip(tokens) {
                match committed.name.tokens.get(token) {
                    Some(&known) if known != given => {
                        return Err((place, KvError::TokenMismatch { token }));
                    }
                    Some(_) => {}
                    None => committed.name.tokens.push(given),
                }
            }
            committed.committed = end;
            let indices = start / BLOCK_SIZE..end / BLOCK_SIZE;
            changed.push((*at, committed, if self.prefix_caching { indices } else { 0..0 }));
        }
        // What blocks are to be called that have no name yet.
        let mut given = BTreeMap::new();
        for (place, (_, committed, indices)) in changed.iter().enumerate() {
            for index in indices.clone() {
                let (block, name) = (committed.blocks[index], committed.name_of(index));
                let named = self.blocks[block - 1].named.as_ref().map(|(own, _)| own.clone());
                let own = named
                    .unwrap_or_else(|| given.entry(block).or_insert_with(|| name.clone()).clone());
                if own != name {
                    let block = u32::try_from(block).expect("a small number");
                    let (state, wanted) = ("committed under another key", "uncommitted");
                    return Err((place, KvError::WrongBlockState { block, state, wanted }));
                }
            }
        }
        for (at, mut committed, indices) in changed {
            for index in indices {
                self.commit_block(&mut committed, index);
            }
            self.sequences[at] = committed;
        }
        Ok(())
    }

    fn commit_block(&mut self, sequence: &mut Sequence, index: usize) {
        let (block, name) = (sequence.blocks[index], sequence.name_of(index));
        let places = index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE;
        let has_it = self.find(&name);
        if has_it.contains(&block) {
            return;
        }
        if let (Some(&other), Duplicates::Merge) = (has_it.first(), self.duplicates) {
            let (_, rows) = self.blocks[other - 1].named.as_ref().expect("it was found by it");
            for (own, rows) in sequence.rows.iter_mut().zip(rows) {
                own[places.clone()].copy_from_slice(rows);
            }
            sequence.blocks[index] = other;
            self.hold(&[other]);
            self.give_back(&[block]);
        } else {
            let rows = sequence.rows.each_ref().map(|rows| rows[places.clone()].to_vec());
            self.block(block).named = Some((name, rows));
        }
    }

    // Views

    pub(crate) fn view(&mut self, at: usize, layer: usize, range: Range<usize>) -> Result<()> {
        let sequence = &self.sequences[at];
        let (Range { start, end }, len) = (range, sequence.len());
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let numbers = sequence.rows[layer][start..end].to_vec();
        let segments = segments(start..end).into_iter();
        let segments =
            segments.map(|(index, slots)| (sequence.blocks[index], slots)).collect::<Vec<_>>();
        for (block, _) in &segments {
            self.block(*block).pins += 1;
        }
        self.views.push(View { layer, segments, numbers });
        Ok(())
    }

    pub(crate) fn drop_view(&mut self, at: usize) {
        for (block, _) in self.views.remove(at).segments.into_iter().rev() {
            self.block(block).pins -= 1;
            self.enqueue_if_unused(block);
        }
    }

    pub(crate) fn reset(&mut self) -> Result<()> {
        let in_use = self.blocks.len() - self.queue.len();
        if in_use > 0 {
            return Err(KvError::BlocksInUse { in_use });
        }
        for block in (1..=self.blocks.len()).rev() {
            // Those that were cached come first.
            if self.block(block).named.take().is_some() {
                self.queue.retain(|&queued| queued != block);
                self.queue.insert(0, block);
            }
        }
        Ok(())
    }

    pub(crate) fn stats(&self, block_bytes: usize) -> ManagerStats {
        let mut stats = self.counts;
        stats.num_blocks = self.blocks.len();
        stats.num_free = self.count(BlockState::Free);
        stats.num_cached = self.count(BlockState::Cached);
        stats.num_pinned = self.count(BlockState::Pinned);
        stats.num_in_use = self.count(BlockState::InUse) + stats.num_pinned;
        stats.num_committed = self.blocks.iter().filter(|block| block.named.is_some()).count();
        stats.block_bytes = block_bytes;
        stats.num_sequences = self.sequences.len();
        stats.miss_tokens = stats.query_tokens - stats.hit_tokens;
        stats
    }
}
