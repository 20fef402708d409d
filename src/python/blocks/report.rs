//! What a manager and a handle tell about themselves: small frozen classes.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::block::BlockState;
use crate::handle::CacheHandleStats;
use crate::ids::BlockId;
use crate::store::{BlockCopy, BlockPicture, Inspection, LeakReport, ManagerStats, SequenceReport};

/// `Name(field=value, ..)`, as Python writes an object.
macro_rules! represent {
    ($name:literal, $this:expr, $($field:ident),+ $(,)?) => {
        format!(
            "{}({})",
            $name,
            [$(format!(concat!(stringify!($field), "={:?}"), $this.$field)),+].join(", ")
        )
    };
}

/// A block that was replaced by a copy, because others need what it holds.
///
/// ``KvCacheManager.extend``, ``truncate`` and ``prepare_write`` return it. A manager with storage has
/// copied the bytes already; whoever keeps the bytes elsewhere must copy them before the next call
/// that takes blocks.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=4)
/// >>> handle = manager.allocate([1, 2, 3, 4, 5])
/// >>> fork = manager.fork(handle)
/// >>> manager.extend(fork)
/// BlockCopy(block_index=1, source=2, target=3)
#[pyclass(name = "BlockCopy", module = "kvspan", frozen, get_all, eq)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::python) struct PyBlockCopy {
    /// Position of the block in its sequence.
    block_index: usize,
    /// Id of the block that the sequence had.
    source: u32,
    /// Id of the block that it has instead.
    target: u32,
}

impl From<BlockCopy> for PyBlockCopy {
    fn from(copy: BlockCopy) -> Self {
        let BlockCopy { block_index, from, to } = copy;
        Self { block_index, source: from.get(), target: to.get() }
    }
}

#[pymethods]
impl PyBlockCopy {
    fn __repr__(&self) -> String {
        represent!("BlockCopy", self, block_index, source, target)
    }
}

/// The numbers of a manager, all of one instant.
///
/// ``num_free + num_cached + num_in_use`` is ``num_blocks``, and ``hit_tokens + miss_tokens`` is
/// ``query_tokens``. Tokens are counted once, when an allocation succeeds.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=4)
/// >>> handle = manager.allocate([1, 2, 3, 4, 5])
/// >>> stats = manager.stats()
/// >>> stats.num_free, stats.num_in_use, stats.query_tokens, stats.hit_rate
/// (6, 2, 5, 0.0)
#[pyclass(name = "ManagerStats", module = "kvspan", frozen, get_all, eq)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::python) struct PyManagerStats {
    /// All blocks.
    num_blocks: usize,
    /// Blocks that nobody has, and that hold nothing that could be found.
    num_free: usize,
    /// Blocks that nobody has, but whose content can be found until they are reused.
    num_cached: usize,
    /// Blocks that a sequence or a view has.
    num_in_use: usize,
    /// Blocks in use that only a view has.
    num_pinned: usize,
    /// Blocks whose content can be found, in use or not.
    num_committed: usize,
    /// Bytes of one block; 0 without storage.
    block_bytes: usize,
    /// Sequences alive.
    num_sequences: usize,
    /// Tokens that were asked for in allocations that succeeded.
    query_tokens: u64,
    /// Those of them that were cached.
    hit_tokens: u64,
    /// Those of them that were not.
    miss_tokens: u64,
    /// The share of the tokens asked for that were cached; 0.0 before any was.
    hit_rate: f64,
    /// Allocations that succeeded.
    num_allocations: u64,
    /// Allocations that were refused.
    num_failures: u64,
    /// Cached blocks that were reused for something else.
    num_evictions: u64,
    /// Blocks that were copied because one of several owners was about to write.
    num_copies: u64,
}

