//! What is done to many sequences in one step: all of it, or nothing.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::{Known, PagedKvCacheHandle};
use crate::block::BlockTable;
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::store::{BlockCopy, Commit, Copies, Growth, Look, Opening, Store, close_many};

/// A sequence to start.
#[derive(Debug)]
pub(crate) struct NewSequence<'a> {
    pub(crate) known: Known,
    /// Tokens to have room for besides.
    pub(crate) lookahead: usize,
    pub(crate) request_id: Option<&'a str>,
}

impl<T: Element> PagedKvCacheHandle<T> {
    pub(crate) fn open(
        store: &Arc<Store<T>>,
        sequences: Vec<NewSequence<'_>>,
    ) -> Result<Vec<Self>> {
        let block_size = store.shape().block_size;
        let openings = sequences.iter().map(|NewSequence { known, lookahead, request_id }| {
            let num_tokens = known.tokens().len();
            let num_slots = num_tokens.saturating_add(*lookahead);
            Opening {
                keys: known.reusable_keys(),
                num_blocks: BlockTable::blocks_needed_for_length(num_slots, block_size),
                num_tokens,
                request_id: *request_id,
            }
        });
        let opened = store.open(&openings.collect::<Vec<_>>())?;
        let handles = opened.into_iter().zip(sequences).map(|((lease, opened), new)| {
            let num_tokens = new.known.tokens().len();
            let num_cached_tokens = opened.num_hits * block_size;
            Self {
                lease,
                table: BlockTable::of(block_size, opened.blocks, num_tokens),
                edited: false,
                num_tokens,
                high_water: num_tokens,
                known: new.known,
                num_cached_tokens,
                num_committed_tokens: num_cached_tokens,
                last_access: Mutex::new(Instant::now()),
            }
        });
        Ok(handles.collect())
    }

    /// Makes sequences longer; returns what was copied, and for which of them.
    pub(crate) fn extend_many(
        store: &Store<T>,
        handles: &mut [&mut Self],
        copies: Copies,
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        // Those that need more than room in a block that is theirs.
        let mut others = Vec::new();
        let look = store.look();
        for (index, handle) in handles.iter_mut().enumerate() {
            if !handle.extend_inside(&look, additional(index)) {
                others.push(index);
            }
        }
        drop(look);
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let extended = Self::extend_some(store, handles, &others, copies, &additional);
        if extended.is_err() {
            for_all_but(&others, handles, |index, handle| handle.unextend(additional(index)));
        }
        extended
    }

    /// Makes the sequence longer if that concerns nobody else.
    #[inline]
    pub(crate) fn extend_inside(&mut self, look: &Look<'_, T>, additional: usize) -> bool {
        if self.edited {
            return false;
        }
        let (start, blocks) = (self.num_tokens, &self.table.physical_blocks);
        let room = blocks.len() * self.table.block_size - start;
        let can = additional <= room
            && room <= self.table.block_size
            && (self.high_water <= start || !look.store().has_rows())
            && self.lease.is_open_in(look.store())
            && blocks.last().is_some_and(|&block| look.is_private(block));
        if can {
            self.lengthen(additional);
        }
        can
    }

    fn lengthen(&mut self, additional: usize) {
        self.table.sequence_length += additional;
        self.num_tokens += additional;
        self.high_water = self.high_water.max(self.num_tokens);
    }

    /// Undoes what `extend_inside` did. The new slots are still zero.
    fn unextend(&mut self, additional: usize) {
        self.table.sequence_length -= additional;
        self.num_tokens -= additional;
        self.high_water = self.num_tokens;
    }

    fn extend_some(
        store: &Store<T>,
        handles: &mut [&mut Self],
        some: &[usize],
        copies: Copies,
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        for &index in some {
            handles[index].check_store(store)?;
            handles[index].sync().map_err(|error| in_batch(index, error))?;
        }
        Self::extend_synced(store, handles, some, copies, additional)
    }

