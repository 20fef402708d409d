//! From [`KvError`] to the exceptions of `kvspan.errors`.

use std::ops::Range;

use pyo3::PyTypeInfo;
use pyo3::prelude::*;

use crate::error::KvError;

macro_rules! import_exceptions {
    ($($name:ident),* $(,)?) => {
        $(pyo3::import_exception!(kvspan.errors, $name);)*

        /// Looks all classes up, which later, as in a destructor at exit, may be too late.
        pub(super) fn import_all(py: Python<'_>) {
            $($name::type_object(py);)*
        }
    };
}

import_exceptions!(
    BlockIndexError,
    BlocksInUseError,
    CapacityExceededError,
    CorruptedError,
    DuplicateBlockError,
    ForeignHandleError,
    ForkedError,
    InconsistentTableError,
    InvalidConfigError,
    InvalidInputError,
    KvCacheError,
    KvTimeoutError,
    LayerOutOfRangeError,
    LayersDifferError,
    NoStorageError,
    NoThreadsError,
    NotInitializedError,
    OutOfBlocksError,
    OutOfMemoryError,
    OutOfRangeError,
    PinnedError,
    ReleasedError,
    RequestExistsError,
    ReservedError,
    SlotOverflowError,
    StaleHandleError,
    TokenMismatchError,
    UnknownBlockError,
    UnknownRequestError,
    ViewsAliveError,
    WouldDeadlockError,
    WrongBlockStateError,
);

impl From<KvError> for PyErr {
    fn from(error: KvError) -> Self {
        to_python(&error, error.to_string())
    }
}

/// The exception for `error`: its message, then the numbers in the order of the class's fields.
fn to_python(error: &KvError, message: String) -> PyErr {
    match error {
        KvError::InvalidConfig { .. }
        | KvError::SizeOverflow { .. }
        | KvError::PoolSizeOverflow { .. }
        | KvError::TooLarge { what: "num_blocks" | "block_size" | "the number of slots", .. } => {
            InvalidConfigError::new_err((message,))
        }
        KvError::OutOfMemory { bytes } => OutOfMemoryError::new_err((message, *bytes)),
        KvError::EmptyInitialize
        | KvError::LengthMismatch { .. }
        | KvError::WidthMismatch { .. }
        | KvError::NotFinite { .. }
        | KvError::OutputTooShort { .. }
        | KvError::TooLarge { .. }
        | KvError::AlreadyKeyed { .. }
        | KvError::LastEpoch { .. }
        | KvError::CountMismatch { .. }
        | KvError::DuplicateHandle { .. }
        | KvError::BlockSizeMismatch { .. }
        | KvError::ShapeMismatch { .. }
        | KvError::DTypeMismatch { .. }
        | KvError::HeadsNotGrouped { .. }
        | KvError::NothingToAttend
        | KvError::QueryTooLong { .. }
        | KvError::InvalidOption { .. } => InvalidInputError::new_err((message,)),
        KvError::NotInitialized => NotInitializedError::new_err((message,)),
        KvError::BatchEntry { source, .. } => to_python(source, message),
        KvError::CapacityExceeded { range, capacity } => {
            CapacityExceededError::new_err((message, range.start, range.end, *capacity))
        }
        KvError::TokenOutOfRange { token, len } => {
            OutOfRangeError::new_err((message, *token, token.saturating_add(1), *len))
        }
        KvError::InvertedRange { start, end } => OutOfRangeError::new_err((message, *start, *end)),
        KvError::RangeOutOfBounds { start, end, len }
        | KvError::NoRoomToCommit { range: Range { start, end }, len } => {
            OutOfRangeError::new_err((message, *start, *end, *len))
        }
        KvError::Pinned { range, pins } => {
            PinnedError::new_err((message, range.start, range.end, *pins))
        }
        KvError::Reserved { range } => ReservedError::new_err((message, range.start, range.end)),
        KvError::WouldDeadlock => WouldDeadlockError::new_err((message,)),
        KvError::Timeout { range, pins } => {
            KvTimeoutError::new_err((message, range.start, range.end, *pins))
        }
        KvError::OutOfBlocks { needed, free, evictable, pinned } => {
            OutOfBlocksError::new_err((message, *needed, *free, *evictable, *pinned))
        }
        KvError::UnknownBlock { block, num_blocks } => {
            UnknownBlockError::new_err((message, *block, *num_blocks))
        }
        KvError::WrongBlockState { block, state, wanted } => {
            WrongBlockStateError::new_err((message, *block, *state, *wanted))
        }
        KvError::DuplicateBlock { block } => DuplicateBlockError::new_err((message, *block)),
        KvError::BlockIndexOutOfRange { block_index, num_blocks } => {
            BlockIndexError::new_err((message, *block_index, *num_blocks))
        }
        KvError::InconsistentTable { reason } => {
            InconsistentTableError::new_err((message, *reason))
        }
        KvError::SlotOverflow { token } => SlotOverflowError::new_err((message, *token)),
        KvError::BlocksInUse { in_use } => BlocksInUseError::new_err((message, *in_use)),
        KvError::LayerOutOfRange { layer, num_layers } => {
            LayerOutOfRangeError::new_err((message, *layer, *num_layers))
        }
        KvError::LayersDiffer { layer } => LayersDifferError::new_err((message, *layer)),
        KvError::StaleHandle { cache_id } => StaleHandleError::new_err((message, cache_id.clone())),
        KvError::ForeignHandle { cache_id } => {
            ForeignHandleError::new_err((message, cache_id.clone()))
        }
        KvError::RequestExists { request_id } | KvError::DuplicateRequest { request_id } => {
            RequestExistsError::new_err((message, request_id.clone()))
        }
        KvError::UnknownRequest { request_id } => {
            UnknownRequestError::new_err((message, request_id.clone()))
        }
        KvError::TokenMismatch { token } => TokenMismatchError::new_err((message, *token)),
        KvError::NoStorage => NoStorageError::new_err((message,)),
        KvError::UnreportedCopy { .. } => NoStorageError::new_err((format!(
            "{message}: pass copies=[], a list to append them to"
        ),)),
        KvError::NoThreads { num_threads } => NoThreadsError::new_err((message, *num_threads)),
        KvError::Corrupted { what, recorded, counted } => {
            CorruptedError::new_err((message, *what, *recorded, *counted))
        }
    }
}
