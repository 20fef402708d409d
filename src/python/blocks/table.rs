//! `BlockTable`.

use numpy::PyArray1;
use parking_lot::Mutex;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::block::BlockTable;
use crate::error::KvError;
use crate::ids::BlockId;
use crate::python::buffer::ids;
use crate::python::config::Dimension;
use crate::python::convert::{NumTokens, number};
use crate::python::error::UnknownBlockError;

/// Which blocks a sequence has, in the order of its tokens.
///
/// The token at a position lies in block ``position // block_size`` of the table, at offset
/// ``position % block_size``; its slot is ``block_id * block_size + offset``. No block is in a table
/// twice, none is 0, the null block, and the length is within the capacity. Comparable, and can be
/// copied and pickled.
///
/// Parameters
/// ----------
/// block_size : int
///     Tokens of a block.
/// physical_blocks : sequence of int, optional
///     Blocks to begin with.
/// sequence_length : int, optional
///     Tokens to begin with.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> table = kvspan.BlockTable(16)
/// >>> table.add_blocks([7, 9])
/// >>> table.extend_sequence(17)
/// >>> table
/// BlockTable(block_size=16, physical_blocks=[7, 9], sequence_length=17)
/// >>> table.free_tokens, table.slot(16)
/// (15, 144)
/// >>> table.slot_mapping(14, 17)
/// array([126, 127, 144])
/// >>> table.truncate(3)
/// [9]
#[pyclass(name = "BlockTable", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyBlockTable(
    /// Taken only while attached, and let go before anything else happens: nobody ever waits for it.
    Mutex<BlockTable>,
);

impl PyBlockTable {
    pub(super) fn new(table: BlockTable) -> Self {
        Self(Mutex::new(table))
    }

    /// A copy of what is in it now.
    pub(super) fn table(&self) -> BlockTable {
        self.0.lock().clone()
    }
}

