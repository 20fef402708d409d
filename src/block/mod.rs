//! Blocks as numbers: who holds which, and which one is reused next.
//!
//! A block is `block_size` tokens of memory somewhere. Nothing here knows its bytes, its tokens, or
//! the name of its content. A [`BlockPool`] is the one truth about who holds a block, and a
//! [`BlockTable`] says which blocks a sequence has. Both are plain structures without a lock.

mod free_queue;
mod pool;
mod table;

pub use pool::{BlockPool, BlockState};
pub use table::BlockTable;
pub(crate) use table::segments;

use crate::error::{KvError, Result};

/// Makes an array with an entry for each block of a pool, and one for the null block, so that a
/// block's number is its place.
pub(crate) fn per_block<T: Clone>(num_blocks: usize, entry: T) -> Result<Vec<T>> {
    let len = num_blocks.saturating_add(1);
    let mut entries = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    entries.try_reserve_exact(len).map_err(|_| KvError::OutOfMemory { bytes })?;
    entries.resize(len, entry);
    Ok(entries)
}
