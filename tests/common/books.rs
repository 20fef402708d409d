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
    pub(crate) request_id: Option<String>,
    pub(crate) blocks: Vec<usize>,
    /// What is known of the content: the name of all of it, and extra keys that are still to come.
    pub(crate) name: Name,
    pub(crate) extra_keys: BTreeMap<usize, Keys>,
    pub(crate) rows: Rows,
    pub(crate) cached: usize,
    pub(crate) committed: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) layer: usize,
    pub(crate) segments: Vec<(usize, Range<usize>)>,
    pub(crate) numbers: Vec<f32>,
}

/// A block of a sequence that was replaced, and by which: index, old and new.
pub(crate) type Copy = (usize, usize, usize);

/// A place that is about to change: sequence, index of the block, layers, slots.
type Want = (usize, usize, Range<usize>, Range<usize>);

#[derive(Clone, Debug)]
pub(crate) struct Books {
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
        Self { duplicates, prefix_caching, blocks, queue, sequences, views, counts }
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

    fn check_request_id(&self, request_id: Option<&str>) -> Result<()> {
        let taken = self.sequences.iter().filter_map(|sequence| sequence.request_id.as_deref());
        match request_id.filter(|&request_id| taken.clone().any(|taken| taken == request_id)) {
            Some(taken) => Err(KvError::RequestExists { request_id: taken.to_owned() }),
            None => Ok(()),
        }
    }

    /// The hits among blocks of one name are those that the manager `found`.
    pub(crate) fn allocate(
        &mut self,
        request_id: Option<&str>,
        name: Name,
        extra_keys: BTreeMap<usize, Keys>,
        lookahead: usize,
        found: &[usize],
    ) -> Result<()> {
        let allocated = self.try_allocate(request_id, name, extra_keys, lookahead, found);
        match allocated {
            Ok(()) => self.counts.num_allocations += 1,
            Err(_) => self.counts.num_failures += 1,
        }
        allocated
    }

    fn try_allocate(
        &mut self,
        request_id: Option<&str>,
        name: Name,
        extra_keys: BTreeMap<usize, Keys>,
        lookahead: usize,
        found: &[usize],
    ) -> Result<()> {
        self.check_request_id(request_id)?;
        let len = name.tokens.len();
        let request_id = request_id.map(str::to_owned);
        let (blocks, rows) = Default::default();
        let mut sequence =
            Sequence { request_id, blocks, name, extra_keys, rows, cached: 0, committed: 0 };
        if self.prefix_caching {
            for index in 0..len.saturating_sub(1) / BLOCK_SIZE {
                let has_it = self.find(&sequence.name_of(index));
                let chosen = found.get(index).filter(|block| has_it.contains(block));
                let Some(&block) = chosen.or(has_it.first()) else { break };
                sequence.blocks.push(block);
            }
        }
        let needed = (len + lookahead).div_ceil(BLOCK_SIZE) - sequence.blocks.len();
        let spared = sequence.blocks.iter().filter(|block| self.queue.contains(block)).count();
        if needed > self.queue.len() - spared {
            return Err(self.out_of_blocks(needed, spared));
        }
        self.hold(&sequence.blocks);
        for &block in &sequence.blocks {
            let (_, rows) = self.blocks[block - 1].named.as_ref().expect("it was found by it");
            for (own, rows) in sequence.rows.iter_mut().zip(rows) {
                own.extend(rows);
            }
        }
        sequence.cached = sequence.len();
        sequence.committed = sequence.cached;
        sequence.resize(len);
        sequence.blocks.extend(self.take(needed)?);
        self.counts.query_tokens += u64::try_from(len).expect("a small number");
        self.counts.hit_tokens += u64::try_from(sequence.cached).expect("a small number");
        self.sequences.push(sequence);
        Ok(())
    }

