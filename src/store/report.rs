//! What the store tells about itself.

use crate::block::BlockState;
use crate::hash::BlockKey;
use crate::ids::{BlockId, ratio};

/// A block that was replaced by a copy, because its content was about to change and others need it.
///
/// A manager with storage has copied the bytes already. With bookkeeping alone, whoever has the bytes
/// must copy them before the next call that takes blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Position of the block in its sequence.
    pub block_index: usize,
    /// The block that the sequence had.
    pub from: BlockId,
    /// The block that it has instead.
    pub to: BlockId,
}

/// The numbers of a [`KvCacheManager`](crate::KvCacheManager), all of one instant.
///
/// `num_free + num_cached + num_in_use` is `num_blocks`, and `hit_tokens + miss_tokens` is
/// `query_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ManagerStats {
    /// All blocks.
    pub num_blocks: usize,
    /// Blocks that nobody has, and that hold nothing that could be found.
    pub num_free: usize,
    /// Blocks that nobody has, but whose content can be found until they are reused.
    pub num_cached: usize,
    /// Blocks that a sequence or a view has.
    pub num_in_use: usize,
    /// Blocks in use that only a view has.
    pub num_pinned: usize,
    /// Blocks whose content can be found, in use or not.
    pub num_committed: usize,
    /// Bytes of one block; 0 without storage.
    pub block_bytes: usize,
    /// Sequences alive.
    pub num_sequences: usize,
    /// Tokens that were asked for in allocations that succeeded.
    pub query_tokens: u64,
    /// Those of them that were cached.
    pub hit_tokens: u64,
    /// Those of them that were not.
    pub miss_tokens: u64,
    /// Allocations that succeeded.
    pub num_allocations: u64,
    /// Allocations that were refused.
    pub num_failures: u64,
    /// Cached blocks that were reused for something else.
    pub num_evictions: u64,
    /// Blocks that were copied because one of several owners was about to write.
    pub num_copies: u64,
}

impl ManagerStats {
    /// Returns the share of the tokens asked for that were cached; 0 before any was.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hit_tokens, self.query_tokens)
    }
}

/// A plain picture of all blocks, for tests and tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The blocks that nobody has, from the one that is reused next to the last.
    pub free_queue: Vec<BlockId>,
    /// Every block, by number.
    pub blocks: Vec<BlockPicture>,
}

/// One block in an [`Inspection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPicture {
    /// The block.
    pub block: BlockId,
    /// Who has it.
    pub state: BlockState,
    /// Sequences that hold it.
    pub reference_count: usize,
    /// Views that pin it.
    pub pin_count: usize,
    /// The name of its content, if it is committed.
    pub key: Option<BlockKey>,
}

/// Who holds blocks, and which ones only views keep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeakReport {
    /// The sequences alive, the oldest first.
    pub sequences: Vec<SequenceReport>,
    /// Blocks with views, and how many.
    pub pinned_blocks: Vec<(BlockId, usize)>,
}

/// One sequence in a [`LeakReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceReport {
    /// The [`cache_id`](crate::KvCacheHandle::cache_id) of its handle.
    pub cache_id: String,
    /// The name it was allocated under.
    pub request_id: Option<String>,
    /// Its blocks, in order.
    pub blocks: Vec<BlockId>,
}

impl LeakReport {
    /// Returns true if nobody holds anything.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty() && self.pinned_blocks.is_empty()
    }
}