    /// Makes some of the sequences longer, in whatever way it takes.
    pub(super) fn extend_synced(
        store: &Store<T>,
        handles: &mut [&mut Self],
        some: &[usize],
        copies: Copies,
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        let growths = some.iter().map(|&index| handles[index].growth(additional(index)));
        let entered = growths.clone().map(|growth| growth.enter()).collect::<Result<Vec<_>>>()?;
        let grant = store.grow(growths, copies)?;
        drop(entered);
        // Both are in the order of the sequences.
        let (mut new, mut copies) = (&*grant.new, grant.copies.into_iter().peekable());
        let mut made = Vec::new();
        for &index in some {
            let handle = &mut *handles[index];
            while let Some((_, copy)) = copies.next_if(|&(id, _)| id == handle.lease.id()) {
                handle.table.adopt_at(copy.block_index, copy.to);
                made.push((index, copy));
            }
            let (own, others) = new.split_at(handle.growth(additional(index)).num_new);
            handle.table.adopt(own);
            new = others;
            handle.lengthen(additional(index));
        }
        Ok(made)
    }

    fn growth(&self, additional: usize) -> Growth<'_> {
        let end = self.num_tokens.saturating_add(additional);
        self.lease.growth(&self.table.physical_blocks, self.num_tokens..end, self.high_water)
    }

    /// Commits tokens of sequences.
    pub(crate) fn commit_many<'a>(
        store: &Store<T>,
        handles: &mut [&mut Self],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        // Those of which there is more to see to than that tokens are known now.
        let mut others = Vec::new();
        for (index, handle) in handles.iter_mut().enumerate() {
            if !handle.commit_inside(store, tokens(index)) {
                others.push(index);
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        let committed = Self::commit_some(store, handles, &others, &tokens);
        if committed.is_err() {
            for_all_but(&others, handles, |index, handle| handle.uncommit(tokens(index).len()));
        }
        committed
    }

    /// Commits tokens that were not known, if they fill no block.
    #[inline]
    pub(crate) fn commit_inside(&mut self, store: &Store<T>, tokens: &[u32]) -> bool {
        let end = self.num_committed_tokens.saturating_add(tokens.len());
        let can = self.known.has_room_for(end)
            && self.known.tokens().len() == self.num_committed_tokens
            && end <= self.num_tokens
            && !self.edited
            && self.lease.is_open_in(store);
        if can {
            self.known.extend(tokens);
            self.num_committed_tokens = end;
        }
        can
    }

    /// Undoes what `commit_inside` did.
    fn uncommit(&mut self, num_tokens: usize) {
        self.num_committed_tokens -= num_tokens;
        self.known.unextend(self.num_committed_tokens);
    }

    fn commit_some<'a>(
        store: &Store<T>,
        handles: &mut [&mut Self],
        some: &[usize],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        for &index in some {
            handles[index].check_store(store)?;
            let checked =
                handles[index].sync().and_then(|()| handles[index].check_commit(tokens(index)));
            checked.map_err(|error| in_batch(index, error))?;
        }
        Self::commit_checked(store, handles, some, tokens)
    }

    pub(super) fn check_commit(&self, tokens: &[u32]) -> Result<()> {
        self.lease.check_open()?;
        let (start, len) = (self.num_committed_tokens, self.num_tokens);
        let end = start.saturating_add(tokens.len());
        if end > len {
            return Err(KvError::NoRoomToCommit { range: start..end, len });
        }
        let known = self.known.tokens().get(start..).unwrap_or_default();
        let len = known.len().min(tokens.len());
        // All of them together, since the usual case has none to stop at.
        if known[..len] == tokens[..len] {
            return Ok(());
        }
        let same = known.iter().zip(tokens).take_while(|(known, token)| known == token).count();
        Err(KvError::TokenMismatch { token: start + same })
    }

    /// Commits tokens of some of the sequences, which are right for all that one can see.
    pub(super) fn commit_checked<'a>(
        store: &Store<T>,
        handles: &mut [&mut Self],
        some: &[usize],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        let num_known = some.iter().map(|&index| handles[index].known.tokens().len());
        let num_known = num_known.collect::<Vec<_>>();
        for &index in some {
            handles[index].learn(tokens(index));
        }
        let commits = some.iter().map(|&index| handles[index].newly_full(tokens(index).len()));
        match store.commit(&commits.collect::<Vec<_>>()) {
            Ok(merged) => {
                for (place, block_index, block) in merged {
                    handles[some[place]].table.adopt_at(block_index, block);
                }
                for &index in some {
                    handles[index].num_committed_tokens += tokens(index).len();
                }
                Ok(())
            }
            Err(error) => {
                for (&index, num_known) in some.iter().zip(num_known) {
                    handles[index].known.unextend(num_known);
                }
                Err(error)
            }
        }
    }

    /// Takes note of those of `tokens`, which follow the committed ones, that are not known yet.
    fn learn(&mut self, tokens: &[u32]) {
        let known = self.known.tokens().get(self.num_committed_tokens..).unwrap_or_default();
        let num_known = known.len();
        self.known.extend(tokens.get(num_known..).unwrap_or_default());
    }

    /// The blocks that are full once as many known tokens more are committed.
    fn newly_full(&self, num_tokens: usize) -> Commit<'_> {
        let (start, block_size) = (self.num_committed_tokens, self.table.block_size);
        let (first, end) = (start / block_size, (start + num_tokens) / block_size);
        // There are none if nothing is shared.
        let keys = self.known.keys().get(first..end).unwrap_or_default();
        Commit { id: self.lease.id(), first, keys }
    }

    /// Frees sequences of `store`.
    pub(crate) fn free_many(store: &Store<T>, handles: &[&Self]) -> Result<()> {
        handles.iter().try_for_each(|handle| handle.check_store(store))?;
        close_many(store, &handles.iter().map(|handle| &handle.lease).collect::<Vec<_>>())
    }

    // Asking

    pub(crate) fn check_store(&self, store: &Store<T>) -> Result<()> {
        if std::ptr::eq(&raw const **self.lease.store(), store) {
            return Ok(());
        }
        Err(KvError::ForeignHandle { cache_id: self.lease.cache_id() })
    }

    /// Checks that the table, of a sequence that is still there, can be believed.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.edited { self.check_table(&self.lease.enter()?) } else { self.lease.check_open() }
    }

    /// Appends the slots of the last tokens of the sequence, of which there are as many.
    #[cfg(feature = "python")]
    pub(crate) fn push_last_slots(&self, num_tokens: usize, slots: &mut Vec<usize>) -> Result<()> {
        let start = self.num_tokens - num_tokens;
        let (blocks, block_size) = (&self.table.physical_blocks, self.table.block_size);
        if let (Some(last), 1) = (blocks.last(), num_tokens)
            && let Some(offset) = start.checked_sub((blocks.len() - 1) * block_size)
        {
            // As in nearly every decode step; without a division.
            slots.push(last.index() * block_size + offset);
            return Ok(());
        }
        self.table.push_slots(start..self.num_tokens, slots)
    }

    /// Appends the slots of tokens of the sequence, which is usable.
    pub(crate) fn push_slots(&self, range: Range<usize>, slots: &mut Vec<usize>) -> Result<()> {
        let (Range { start, end }, len) = (range.clone(), self.readable());
        if start <= end && end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        self.table.push_slots(range, slots)
    }
}

/// Calls `call` with all handles but some, whose places are in ascending order.
fn for_all_but<H>(some: &[usize], handles: &mut [&mut H], call: impl Fn(usize, &mut H)) {
    let mut some = some.iter().peekable();
    for (index, handle) in handles.iter_mut().enumerate() {
        if some.next_if_eq(&&index).is_none() {
            call(index, handle);
        }
    }
}

/// The error of one entry of a batch.
pub(crate) fn in_batch(index: usize, error: KvError) -> KvError {
    match error {
        // Of one of these, or of all.
        KvError::StaleHandle { .. }
        | KvError::OutOfBlocks { .. }
        | KvError::LayerOutOfRange { .. } => error,
        error => KvError::BatchEntry { index, source: Box::new(error) },
    }
}

/// Checks that a list has an entry for each of many sequences.
pub(crate) fn check_count(what: &'static str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted { Ok(()) } else { Err(KvError::CountMismatch { what, given, wanted }) }
}