    pub(crate) fn fork(&mut self, at: usize, request_id: Option<&str>) -> Result<()> {
        self.check_request_id(request_id)?;
        let request_id = request_id.map(str::to_owned);
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

    pub(crate) fn extend(&mut self, at: usize, additional: usize) -> Result<Option<Copy>> {
        let sequence = &self.sequences[at];
        let (len, num_blocks) = (sequence.len(), sequence.blocks.len());
        let inside = len..(len + additional).min(num_blocks * BLOCK_SIZE);
        let wants = segments(inside).into_iter();
        let wants = wants.map(|(index, slots)| (at, index, 0..NUM_LAYERS, slots)).collect();
        let num_new = (len + additional).div_ceil(BLOCK_SIZE).saturating_sub(num_blocks);
        let (copies, new) = self.prepare(wants, num_new)?;
        self.sequences[at].blocks.extend(new);
        self.sequences[at].resize(len + additional);
        Ok(copies.first().copied())
    }

    /// One row for each number of each write, which is a sequence and a position.
    pub(crate) fn write(&mut self, layer: usize, writes: &[(usize, usize, &[f32])]) -> Result<()> {
        let mut wants = Vec::new();
        for &(at, start, numbers) in writes {
            wants.extend(self.wants(at, layer..layer + 1, start..start + numbers.len())?);
        }
        self.prepare(wants, 0)?;
        for &(at, start, numbers) in writes.iter().filter(|(.., numbers)| !numbers.is_empty()) {
            let sequence = &mut self.sequences[at];
            sequence.rows[layer][start..start + numbers.len()].copy_from_slice(numbers);
            sequence.note_write(start);
        }
        Ok(())
    }

    pub(crate) fn prepare_write(&mut self, at: usize, range: Range<usize>) -> Result<Vec<Copy>> {
        let wants = self.wants(at, 0..NUM_LAYERS, range.clone())?;
        let (copies, _) = self.prepare(wants, 0)?;
        if !range.is_empty() {
            self.sequences[at].note_write(range.start);
        }
        Ok(copies)
    }

    fn wants(&self, at: usize, layers: Range<usize>, range: Range<usize>) -> Result<Vec<Want>> {
        let (Range { start, end }, len) = (range.clone(), self.sequences[at].len());
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let segments = segments(range).into_iter();
        Ok(segments.map(|(index, slots)| (at, index, layers.clone(), slots)).collect())
    }

    /// Who is to change rows that others see gets a block of its own; and there are new ones as well.
    fn prepare(&mut self, wants: Vec<Want>, num_new: usize) -> Result<(Vec<Copy>, Vec<usize>)> {
        let (mut shared, mut left, mut renamed) = (Vec::new(), Vec::new(), Vec::new());
        for (at, index, layers, slots) in wants {
            let block = self.sequences[at].blocks[index];
            let leaving = left.iter().filter(|&&left| left == block).count();
            if self.blocks[block - 1].holders - leaving > 1
                || self.is_viewed(block, &layers, &slots)
            {
                shared.push((at, index));
                left.push(block);
            } else {
                renamed.push(block);
            }
        }
        let mut new = self.take(shared.len() + num_new)?;
        for block in renamed {
            self.block(block).named = None;
        }
        let grown = new.split_off(shared.len());
        let mut copies = Vec::new();
        let mut originals = Vec::<(usize, Vec<usize>)>::new();
        for ((at, index), to) in shared.into_iter().zip(new) {
            let from = std::mem::replace(&mut self.sequences[at].blocks[index], to);
            copies.push((index, from, to));
            match originals.last_mut().filter(|(last, _)| *last == at) {
                Some((_, blocks)) => blocks.push(from),
                None => originals.push((at, vec![from])),
            }
        }
        for (_, blocks) in originals {
            self.give_back(&blocks);
        }
        self.counts.num_copies += u64::try_from(copies.len()).expect("a small number");
        Ok((copies, grown))
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
        let copied =
            if len < old_len { self.truncate(at, len) } else { self.extend(at, len - old_len) };
        if !has_storage && copied != Ok(None) {
            *self = before;
            let reason = "its new length needs a block to be copied, which without storage only \
                          extend and truncate can report";
            return Err(KvError::InconsistentTable { reason });
        }
        copied.map(|_| ())
    }

    pub(crate) fn commit(&mut self, at: usize, tokens: &[u32]) -> Result<()> {
        let sequence = &self.sequences[at];
        let (start, len) = (sequence.committed, sequence.len());
        let end = start + tokens.len();
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let mut committed = sequence.clone();
        for (token, &given) in (start..).zip(tokens) {
            match committed.name.tokens.get(token) {
                Some(&known) if known != given => return Err(KvError::TokenMismatch { token }),
                Some(_) => {}
                None => committed.name.tokens.push(given),
            }
        }
        committed.committed = end;
        let indices = start / BLOCK_SIZE..end / BLOCK_SIZE;
        let indices = if self.prefix_caching { indices } else { 0..0 };
        for index in indices.clone() {
            let block = committed.blocks[index];
            let named = self.blocks[block - 1].named.as_ref();
            if named.is_some_and(|(own, _)| *own != committed.name_of(index)) {
                let block = u32::try_from(block).expect("a small number");
                let (state, wanted) = ("committed under another key", "uncommitted");
                return Err(KvError::WrongBlockState { block, state, wanted });
            }
        }
        for index in indices {
            let (block, name) = (committed.blocks[index], committed.name_of(index));
            let places = index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE;
            let has_it = self.find(&name);
            if has_it.contains(&block) {
                continue;
            }
            if let (Some(&other), Duplicates::Merge) = (has_it.first(), self.duplicates) {
                let (_, rows) = self.blocks[other - 1].named.as_ref().expect("it was found by it");
                for (own, rows) in committed.rows.iter_mut().zip(rows) {
                    own[places.clone()].copy_from_slice(rows);
                }
                committed.blocks[index] = other;
                self.hold(&[other]);
                self.give_back(&[block]);
            } else {
                let rows = committed.rows.each_ref().map(|rows| rows[places.clone()].to_vec());
                self.block(block).named = Some((name, rows));
            }
        }
        self.sequences[at] = committed;
        Ok(())
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