impl From<ManagerStats> for PyManagerStats {
    fn from(stats: ManagerStats) -> Self {
        Self {
            num_blocks: stats.num_blocks,
            num_free: stats.num_free,
            num_cached: stats.num_cached,
            num_in_use: stats.num_in_use,
            num_pinned: stats.num_pinned,
            num_committed: stats.num_committed,
            block_bytes: stats.block_bytes,
            num_sequences: stats.num_sequences,
            query_tokens: stats.query_tokens,
            hit_tokens: stats.hit_tokens,
            miss_tokens: stats.miss_tokens,
            hit_rate: stats.hit_rate(),
            num_allocations: stats.num_allocations,
            num_failures: stats.num_failures,
            num_evictions: stats.num_evictions,
            num_copies: stats.num_copies,
        }
    }
}

#[pymethods]
impl PyManagerStats {
    fn __repr__(&self) -> String {
        represent!(
            "ManagerStats",
            self,
            num_blocks,
            num_free,
            num_cached,
            num_in_use,
            num_pinned,
            num_committed,
            block_bytes,
            num_sequences,
            query_tokens,
            hit_tokens,
            miss_tokens,
            hit_rate,
            num_allocations,
            num_failures,
            num_evictions,
            num_copies,
        )
    }
}

/// A plain picture of all blocks, for tests and tools.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(3, block_size=4)
/// >>> handle = manager.allocate([1, 2, 3, 4])
/// >>> picture = manager.inspect()
/// >>> picture.free_queue
/// [2, 3]
/// >>> picture.blocks[0]
/// BlockPicture(block=1, state='in_use', reference_count=1, pin_count=0, key=None)
#[pyclass(name = "Inspection", module = "kvspan", frozen, eq)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::python) struct PyInspection(pub(super) Inspection);

#[pymethods]
impl PyInspection {
    /// Ids of the blocks that nobody has, from the one that is reused next to the last: a new list.
    #[getter]
    fn free_queue(&self) -> Vec<u32> {
        numbers(&self.0.free_queue)
    }

    /// Every block, by number: a new list.
    #[getter]
    fn blocks(&self) -> Vec<PyBlockPicture> {
        self.0.blocks.iter().copied().map(PyBlockPicture).collect()
    }

    fn __repr__(&self) -> String {
        let Inspection { free_queue, blocks } = &self.0;
        format!("Inspection({} blocks, {} in the free queue)", blocks.len(), free_queue.len())
    }
}

/// One block in an ``Inspection``.
///
/// ``state`` is ``"free"``, ``"cached"``, ``"in_use"`` or ``"pinned"``: nobody has it, and it holds
/// nothing that could be found; nobody has it, but its content can be found; a sequence has it; only
/// a view has it.
#[pyclass(name = "BlockPicture", module = "kvspan", frozen, eq)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::python) struct PyBlockPicture(BlockPicture);

#[pymethods]
impl PyBlockPicture {
    /// Id of the block.
    #[getter]
    fn block(&self) -> u32 {
        self.0.block.get()
    }

    /// Who has it; see the class.
    #[getter]
    fn state(&self) -> &'static str {
        match self.0.state {
            BlockState::Free => "free",
            BlockState::Cached => "cached",
            BlockState::InUse => "in_use",
            BlockState::Pinned => "pinned",
        }
    }

    /// Sequences that hold it.
    #[getter]
    fn reference_count(&self) -> usize {
        self.0.reference_count
    }

    /// Views that pin it.
    #[getter]
    fn pin_count(&self) -> usize {
        self.0.pin_count
    }

    /// The name of its content, 32 bytes, if it is committed.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.0.key.map(|key| PyBytes::new(py, key.as_bytes()))
    }

    fn __repr__(&self) -> String {
        let BlockPicture { block, reference_count, pin_count, key, .. } = self.0;
        let key = key.map_or_else(|| "None".to_owned(), |key| format!("'{key}'"));
        format!(
            "BlockPicture(block={block}, state='{}', reference_count={reference_count}, \
             pin_count={pin_count}, key={key})",
            self.state()
        )
    }
}

