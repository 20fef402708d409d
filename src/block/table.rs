//! The blocks of one sequence.

use std::ops::Range;

use crate::error::{KvError, Result};
use crate::ids::BlockId;

/// Which blocks a sequence has, in the order of its tokens.
///
/// The token at a position lies in block `position / block_size` of the table, at offset
/// `position % block_size`; its *slot* is `block_id * block_size + offset`.
///
/// # Units
///
/// Positions and lengths are tokens; ranges are half-open.
///
/// # Invariants
///
/// The fields are public because those of the type it is made after are (see Source). The methods keep
/// them in order: no block is in the table twice, both lists name the same blocks, and the length is
/// within the capacity. Someone who writes to the fields may break that; no method panics then, and
/// [`validate`](Self::validate) says what is wrong.
///
/// # Source
///
/// The API is that of the `BlockTable` in the crate `ferrum-interfaces`, the traits and types of the
/// inference engine Ferrum, which leaves the meaning of its two lists open. Here both have one
/// meaning.
///
/// # Examples
///
/// ```
/// use kvspan::{BlockId, BlockTable};
///
/// let blocks = [7, 9].map(|id| BlockId::new(id).expect("not the null block"));
/// let mut table = BlockTable::new(16);
/// table.add_blocks(&blocks)?;
/// table.extend_sequence(17)?;
///
/// assert_eq!(table.logical_to_physical, [7, 9]);
/// assert_eq!((table.free_tokens(), table.has_free_space()), (15, true));
/// assert_eq!(table.slot(16)?, 9 * 16);
/// assert_eq!(table.truncate(3)?, [blocks[1]]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Fields"))]
pub struct BlockTable {
    /// The ids of the sequence's blocks, in order.
    pub physical_blocks: Vec<BlockId>,
    /// The same as plain numbers, as kernels want them: entry `i` is the id of logical block `i`.
    pub logical_to_physical: Vec<u32>,
    /// Tokens of the sequence.
    pub sequence_length: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl BlockTable {
    /// Makes the table of an empty sequence.
    ///
    /// Can not fail: a table with a `block_size` of 0 has no room for a token.
    pub const fn new(block_size: usize) -> Self {
        Self {
            physical_blocks: Vec::new(),
            logical_to_physical: Vec::new(),
            sequence_length: 0,
            block_size,
        }
    }

    /// Makes the table of a sequence, of whose blocks the caller knows that they differ and that they
    /// have room for its tokens.
    pub(crate) fn of(block_size: usize, blocks: Vec<BlockId>, sequence_length: usize) -> Self {
        let logical_to_physical = blocks.iter().map(|block| block.get()).collect();
        Self { physical_blocks: blocks, logical_to_physical, sequence_length, block_size }
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.physical_blocks.len()
    }

    /// Returns the number of blocks that `length` tokens need.
    ///
    /// No number of blocks of size 0 is enough for a token: that is `usize::MAX`.
    pub const fn blocks_needed_for_length(length: usize, block_size: usize) -> usize {
        match (length, block_size) {
            (0, _) => 0,
            (_, 0) => usize::MAX,
            _ => length.div_ceil(block_size),
        }
    }

    /// Returns whether there is room for at least one more token.
    pub fn has_free_space(&self) -> bool {
        self.free_tokens() > 0
    }

    /// Returns how many more tokens there is room for.
    pub fn free_tokens(&self) -> usize {
        self.capacity().saturating_sub(self.sequence_length)
    }

    /// Appends blocks.
    ///
    /// # Errors
    ///
    /// [`KvError::DuplicateBlock`] if one is in the table already, or is given twice; none is added.
    ///
    /// # Complexity
    ///
    /// O(blocks in the table) for one block, as a decoding sequence needs it; O(n log n) for the n
    /// blocks in the table and given, or O(n) if they are in order.
    pub fn add_blocks(&mut self, blocks: &[BlockId]) -> Result<()> {
        if let Some(block) = repeated(&self.physical_blocks, blocks) {
            return Err(KvError::DuplicateBlock { block: block.get() });
        }
        self.adopt(blocks);
        Ok(())
    }

    /// Appends blocks of which the caller knows that the table has none: a pool just gave them out.
    pub(crate) fn adopt(&mut self, blocks: &[BlockId]) {
        self.physical_blocks.extend_from_slice(blocks);
        self.logical_to_physical.extend(blocks.iter().map(|block| block.get()));
    }

    /// Puts `block` in the place of the block at `block_index`, and returns that one.
    ///
    /// For a block that was copied before a write, or merged with an equal one.
    ///
    /// # Errors
    ///
    /// * [`KvError::BlockIndexOutOfRange`] if there is no such block.
    /// * [`KvError::DuplicateBlock`] if `block` is in another place of the table.
    pub fn replace_block(&mut self, block_index: usize, block: BlockId) -> Result<BlockId> {
        let num_blocks = self.num_blocks().min(self.logical_to_physical.len());
        if block_index >= num_blocks {
            return Err(KvError::BlockIndexOutOfRange { block_index, num_blocks });
        }
        if self.physical_blocks.contains(&block) && self.physical_blocks[block_index] != block {
            return Err(KvError::DuplicateBlock { block: block.get() });
        }
        self.logical_to_physical[block_index] = block.get();
        Ok(std::mem::replace(&mut self.physical_blocks[block_index], block))
    }

    /// The same with a block of which the caller knows that it is not in the table, and an index that
    /// is.
    pub(crate) fn adopt_at(&mut self, block_index: usize, block: BlockId) {
        self.logical_to_physical[block_index] = block.get();
        self.physical_blocks[block_index] = block;
    }

    /// Makes the sequence longer by `additional` tokens, within the blocks it has.
    ///
    /// # Errors
    ///
    /// * [`KvError::InvalidConfig`] if the block size is 0 and `additional` is not.
    /// * [`KvError::CapacityExceeded`] if the blocks do not suffice. The length stays as it is.
    pub fn extend_sequence(&mut self, additional: usize) -> Result<()> {
        if additional == 0 {
            return Ok(());
        }
        self.check_room(self.sequence_length, additional)?;
        self.sequence_length += additional;
        Ok(())
    }

    /// Shortens the sequence to `new_len` tokens and returns the blocks that it needs no more, in
    /// order. They are the caller's to give back.
    ///
    /// # Errors
    ///
    /// [`KvError::RangeOutOfBounds`] if the sequence is shorter than that.
    pub fn truncate(&mut self, new_len: usize) -> Result<Vec<BlockId>> {
        let len = self.sequence_length;
        if new_len > len {
            return Err(KvError::RangeOutOfBounds { start: 0, end: new_len, len });
        }
        let needed = Self::blocks_needed_for_length(new_len, self.block_size);
        self.sequence_length = new_len;
        self.logical_to_physical.truncate(needed);
        Ok(self.physical_blocks.split_off(needed.min(self.num_blocks())))
    }

    /// Returns the slot of the token at `position`, whether it is in the sequence yet or not.
    ///
    /// # Errors
    ///
    /// * [`KvError::InvalidConfig`] if the block size is 0.
    /// * [`KvError::CapacityExceeded`] if there is no block for it.
    /// * [`KvError::SlotOverflow`] if the slot is too large a number.
    pub fn slot(&self, position: usize) -> Result<usize> {
        self.check_room(position, 1)?;
        self.slot_in_room(position)
    }

    /// Returns the slots of the tokens in `range`.
    ///
    /// # Errors
    ///
    /// [`KvError::InvertedRange`] if it ends before it starts, those of [`slot`](Self::slot), and
    /// [`KvError::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{BlockId, BlockTable};
    ///
    /// let mut table = BlockTable::new(4);
    /// table.add_blocks(&[5, 2].map(|id| BlockId::new(id).expect("not the null block")))?;
    /// assert_eq!(table.slot_mapping(2..6)?, [22, 23, 8, 9]);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn slot_mapping(&self, range: Range<usize>) -> Result<Vec<usize>> {
        let mut slots = Vec::new();
        self.push_slots(range, &mut slots)?;
        Ok(slots)
    }

