//! Raw memory and what keeps its readers and writers apart: the core's only unsafe code.
//!
//! [`Rows`] is the front door, and it is sound for every call that safe code can make. A *row* is
//! one unit of `width` elements in the key plane and the same in the value plane; what a row means
//! is for the layers above.
//!
//! ```text
//!            0 ............ len .............. high water ....... capacity
//!            |  published    |  reserved, or    |  never written,  |
//!            |               |  left behind     |  still zero      |
//!   readers  | closures, pins|        -         |        -         |
//!   writers  | gate + no pin |  tail            |  tail            |
//! ```
//!
//! * The **gate** is held shared by whoever reads published rows and exclusively by whoever changes
//!   them. Appending does not touch it.
//! * The **tail** is held by whoever writes past the published rows. Reading does not touch it.
//! * A **pin** keeps a range of published rows as it is, without holding any lock.
//!
//! [`BlockRows`] is another front door, to the rows of many blocks in one allocation. There each block
//! has a lock and pins of its own. Who takes two of those locks takes that of the lower number first.
//!
//! Lock order: gate, then tail, then the leaf lock inside `Pins`. Nobody waits for a pin, and no
//! caller's code runs, while the tail or the leaf lock is held.

mod block_rows;
mod buffer;
mod deadline;
mod gate;
mod pins;
mod prefetch;
mod rows;

pub(crate) use block_rows::{BlockRows, BlockSlots, PinnedBlockRows};
#[cfg(feature = "python")]
pub(crate) use buffer::Run;
pub(crate) use buffer::{Source, Stored, Target};
pub(crate) use deadline::{Deadline, Patience};
pub(crate) use prefetch::prefetch;
pub(crate) use rows::{PinnedRows, ReservedRows, RowWrite, Rows};
