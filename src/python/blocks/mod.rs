//! Sequences in blocks: the manager, its handles, and what they tell.
//!
//! Calls into the core are made detached, since they take locks, and so is the drop of whatever holds
//! blocks. Attached are the few that wait for nothing: `try_extend` and `try_commit`, which give up
//! where they would have to, and those that read what never changes, or the epoch, which has no lock.

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