    /// The same at the end of a list, which may have some of them after an error.
    pub(crate) fn push_slots(&self, range: Range<usize>, slots: &mut Vec<usize>) -> Result<()> {
        let Range { start, end } = range;
        let Some(num_tokens) = end.checked_sub(start) else {
            return Err(KvError::InvertedRange { start, end });
        };
        if num_tokens == 0 {
            return Ok(());
        }
        self.check_room(start, num_tokens)?;
        let bytes = num_tokens.saturating_mul(size_of::<usize>());
        slots.try_reserve(num_tokens).map_err(|_| KvError::OutOfMemory { bytes })?;
        let last = self.num_blocks() - 1;
        // In a decode step it is the last block, and to divide would take as long as all the rest.
        let is_in_last = start >= last * self.block_size;
        let index = if is_in_last { last } else { start / self.block_size };
        for (index, segment) in segments_from(index, range, self.block_size) {
            let block = self.physical_blocks[index];
            let overflow =
                || KvError::SlotOverflow { token: index * self.block_size + segment.end - 1 };
            let last = block.slot(self.block_size, segment.end - 1).ok_or_else(overflow)?;
            let first = last - (segment.len() - 1);
            slots.extend((0..segment.len()).map(|place| first + place));
        }
        Ok(())
    }

    /// Checks that the fields agree with each other, as all methods leave them.
    ///
    /// # Errors
    ///
    /// [`KvError::InconsistentTable`] with the reason.
    pub fn validate(&self) -> Result<()> {
        let same = self.physical_blocks.iter().map(|block| block.get());
        let reason = if !self.logical_to_physical.iter().copied().eq(same) {
            "its two lists of blocks differ"
        } else if repeated(&[], &self.physical_blocks).is_some() {
            "a block is in it twice"
        } else if self.sequence_length > self.capacity() {
            "it has more tokens than its blocks can hold"
        } else {
            return Ok(());
        };
        Err(KvError::InconsistentTable { reason })
    }

