//! A sequence whose tokens lie in blocks that others may share.

mod batch;
mod known;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::tensor::planes;
use super::{CacheHandleStats, Device, KvCacheHandle, TensorRef};
use crate::block::{BlockTable, segments};
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::ids::share;
use crate::layer::KVSpan;
use crate::memory::{BlockRows, BlockSlots, Source, Target};
use crate::store::{BlockCopy, Copies, Entered, Lease, PinnedBlocks, Store};

pub(crate) use batch::{NewSequence, check_count, in_batch};
pub(crate) use known::Known;

/// A sequence of a [`KvCacheManager`](crate::KvCacheManager), and its hold on its blocks.
///
/// The manager is what reads and writes it. Whoever has `&mut` on it is alone with the sequence; the
/// blocks themselves may have other owners, and what one writes the others do not see.
///
/// To change the length of its table makes the sequence as long, at the next use. If a block has to be
/// copied for that, then without storage the table is [`KvError::InconsistentTable`], since nobody
/// would learn of the copy; [`extend`](crate::KvCacheManager::extend) and
/// [`truncate`](crate::KvCacheManager::truncate) return it.
///
/// Dropping the handle frees the sequence.
#[derive(Debug)]
pub struct PagedKvCacheHandle<T: Element = f32> {
    lease: Lease<T>,
    /// What callers see. Believed only while `edited` is false.
    table: BlockTable,
    /// Whether a caller had the table to change.
    edited: bool,
    /// The sequence's length.
    num_tokens: usize,
    /// Slots from here on are zero, in the blocks of the sequence.
    high_water: usize,
    /// Those of the prompt, and those that were committed.
    known: Known,
    num_cached_tokens: usize,
    num_committed_tokens: usize,
    last_access: Mutex<Instant>,
}

