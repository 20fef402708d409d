//! What is done to many sequences in one step: all of it, or nothing.

use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::{Known, PagedKvCacheHandle};
use crate::block::BlockTable;
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::store::{BlockCopy, Commit, Growth, Opening, Store, close_many};

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

    /// Makes sequences of `store` longer; returns what was copied, and for which of them.
    pub(crate) fn extend_many(
        store: &Store<T>,
        handles: &mut [impl DerefMut<Target = Self>],
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        for (index, handle) in handles.iter_mut().enumerate() {
            handle.sync().map_err(|error| in_batch(index, error))?;
        }
        Self::extend_synced(store, handles, additional)
    }

    pub(super) fn extend_synced(
        store: &Store<T>,
        handles: &mut [impl DerefMut<Target = Self>],
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        let growths =
            handles.iter().enumerate().map(|(index, handle)| handle.growth(additional(index)));
        let entered = growths.clone().filter(Growth::changes_bytes).map(|growth| growth.enter());
        let entered = entered.collect::<Result<Vec<_>>>()?;
        let mut granted = store.grow(growths.clone(), false)?;
        drop(entered);
        if granted.is_none() {
            let entered =
                growths.clone().map(|growth| growth.enter()).collect::<Result<Vec<_>>>()?;
            granted = store.grow(growths, true)?;
            drop(entered);
        }
        let grant = granted.unwrap_or_default();
        let (mut new, mut copies) = (&*grant.new, grant.copies.into_iter().peekable());
        let mut made = Vec::new();
        for (index, handle) in handles.iter_mut().enumerate() {
            let additional = additional(index);
            let num_new = handle.growth(additional).num_new;
            let Self { lease, table, num_tokens, high_water, .. } = &mut **handle;
            while let Some((_, copy)) = copies.next_if(|&(id, _)| id == lease.id()) {
                table.adopt_at(copy.block_index, copy.to);
                made.push((index, copy));
            }
            if num_new > 0 {
                let (own, others) = new.split_at(num_new);
                table.adopt(own);
                new = others;
            }
            table.sequence_length += additional;
            *num_tokens += additional;
            *high_water = (*high_water).max(*num_tokens);
        }
        Ok(made)
    }

    #[inline]
    fn growth(&self, additional: usize) -> Growth<'_> {
        let end = self.num_tokens.saturating_add(additional);
        self.lease.growth(&self.table.physical_blocks, self.num_tokens..end, self.high_water)
    }

    /// Commits tokens of sequences of `store`.
    pub(crate) fn commit_many<'a>(
        store: &Store<T>,
        handles: &mut [impl DerefMut<Target = Self>],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        for (index, handle) in handles.iter_mut().enumerate() {
            let checked = handle.sync().and_then(|()| handle.check_commit(tokens(index)));
            checked.map_err(|error| in_batch(index, error))?;
        }
        Self::commit_checked(store, handles, tokens)
    }

    pub(super) fn check_commit(&self, tokens: &[u32]) -> Result<()> {
        self.lease.check_open()?;
        let (start, len) = (self.num_committed_tokens, self.num_tokens);
        let end = start.saturating_add(tokens.len());
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let known = self.known.tokens().get(start..).unwrap_or_default();
        let differs = known.iter().zip(tokens).position(|(known, token)| known != token);
        differs.map_or(Ok(()), |place| Err(KvError::TokenMismatch { token: start + place }))
    }

    /// Commits tokens that are right, for all that can be seen without the store.
    pub(super) fn commit_checked<'a>(
        store: &Store<T>,
        handles: &mut [impl DerefMut<Target = Self>],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        // Those that fill blocks, and how many of their tokens were known.
        let mut filling = Vec::new();
        for (index, handle) in handles.iter_mut().enumerate() {
            if !handle.full_blocks(tokens(index).len()).is_empty() {
                filling.push((index, handle.known.tokens().len()));
                handle.learn(tokens(index));
            }
        }
        if !filling.is_empty() {
            let commits = filling.iter().map(|&(index, _)| {
                let handle = &handles[index];
                let blocks = handle.full_blocks(tokens(index).len());
                let (id, first) = (handle.lease.id(), blocks.start);
                Commit { id, first, keys: &handle.known.keys()[blocks] }
            });
            match store.commit(&commits.collect::<Vec<_>>()) {
                Ok(merged) => {
                    for (place, block_index, block) in merged {
                        handles[filling[place].0].table.adopt_at(block_index, block);
                    }
                }
                Err(error) => {
                    for (index, num_known) in filling {
                        handles[index].known.unextend(num_known);
                    }
                    return Err(error);
                }
            }
        }
        for (index, handle) in handles.iter_mut().enumerate() {
            handle.learn(tokens(index));
            handle.num_committed_tokens += tokens(index).len();
        }
        Ok(())
    }

    /// The blocks that will be full when as many tokens more are committed, if they can be shared.
    fn full_blocks(&self, num_tokens: usize) -> Range<usize> {
        if !self.known.has_keys() {
            return 0..0;
        }
        let (start, block_size) = (self.num_committed_tokens, self.table.block_size);
        start / block_size..(start + num_tokens) / block_size
    }

    /// Takes note of those of `tokens`, which follow the committed ones, that are not known yet.
    fn learn(&mut self, tokens: &[u32]) {
        let known = self.known.tokens().get(self.num_committed_tokens..).unwrap_or_default();
        let num_known = known.len();
        self.known.extend(tokens.get(num_known..).unwrap_or_default());
    }

    /// Frees sequences of `store`.
    pub(crate) fn free_many(store: &Store<T>, handles: &[&Self]) -> Result<()> {
        close_many(store, &handles.iter().map(|handle| &handle.lease).collect::<Vec<_>>())
    }

    // Asking

    /// Checks that the table, of a sequence that is still there, can be believed.
    pub(crate) fn check_usable(&self) -> Result<()> {
        let entered = self.lease.enter()?;
        self.check_table(&entered)
    }

    /// Appends the slots of tokens of the sequence.
    pub(crate) fn push_slots(&self, range: Range<usize>, slots: &mut Vec<usize>) -> Result<()> {
        self.check_usable()?;
        let (Range { start, end }, len) = (range.clone(), self.readable());
        if start <= end && end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        self.table.push_slots(range, slots)
    }
}

/// The error of one entry of a batch.
pub(crate) fn in_batch(index: usize, error: KvError) -> KvError {
    match error {
        // Of one of these, or of all.
        KvError::StaleHandle { .. } | KvError::OutOfBlocks { .. } => error,
        error => KvError::BatchEntry { index, source: Box::new(error) },
    }
}

/// Checks that a list has an entry for each of many sequences.
pub(crate) fn check_count(what: &'static str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted { Ok(()) } else { Err(KvError::CountMismatch { what, given, wanted }) }
}
