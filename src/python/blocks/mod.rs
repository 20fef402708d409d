//! Sequences in blocks: the manager, its handles, and what they tell.
//!
//! Every call into the core is made detached, since all of them take locks. So is the drop of
//! whatever holds blocks.

mod batch;
mod contiguous;
mod guarded;
mod keys;
mod manager;
mod options;
mod paged;
mod report;
mod span;
mod table;
mod tensor;
mod typed;

pub(super) use contiguous::PyContiguousKvCacheHandle;
pub(super) use keys::PyKeyChain;
pub(super) use manager::PyKvCacheManager;
pub(super) use paged::PyPagedKvCacheHandle;
pub(super) use report::{
    PyBlockCopy, PyBlockPicture, PyCacheHandleStats, PyInspection, PyLeakReport, PyManagerStats,
    PySequenceReport,
};
pub(super) use span::PyPagedSpan;
pub(super) use table::PyBlockTable;
pub(super) use tensor::PyCacheTensor;