    /// Tokens there is room for.
    fn capacity(&self) -> usize {
        self.num_blocks().saturating_mul(self.block_size)
    }

    /// Checks that there are blocks for `num_tokens` tokens from `start` on, of which there is one.
    fn check_room(&self, start: usize, num_tokens: usize) -> Result<()> {
        if self.block_size == 0 {
            return Err(KvError::InvalidConfig { field: "block_size" });
        }
        let capacity = self.capacity();
        match start.checked_add(num_tokens) {
            Some(end) if end <= capacity => Ok(()),
            end => {
                let range = start..end.unwrap_or(usize::MAX);
                Err(KvError::CapacityExceeded { range, capacity })
            }
        }
    }

    fn slot_in_room(&self, position: usize) -> Result<usize> {
        let block = self.physical_blocks[position / self.block_size];
        block
            .slot(self.block_size, position % self.block_size)
            .ok_or(KvError::SlotOverflow { token: position })
    }
}

/// The blocks that a range of tokens lies in, by index, and which slots of each.
///
/// `block_size` is at least 1.
pub(crate) fn segments(
    range: Range<usize>,
    block_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + Clone {
    segments_from(range.start / block_size, range, block_size)
}

/// The same of a range that begins in the block `index`.
fn segments_from(
    mut index: usize,
    range: Range<usize>,
    block_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + Clone {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let first = index * block_size;
        let segment = (index, start - first..(range.end - first).min(block_size));
        (index, start) = (index + 1, first.saturating_add(block_size));
        Some(segment)
    })
}

/// A block that `present` and `new` together have twice, if `present` alone has none.
fn repeated(present: &[BlockId], new: &[BlockId]) -> Option<BlockId> {
    if let [block] = new {
        return present.contains(block).then_some(*block);
    }
    let mut blocks = [present, new].concat();
    blocks.sort_unstable();
    blocks.array_windows().find(|[left, right]| left == right).map(|[block, _]| *block)
}

/// What a [`BlockTable`] is read from, before it is known to be valid.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Fields {
    physical_blocks: Vec<BlockId>,
    logical_to_physical: Vec<u32>,
    sequence_length: usize,
    block_size: usize,
}

#[cfg(feature = "serde")]
impl TryFrom<Fields> for BlockTable {
    type Error = KvError;

    fn try_from(fields: Fields) -> Result<Self> {
        let Fields { physical_blocks, logical_to_physical, sequence_length, block_size } = fields;
        let table = Self { physical_blocks, logical_to_physical, sequence_length, block_size };
        table.validate()?;
        Ok(table)
    }
}