impl<T: Element> PagedKvCacheHandle<T> {
    /// Returns how many of the first tokens were there already when the sequence was allocated.
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens
    }

    /// Returns how many of the first tokens were committed.
    pub fn num_committed_tokens(&self) -> usize {
        self.num_committed_tokens
    }

    /// Returns the tokens that are known: those that the sequence was allocated with, and those that
    /// were committed behind them.
    pub fn tokens(&self) -> &[u32] {
        self.known.tokens()
    }

    /// Frees the sequence. Does nothing if that was done before.
    pub fn close(&self) {
        self.lease.close();
    }

    pub(crate) fn free(&self) -> Result<()> {
        if self.lease.close() { Ok(()) } else { Err(self.stale()) }
    }

    fn stale(&self) -> KvError {
        KvError::StaleHandle { cache_id: self.lease.cache_id() }
    }

    /// Of a handle that is of no use any more, that is what to say first.
    fn stale_or(&self, error: KvError) -> KvError {
        if self.is_valid() { error } else { self.stale() }
    }

    // Growing and shrinking

    pub(crate) fn extend(
        &mut self,
        store: &Store<T>,
        additional: usize,
    ) -> Result<Option<BlockCopy>> {
        self.sync()?;
        let copies = Self::extend_many(store, &mut [self], Copies::Made, |_| additional)?;
        Ok(copies.first().map(|&(_, copy)| copy))
    }

    pub(crate) fn truncate(&mut self, new_len: usize) -> Result<Option<BlockCopy>> {
        self.sync()?;
        self.truncate_synced(new_len, Copies::Made)
    }

    fn truncate_synced(&mut self, new_len: usize, copies: Copies) -> Result<Option<BlockCopy>> {
        let (len, block_size) = (self.num_tokens, self.table.block_size);
        let entered = self.lease.enter()?;
        if new_len > len {
            return Err(KvError::RangeOutOfBounds { start: 0, end: new_len, len });
        }
        let num_blocks = BlockTable::blocks_needed_for_length(new_len, block_size);
        let cut = new_len < len && !new_len.is_multiple_of(block_size);
        let copy = self.lease.shrink(num_blocks, cut, copies, &entered)?;
        self.table.truncate(new_len)?;
        if let Some(copy) = copy {
            self.table.adopt_at(copy.block_index, copy.to);
        }
        self.num_tokens = new_len;
        self.high_water = self.high_water.min(num_blocks * block_size);
        self.known.cut(len, new_len);
        self.num_committed_tokens = self.num_committed_tokens.min(new_len);
        self.num_cached_tokens = self.num_cached_tokens.min(new_len);
        Ok(copy)
    }

    pub(crate) fn fork(&self, request_id: Option<&str>) -> Result<Self> {
        let entered = self.lease.enter()?;
        self.check_table(&entered)?;
        // Without those of a lookahead, which the original was promised.
        let mut table = self.table.clone();
        table.truncate(table.sequence_length)?;
        let lease = self.lease.fork(table.num_blocks(), request_id, &entered)?;
        let num_tokens = self.readable();
        let mut known = self.known.clone();
        known.cut(self.num_tokens, num_tokens);
        Ok(Self {
            lease,
            high_water: self.high_water.min(table.num_blocks() * table.block_size),
            table,
            edited: self.edited,
            num_tokens,
            known,
            num_cached_tokens: self.num_cached_tokens.min(num_tokens),
            num_committed_tokens: self.num_committed_tokens.min(num_tokens),
            last_access: Mutex::new(Instant::now()),
        })
    }

    // Content

    pub(crate) fn write(
        &mut self,
        layer: usize,
        position: usize,
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<()> {
        self.sync()?;
        let entered = self.lease.enter()?;
        let tokens = self.check_write(layer, position, keys.len(), values.len())?;
        check_numbers(self.lease.store(), &keys, &values)?;
        own_blocks(&self.lease, &mut self.table, Some(layer), tokens.clone(), &entered)?;
        let rows = self.lease.store().rows()?;
        write_rows(rows, &self.table, layer, tokens, keys, values)?;
        drop(entered);
        if keys.len() > 0 {
            self.note_write(position);
        }
        Ok(())
    }

    /// Gives the sequence blocks of its own for `tokens`, which somebody else is about to write.
    pub(crate) fn prepare_write(&mut self, tokens: Range<usize>) -> Result<Vec<BlockCopy>> {
        self.sync()?;
        let entered = self.lease.enter()?;
        let (Range { start, end }, len) = (tokens.clone(), self.num_tokens);
        if start > end {
            return Err(KvError::InvertedRange { start, end });
        }
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        let copies = own_blocks(&self.lease, &mut self.table, None, tokens, &entered)?;
        drop(entered);
        if start < end {
            self.note_write(start);
        }
        Ok(copies)
    }

    /// Writes one token of each sequence; all of them belong to `store`.
    pub(crate) fn write_many(
        store: &Store<T>,
        layer: usize,
        handles: &mut [&mut Self],
        positions: &[usize],
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<()> {
        let width = store.rows()?.geometry().width;
        check_rows(width, handles.len(), positions, keys.len(), values.len())?;
        let rows_of = |index: usize| {
            let row = index * width..(index + 1) * width;
            (keys.part(row.clone()), values.part(row))
        };
        let mut parts = Vec::with_capacity(handles.len());
        for (index, handle) in handles.iter_mut().enumerate() {
            handle.sync().map_err(|error| in_batch(index, error))?;
            let tokens = handle.check_write(layer, positions[index], width, width);
            let tokens = tokens.map_err(|error| in_batch(index, handle.stale_or(error)))?;
            let Self { lease, table, .. } = &mut **handle;
            parts.push((&*lease, table, tokens));
        }
        check_numbers(store, &keys, &values)?;
        let entered = parts.iter().map(|(lease, ..)| lease.enter()).collect::<Result<Vec<_>>>()?;
        let wanted = parts.iter().flat_map(|(lease, table, tokens)| {
            lease.wants(&table.physical_blocks, Some(layer), tokens.clone())
        });
        // Both are in the order of the sequences.
        let mut copies = store.prepare(wanted)?.copies.into_iter().peekable();
        for (index, (lease, table, tokens)) in parts.into_iter().enumerate() {
            while let Some((_, copy)) = copies.next_if(|&(id, _)| id == lease.id()) {
                table.adopt_at(copy.block_index, copy.to);
            }
            let (keys, values) = rows_of(index);
            write_rows(store.rows()?, table, layer, tokens, keys, values)?;
        }
        drop(entered);
        for (handle, &position) in handles.iter_mut().zip(positions) {
            handle.note_write(position);
        }
        Ok(())
    }

    /// Checks the arguments of a write, whose keys and values have so many elements, and returns the
    /// tokens that it is for.
    fn check_write(
        &self,
        layer: usize,
        position: usize,
        keys: usize,
        values: usize,
    ) -> Result<Range<usize>> {
        let geometry = *self.lease.store().rows()?.geometry();
        let (width, num_layers) = (geometry.width, geometry.shape.num_layers);
        if keys != values {
            return Err(KvError::LengthMismatch { keys, values });
        }
        if !keys.is_multiple_of(width) {
            return Err(KvError::WidthMismatch { given: keys, width });
        }
        if layer >= num_layers {
            return Err(KvError::LayerOutOfRange { layer, num_layers });
        }
        let (start, end) = (position, position.saturating_add(keys / width));
        let len = self.num_tokens;
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        Ok(start..end)
    }

    /// A full block that was written to is no longer committed, and neither is what follows it.
    fn note_write(&mut self, position: usize) {
        let full = self.num_committed_tokens / self.table.block_size;
        let block_index = position / self.table.block_size;
        if block_index < full {
            self.num_committed_tokens = block_index * self.table.block_size;
        }
        self.touch();
    }

    pub(crate) fn commit(&mut self, store: &Store<T>, tokens: &[u32]) -> Result<()> {
        if self.commit_inside(store, tokens) {
            return Ok(());
        }
        self.sync()?;
        self.check_commit(tokens)?;
        Self::commit_checked(store, &mut [self], &[0], |_| tokens)
    }

    pub(crate) fn view(&self, layer: usize, start: usize, end: usize) -> Result<PagedSpan<T>> {
        let entered = self.lease.enter()?;
        self.check_table(&entered)?;
        self.check_read(layer, start, end)?;
        let pinned = self.lease.pin(layer, start..end, &entered)?;
        self.touch();
        Ok(PagedSpan { pinned, range: start..end })
    }

    pub(crate) fn read_range_into(
        &self,
        layer: usize,
        range: Range<usize>,
        keys: &mut Target<'_, T>,
        values: &mut Target<'_, T>,
    ) -> Result<()> {
        let rows = self.lease.store().rows()?;
        let width = rows.geometry().width;
        let wanted = range.len().saturating_mul(width);
        for (plane, given) in [("keys", keys.len()), ("values", values.len())] {
            if given < wanted {
                return Err(KvError::OutputTooShort { plane, given, wanted });
            }
        }
        let entered = self.lease.enter()?;
        self.check_table(&entered)?;
        self.check_read(layer, range.start, range.end)?;
        let mut done = 0;
        for (index, slots) in segments(range, self.table.block_size) {
            let elements = done..done + slots.len() * width;
            done = elements.end;
            let at = BlockSlots { block: self.table.physical_blocks[index], layer, slots };
            rows.read(&at, &mut keys.part(elements.clone()), &mut values.part(elements))?;
        }
        self.touch();
        Ok(())
    }

    fn check_read(&self, layer: usize, start: usize, end: usize) -> Result<()> {
        let (num_layers, len) = (self.num_layers(), self.readable());
        if layer >= num_layers {
            return Err(KvError::LayerOutOfRange { layer, num_layers });
        }
        if start > end {
            return Err(KvError::InvertedRange { start, end });
        }
        if end > len {
            return Err(KvError::RangeOutOfBounds { start, end, len });
        }
        Ok(())
    }

    /// The keys and the values of a layer, of one moment.
    fn tensors(&self, layer: usize) -> Result<[Option<TensorRef>; 2]> {
        match self.view(layer, 0, self.readable()) {
            Ok(span) => Ok(planes(span).map(Some)),
            Err(KvError::NoStorage) => Ok([None, None]),
            Err(error) => Err(error),
        }
    }

    /// Checks that tokens can be read, up to the last one if there is no `end`.
    #[cfg(feature = "python")]
    pub(crate) fn check_readable(
        &self,
        layer: usize,
        start: usize,
        end: Option<usize>,
    ) -> Result<Range<usize>> {
        self.lease.store().rows()?;
        let entered = self.lease.enter()?;
        self.check_table(&entered)?;
        let end = end.unwrap_or(self.readable());
        self.check_read(layer, start, end)?;
        Ok(start..end)
    }

    // The table

    /// Puts `table` in the place of the sequence's, and makes the sequence as long as it says.
    #[cfg(feature = "python")]
    pub(crate) fn set_table(&mut self, table: BlockTable) -> Result<()> {
        let known = (std::mem::replace(&mut self.table, table), self.edited);
        self.edited = true;
        let result = self.sync();
        if result.is_err() {
            (self.table, self.edited) = known;
        }
        result
    }

    /// Checks what a caller did to the table, without acting on it.
    fn check_table(&self, entered: &Entered<'_>) -> Result<()> {
        if !self.edited {
            return Ok(());
        }
        self.table.validate()?;
        let reason = if self.table.block_size != self.lease.store().shape().block_size {
            "its block size was changed"
        } else if !self.lease.begins_with(&self.table.physical_blocks, entered)? {
            "it names blocks that the sequence does not have there"
        } else {
            return Ok(());
        };
        Err(KvError::InconsistentTable { reason })
    }

    /// Checks what a caller did to the table, and makes the sequence as long as it says.
    #[inline]
    fn sync(&mut self) -> Result<()> {
        if self.edited { self.sync_edited() } else { Ok(()) }
    }

    #[cold]
    fn sync_edited(&mut self) -> Result<()> {
        let entered = self.lease.enter()?;
        self.check_table(&entered)?;
        let blocks = self.lease.blocks(&entered)?;
        drop(entered);
        let mut known = BlockTable::new(self.table.block_size);
        known.adopt(&blocks);
        known.extend_sequence(self.num_tokens)?;
        let edited = std::mem::replace(&mut self.table, known);
        let (len, wanted) = (self.num_tokens, edited.sequence_length);
        let store = Arc::clone(self.lease.store());
        let copies = store.unreported_copies();
        let result = if wanted < len {
            self.truncate_synced(wanted, copies).map(|_| ())
        } else {
            let extended =
                Self::extend_synced(&store, &mut [&mut *self], &[0], copies, |_| wanted - len);
            extended.map(|_| ())
        };
        match result {
            Ok(()) => self.edited = false,
            Err(_) => self.table = edited,
        }
        result.map_err(|error| match error {
            KvError::UnreportedCopy { .. } => KvError::InconsistentTable {
                reason: "its new length needs a block to be copied, which without storage only \
                         extend and truncate can report",
            },
            error => error,
        })
    }

    /// How many tokens can be read, whatever a caller did to the table.
    fn readable(&self) -> usize {
        self.num_tokens.min(self.table.sequence_length)
    }

    fn touch(&self) {
        *self.last_access.lock() = Instant::now();
    }
}

/// Gives a sequence blocks of its own for `tokens`, in all layers if `layer` is `None`; returns those
/// that it had to copy.
fn own_blocks<T: Element>(
    lease: &Lease<T>,
    table: &mut BlockTable,
    layer: Option<usize>,
    tokens: Range<usize>,
    _entered: &Entered<'_>,
) -> Result<Vec<BlockCopy>> {
    let grant = lease.store().prepare(lease.wants(&table.physical_blocks, layer, tokens))?;
    let copies = grant.copies.into_iter().map(|(_, copy)| copy).collect::<Vec<_>>();
    for copy in &copies {
        table.adopt_at(copy.block_index, copy.to);
    }
    Ok(copies)
}

/// Writes to blocks that are the sequence's own by now.
fn write_rows<T: Element>(
    rows: &BlockRows<T>,
    table: &BlockTable,
    layer: usize,
    tokens: Range<usize>,
    keys: Source<'_, T>,
    values: Source<'_, T>,
) -> Result<()> {
    let width = rows.geometry().width;
    let mut done = 0;
    for (index, slots) in segments(tokens, table.block_size) {
        let elements = done..done + slots.len() * width;
        done = elements.end;
        let at = BlockSlots { block: table.physical_blocks[index], layer, slots };
        rows.write(&at, keys.part(elements.clone()), values.part(elements))?;
    }
    Ok(())
}

/// Checks that there is a row and a position for each sequence; keys and values have so many elements.
fn check_rows(
    width: usize,
    num_sequences: usize,
    positions: &[usize],
    keys: usize,
    values: usize,
) -> Result<()> {
    if keys != values {
        return Err(KvError::LengthMismatch { keys, values });
    }
    if !keys.is_multiple_of(width) {
        return Err(KvError::WidthMismatch { given: keys, width });
    }
    for (what, given) in [("positions", positions.len()), ("rows", keys / width)] {
        if given != num_sequences {
            return Err(KvError::CountMismatch { what, given, wanted: num_sequences });
        }
    }
    Ok(())
}

fn check_numbers<T: Element>(
    store: &Store<T>,
    keys: &Source<'_, T>,
    values: &Source<'_, T>,
) -> Result<()> {
    let shape = store.shape().token_shape();
    keys.check("keys", shape)?;
    values.check("values", shape)
}

impl<T: Element> KvCacheHandle for PagedKvCacheHandle<T> {
    fn block_table(&self) -> &BlockTable {
        &self.table
    }

    fn block_table_mut(&mut self) -> &mut BlockTable {
        self.edited = true;
        &mut self.table
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_layers(&self) -> usize {
        self.lease.store().shape().num_layers
    }

    fn num_heads(&self) -> usize {
        self.lease.store().shape().num_kv_heads
    }

    fn head_dim(&self) -> usize {
        self.lease.store().shape().head_dim
    }

    fn key_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensors(layer).map(|[keys, _]| keys)
    }

    fn value_cache(&self, layer: usize) -> Result<Option<TensorRef>> {
        self.tensors(layer).map(|[_, values]| values)
    }

    fn kv_cache(&self, layer: usize) -> Result<(Option<TensorRef>, Option<TensorRef>)> {
        self.tensors(layer).map(<(_, _)>::from)
    }

    fn clone_handle(&self) -> Result<Arc<dyn KvCacheHandle>> {
        Ok(Arc::new(self.fork(None)?))
    }

    fn stats(&self) -> CacheHandleStats {
        let blocks = self.lease.enter().and_then(|entered| self.lease.blocks(&entered));
        let num_blocks = blocks.as_ref().map_or(0, Vec::len);
        let num_tokens = if blocks.is_ok() { self.num_tokens } else { 0 };
        CacheHandleStats {
            memory_bytes: num_blocks * self.lease.store().block_bytes(),
            blocks_allocated: num_blocks,
            tokens_stored: num_tokens,
            utilization: share(num_tokens, num_blocks * self.lease.store().shape().block_size),
            last_access: *self.last_access.lock(),
        }
    }

    fn is_valid(&self) -> bool {
        self.lease.is_open()
    }

    fn cache_id(&self) -> String {
        self.lease.cache_id()
    }
}

/// Tokens of one layer of a sequence that stay as they are while this lives.
///
/// It owns its share of the memory. The handle can write, be truncated, freed and dropped; a block
/// that is in the way of that is copied first, or waits.
#[derive(Debug)]
#[must_use = "the tokens stay as they are until it is dropped"]
pub struct PagedSpan<T: Element = f32> {
    pinned: PinnedBlocks<T>,
    /// Positions in the sequence.
    range: Range<usize>,
}

impl<T: Element> PagedSpan<T> {
    /// Returns the tokens' positions in the sequence.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns `[tokens, num_kv_heads, head_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        let [num_heads, head_dim] = self.pinned.store().shape().token_shape();
        [self.len(), num_heads, head_dim]
    }

    /// Returns the number of contiguous segments: one for each block.
    pub fn num_segments(&self) -> usize {
        self.pinned.rows().len()
    }

    /// Returns the tokens of one block, with their positions in the sequence; `None` past the last.
    pub fn segment(&self, index: usize) -> Option<KVSpan<'_, T>> {
        let shape = self.pinned.store().shape();
        let stored = self.pinned.rows().get(index)?.stored();
        let block_start = (self.range.start / shape.block_size + index) * shape.block_size;
        let start = block_start.max(self.range.start);
        let end = self.range.end.min(block_start + shape.block_size);
        Some(KVSpan::new(shape.token_shape(), start..end, stored))
    }

    /// Returns all segments in order.
    pub fn segments(&self) -> impl Iterator<Item = KVSpan<'_, T>> {
        (0..self.num_segments()).filter_map(|index| self.segment(index))
    }
}
