//! From [`KvError`] to the exceptions of `kvspan.errors`.

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
    CapacityExceededError,
    ForkedError,
    InvalidConfigError,
    InvalidInputError,
    KvCacheError,
    KvTimeoutError,
    NotInitializedError,
    OutOfMemoryError,
    OutOfRangeError,
    PinnedError,
    ReleasedError,
    ReservedError,
    ViewsAliveError,
    WouldDeadlockError,
);

impl From<KvError> for PyErr {
    fn from(error: KvError) -> Self {
        to_python(&error, error.to_string())
    }
}

/// The exception for `error`: its message, then the numbers in the order of the class's fields.
fn to_python(error: &KvError, message: String) -> PyErr {
    match error {
        KvError::InvalidConfig { .. } | KvError::SizeOverflow { .. } => {
            InvalidConfigError::new_err((message,))
        }
        KvError::OutOfMemory { bytes } => OutOfMemoryError::new_err((message, *bytes)),
        KvError::EmptyInitialize
        | KvError::LengthMismatch { .. }
        | KvError::WidthMismatch { .. }
        | KvError::NotFinite { .. }
        | KvError::OutputTooShort { .. } => InvalidInputError::new_err((message,)),
        KvError::NotInitialized => NotInitializedError::new_err((message,)),
        KvError::BatchEntry { source, .. } => to_python(source, message),
        KvError::CapacityExceeded { range, capacity } => {
            CapacityExceededError::new_err((message, range.start, range.end, *capacity))
        }
        KvError::TokenOutOfRange { token, len } => {
            OutOfRangeError::new_err((message, *token, token.saturating_add(1), *len))
        }
        KvError::InvertedRange { start, end } => OutOfRangeError::new_err((message, *start, *end)),
        KvError::RangeOutOfBounds { start, end, len } => {
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
        KvError::TooLarge { .. }
        | KvError::OutOfBlocks { .. }
        | KvError::UnknownBlock { .. }
        | KvError::WrongBlockState { .. }
        | KvError::DuplicateBlock { .. }
        | KvError::BlockIndexOutOfRange { .. }
        | KvError::InconsistentTable { .. }
        | KvError::SlotOverflow { .. }
        | KvError::AlreadyKeyed { .. }
        | KvError::BlocksInUse { .. }
        | KvError::LayerOutOfRange { .. }
        | KvError::LayersDiffer { .. }
        | KvError::CountMismatch { .. }
        | KvError::StaleHandle { .. }
        | KvError::ForeignHandle { .. }
        | KvError::RequestExists { .. }
        | KvError::UnknownRequest { .. }
        | KvError::TokenMismatch { .. }
        | KvError::NoStorage
        | KvError::Corrupted { .. } => KvCacheError::new_err((message,)),
    }
}
