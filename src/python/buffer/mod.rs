//! The cache's memory as Python's protocols see it, and Python's memory as the cache sees it.
//!
//! Beside `crate::memory`, this is the only place with unsafe code. That is why a call that Python may
//! not come back from is here as well.
//!
//! What keeps exported memory alive, and keeps it from changing, is the *object* that exported it
//! and not the number of its exports: several consumers (`torch.frombuffer`, `np.ndarray(buffer=)`)
//! give the export back at once and keep only the object. So everything that leads to the memory
//! keeps a reference to the one object that holds it, [`SpanMemory`](lease::SpanMemory).

mod array;
mod call;
mod dlpack;
mod foreign;
mod lease;
mod memoryview;
mod token_ids;
mod view;

pub(super) use array::new_array;
pub(super) use call::call;
pub(super) use dlpack::{CPU, Request};
pub(super) use foreign::{Foreign, Opened, Room, Tokens, Values, ValuesMut, Wanted};
pub(super) use lease::{Layout, Lease, Side, SpanMemory, Tensor};
pub(super) use token_ids::{IdRows, TokenIds, ids};
pub(super) use view::PyTensorView;
