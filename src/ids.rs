//! The numbers that name blocks, slots and handles, and the only casts between them.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

const _: () = assert!(size_of::<usize>() >= size_of::<u32>(), "block ids index arrays");
const _: () = assert!(size_of::<usize>() <= size_of::<u64>(), "bytes are counted in a u64");

/// The name of one block of a pool: a number from 1 up.
///
/// Number 0 is the null block, which pads block tables and is never handed out. There is no
/// `BlockId` for it, so that it can not be taken by accident, and an `Option<BlockId>` is no larger
/// than the number.
///
/// # Examples
///
/// ```
/// use kvspan::BlockId;
///
/// let block = BlockId::new(7).expect("7 is not the null block");
/// assert_eq!(block.get(), 7);
/// assert_eq!(BlockId::new(0), None);
/// assert_eq!(size_of::<Option<BlockId>>(), 4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(transparent)]
pub struct BlockId(NonZeroU32);

impl BlockId {
    /// Largest number of blocks of a pool. One less than there are ids, so that arrays with an entry
    /// for the null block as well can be counted anywhere.
    pub(crate) const MAX_BLOCKS: usize = widen(u32::MAX - 1);

    /// Makes an id of a number, unless that is the null block's.
    pub const fn new(id: u32) -> Option<Self> {
        match NonZeroU32::new(id) {
            Some(id) => Some(Self(id)),
            None => None,
        }
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Returns the slot of the token at `offset` in this block: `id * block_size + offset`.
    ///
    /// `None` if that is too large a number, or if the block has no such offset.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::BlockId;
    ///
    /// let block = BlockId::new(3).expect("3 is not the null block");
    /// assert_eq!(block.slot(16, 5), Some(53));
    /// assert_eq!(block.slot(16, 16), None);
    /// assert_eq!(block.slot(usize::MAX, 0), None);
    /// ```
    pub const fn slot(self, block_size: usize, offset: usize) -> Option<usize> {
        if offset >= block_size {
            return None;
        }
        match self.index().checked_mul(block_size) {
            Some(first) => first.checked_add(offset),
            None => None,
        }
    }

    /// The place of this block's entry in an array that has one for each block, the null block
    /// included.
    pub(crate) const fn index(self) -> usize {
        widen(self.get())
    }

    /// The id whose [`index`](Self::index) this is.
    pub(crate) fn from_index(index: usize) -> Option<Self> {
        u32::try_from(index).ok().and_then(Self::new)
    }
}

/// A u32 as a number of elements.
#[expect(clippy::as_conversions, reason = "asserted above to lose nothing; `From` is not const")]
pub(crate) const fn widen(number: u32) -> usize {
    number as usize
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<BlockId> for u32 {
    fn from(block: BlockId) -> Self {
        block.get()
    }
}

/// A number of elements as a u64.
#[expect(clippy::as_conversions, reason = "asserted above to lose nothing; `From` does not exist")]
pub(crate) const fn lengthen(number: usize) -> u64 {
    number as u64
}

/// The share that a part has of a whole; 0 of nothing.
#[expect(clippy::as_conversions, reason = "there is no other way from a usize to a float")]
#[expect(clippy::cast_precision_loss, reason = "it is off by less than a millionth of itself")]
pub(crate) fn share(part: usize, whole: usize) -> f32 {
    if whole == 0 { 0.0 } else { part as f32 / whole as f32 }
}

/// The share that a part has of a whole; 0 of nothing.
#[expect(clippy::as_conversions, reason = "there is no other way from a u64 to a float")]
#[expect(clippy::cast_precision_loss, reason = "a share is for people to look at")]
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A number that nobody else in this process gets, from 1 up.
pub(crate) fn serial_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}