#[pymethods]
impl PyBlockTable {
    #[new]
    #[pyo3(
        signature = (block_size, physical_blocks = None, sequence_length = NumTokens(0)),
        text_signature = "(block_size, physical_blocks=(), sequence_length=0)"
    )]
    fn with_blocks(
        block_size: Dimension,
        physical_blocks: Option<&Bound<'_, PyAny>>,
        sequence_length: NumTokens,
    ) -> PyResult<Self> {
        check_block_size(block_size.0)?;
        let mut table = BlockTable::new(block_size.0);
        if let Some(blocks) = physical_blocks {
            table.add_blocks(&block_ids(blocks)?)?;
        }
        table.extend_sequence(sequence_length.0)?;
        Ok(Self::new(table))
    }

    /// Ids of the sequence's blocks, in order: a new list.
    #[getter]
    fn physical_blocks(&self) -> Vec<u32> {
        self.logical_to_physical()
    }

    /// Ids by index: entry ``i`` is the id of logical block ``i``. The same as ``physical_blocks``.
    #[getter]
    fn logical_to_physical(&self) -> Vec<u32> {
        self.0.lock().logical_to_physical.clone()
    }

    /// Tokens of the sequence.
    #[getter]
    fn sequence_length(&self) -> usize {
        self.0.lock().sequence_length
    }

    /// Tokens of a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.lock().block_size
    }

    /// Number of blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.lock().num_blocks()
    }

    /// How many more tokens there is room for.
    #[getter]
    fn free_tokens(&self) -> usize {
        self.0.lock().free_tokens()
    }

    /// Whether there is room for at least one more token.
    #[getter]
    fn has_free_space(&self) -> bool {
        self.0.lock().has_free_space()
    }

    /// Returns the number of blocks that `length` tokens need.
    ///
    /// Raises InvalidConfigError if `block_size` is 0.
    #[staticmethod]
    fn blocks_needed_for_length(length: NumTokens, block_size: Dimension) -> PyResult<usize> {
        check_block_size(block_size.0)?;
        Ok(BlockTable::blocks_needed_for_length(length.0, block_size.0))
    }

    /// Appends blocks, all or none.
    ///
    /// Raises DuplicateBlockError if one is in the table already, or is given twice, and
    /// UnknownBlockError for 0, the null block.
    fn add_blocks(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = block_ids(blocks)?;
        Ok(self.0.lock().add_blocks(&blocks)?)
    }

    /// Puts `block` in the place of the block at `block_index`, and returns that one.
    ///
    /// Raises BlockIndexError if there is no such block, DuplicateBlockError if `block` is in another
    /// place of the table, and UnknownBlockError for 0, the null block.
    fn replace_block(&self, block_index: NumTokens, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = block_id(block)?;
        Ok(self.0.lock().replace_block(block_index.0, block)?.get())
    }

    /// Makes the sequence longer by `additional` tokens, within the blocks it has.
    ///
    /// Raises CapacityExceededError if the blocks do not suffice.
    fn extend_sequence(&self, additional: NumTokens) -> PyResult<()> {
        Ok(self.0.lock().extend_sequence(additional.0)?)
    }

    /// Shortens the sequence to `new_len` tokens, and returns the blocks that it needs no more.
    ///
    /// Raises OutOfRangeError if the sequence is shorter than that.
    fn truncate(&self, new_len: NumTokens) -> PyResult<Vec<u32>> {
        let blocks = self.0.lock().truncate(new_len.0)?;
        Ok(blocks.into_iter().map(BlockId::get).collect())
    }

    /// Returns the slot of the token at `position`, whether it is in the sequence yet or not.
    ///
    /// Raises CapacityExceededError if there is no block for it, and SlotOverflowError.
    fn slot(&self, position: NumTokens) -> PyResult<usize> {
        Ok(self.0.lock().slot(position.0)?)
    }

    /// Returns the slots of the tokens `start` to `end`: a new array of int64.
    ///
    /// Raises OutOfRangeError if the range ends before it starts, and what ``slot`` raises.
    fn slot_mapping<'py>(
        &self,
        py: Python<'py>,
        start: NumTokens,
        end: NumTokens,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let slots = self.0.lock().slot_mapping(start.0..end.0)?;
        let slots = (start.0..)
            .zip(slots)
            .map(|(token, slot)| i64::try_from(slot).map_err(|_| KvError::SlotOverflow { token }));
        Ok(PyArray1::from_vec(py, slots.collect::<Result<_, _>>()?))
    }

    fn __eq__(&self, other: &Bound<'_, Self>) -> bool {
        // A copy of one, since both may be the same.
        let other = other.get().table();
        *self.0.lock() == other
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (usize, Vec<u32>, usize)) {
        let BlockTable { block_size, logical_to_physical, sequence_length, .. } = slf.get().table();
        (slf.get_type(), (block_size, logical_to_physical, sequence_length))
    }

    fn __repr__(&self) -> String {
        let BlockTable { block_size, logical_to_physical, sequence_length, .. } = self.table();
        format!(
            "BlockTable(block_size={block_size}, physical_blocks={logical_to_physical:?}, \
             sequence_length={sequence_length})"
        )
    }
}

fn check_block_size(block_size: usize) -> PyResult<()> {
    if block_size == 0 {
        return Err(KvError::InvalidConfig { field: "block_size" }.into());
    }
    Ok(())
}

fn block_ids(blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    let ids = ids(blocks, "block")?;
    ids.into_iter().map(|id| BlockId::new(id).ok_or_else(null_block)).collect()
}

fn block_id(block: &Bound<'_, PyAny>) -> PyResult<BlockId> {
    match block.extract::<u32>() {
        Ok(id) => BlockId::new(id).ok_or_else(null_block),
        Err(error) if error.is_instance_of::<PyOverflowError>(block.py()) => {
            let message = format!("there is no block {}: ids are 1 to 2**32 - 1", number(block));
            Err(UnknownBlockError::new_err((message, block.clone().unbind())))
        }
        Err(error) => Err(error),
    }
}

fn null_block() -> PyErr {
    UnknownBlockError::new_err(("block 0 is the null block, which no sequence has", 0))
}