/// Who holds blocks, and which ones only views keep.
///
/// It is true if anything is held.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=4)
/// >>> bool(manager.leak_report())
/// False
/// >>> handle = manager.allocate([1, 2, 3, 4, 5], "chat-7")
/// >>> [(one.request_id, one.blocks) for one in manager.leak_report().sequences]
/// [('chat-7', [1, 2])]
#[pyclass(name = "LeakReport", module = "kvspan", frozen, eq)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::python) struct PyLeakReport(pub(super) LeakReport);

#[pymethods]
impl PyLeakReport {
    /// The sequences alive, the oldest first: a new list.
    #[getter]
    fn sequences(&self) -> Vec<PySequenceReport> {
        self.0.sequences.iter().cloned().map(PySequenceReport).collect()
    }

    /// Blocks with views, and how many: a new list of pairs.
    #[getter]
    fn pinned_blocks(&self) -> Vec<(u32, usize)> {
        self.0.pinned_blocks.iter().map(|&(block, pins)| (block.get(), pins)).collect()
    }

    fn __bool__(&self) -> bool {
        !self.0.is_empty()
    }

    fn __repr__(&self) -> String {
        let sequences = self.sequences().iter().map(PySequenceReport::__repr__).collect::<Vec<_>>();
        let (sequences, pinned_blocks) = (sequences.join(", "), self.pinned_blocks());
        format!("LeakReport(sequences=[{sequences}], pinned_blocks={pinned_blocks:?})")
    }
}

/// One sequence in a ``LeakReport``.
///
/// Its handle may be gone from the variables of a program, and yet be held by a traceback, a cycle or
/// a closure.
#[pyclass(name = "SequenceReport", module = "kvspan", frozen, eq)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::python) struct PySequenceReport(SequenceReport);

#[pymethods]
impl PySequenceReport {
    /// The ``cache_id`` of its handle.
    #[getter]
    fn cache_id(&self) -> &str {
        &self.0.cache_id
    }

    /// The name it was allocated under, or ``None``.
    #[getter]
    fn request_id(&self) -> Option<&str> {
        self.0.request_id.as_deref()
    }

    /// Ids of its blocks, in order: a new list.
    #[getter]
    fn blocks(&self) -> Vec<u32> {
        numbers(&self.0.blocks)
    }

    fn __repr__(&self) -> String {
        let SequenceReport { cache_id, request_id, .. } = &self.0;
        let request_id =
            request_id.as_ref().map_or_else(|| "None".to_owned(), |name| format!("{name:?}"));
        let blocks = self.blocks();
        format!("SequenceReport(cache_id={cache_id:?}, request_id={request_id}, blocks={blocks:?})")
    }
}

/// What a handle has, in real figures.
///
/// Memory that sequences share counts for each who shares it.
#[pyclass(name = "CacheHandleStats", module = "kvspan", frozen, get_all)]
#[derive(Clone, Debug)]
pub(in crate::python) struct PyCacheHandleStats {
    /// Bytes of the sequence's memory, whether filled or not.
    memory_bytes: usize,
    /// Blocks of the sequence.
    blocks_allocated: usize,
    /// Tokens of the sequence.
    tokens_stored: usize,
    /// The share of the slots that have a token, from 0 to 1; 0 without blocks.
    utilization: f32,
    /// When the handle was last used to read or write, or to make a tensor, in ``time.monotonic()``.
    last_access: f64,
}

impl PyCacheHandleStats {
    pub(super) fn new(py: Python<'_>, stats: &CacheHandleStats) -> PyResult<Self> {
        let now = py.import("time")?.call_method0("monotonic")?.extract::<f64>()?;
        Ok(Self {
            memory_bytes: stats.memory_bytes,
            blocks_allocated: stats.blocks_allocated,
            tokens_stored: stats.tokens_stored,
            utilization: stats.utilization,
            last_access: now - stats.last_access.elapsed().as_secs_f64(),
        })
    }
}

#[pymethods]
impl PyCacheHandleStats {
    fn __repr__(&self) -> String {
        represent!(
            "CacheHandleStats",
            self,
            memory_bytes,
            blocks_allocated,
            tokens_stored,
            utilization,
            last_access,
        )
    }
}

fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}
