//! Geometry of a cache, and all arithmetic on sizes, which is checked here and nowhere else.

use std::ops::Range;

use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::ids::BlockId;

/// Tokens a cache holds unless told otherwise.
pub const DEFAULT_MAX_TOKENS_PER_SEQ: usize = 8192;
/// KV heads of a token unless told otherwise.
pub const DEFAULT_NUM_HEADS: usize = 4;
/// Elements of a head unless told otherwise.
pub const DEFAULT_HIDDEN_DIM_PER_HEAD: usize = 64;

/// Alignment of each plane: a cache line, the widest vector, and what JAX asks for to alias memory.
pub(crate) const PLANE_ALIGNMENT_BYTES: usize = 64;

/// The shape of a cache: one layer's keys and values of one sequence.
///
/// Any numbers make a `KVCacheConfig`; a cache made from impossible ones reports
/// [`KvError::InvalidConfig`] or [`KvError::SizeOverflow`] at its first use.
///
/// ```
/// use kvspan::KVCacheConfig;
///
/// let config = KVCacheConfig { num_heads: 8, hidden_dim_per_head: 128, ..Default::default() };
/// assert_eq!(config.max_tokens_per_seq, 8192);
/// assert_eq!(config.token_width(), 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KVCacheConfig {
    /// The capacity, in tokens.
    pub max_tokens_per_seq: usize,
    /// Number of KV heads (not query heads).
    pub num_heads: usize,
    /// Elements of one head.
    pub hidden_dim_per_head: usize,
}

impl KVCacheConfig {
    /// Returns the number of elements in one token's keys (and in its values).
    ///
    /// Saturates where the product overflows; a cache with such a geometry is refused at its
    /// first use.
    pub const fn token_width(&self) -> usize {
        self.num_heads.saturating_mul(self.hidden_dim_per_head)
    }
}

impl Default for KVCacheConfig {
    fn default() -> Self {
        Self {
            max_tokens_per_seq: DEFAULT_MAX_TOKENS_PER_SEQ,
            num_heads: DEFAULT_NUM_HEADS,
            hidden_dim_per_head: DEFAULT_HIDDEN_DIM_PER_HEAD,
        }
    }
}

/// One row of a plane: the elements of a token, and what they are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    num_heads: usize,
    /// Elements of all heads.
    width: usize,
    data_bytes: usize,
    /// One scale a head; 0 for an element type without.
    scale_bytes: usize,
}

/// Where a plane begins: its elements, and its scales, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Plane {
    data_at: usize,
    scales_at: usize,
}

/// Where some rows of a plane are: in bytes, and how many elements and scales they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) data_at: usize,
    pub(crate) num_elements: usize,
    pub(crate) scales_at: usize,
    pub(crate) num_scales: usize,
}

impl Row {
    fn new<T: Element>(num_heads: usize, head_dim: usize) -> Option<Self> {
        let width = num_heads.checked_mul(head_dim)?;
        let data_bytes = width.checked_mul(size_of::<T>())?;
        let scale_bytes = num_heads.checked_mul(size_of::<T::Scale>())?;
        Some(Self { num_heads, width, data_bytes, scale_bytes })
    }

    /// Where `rows` of `plane` are, which are inside it.
    #[inline]
    fn place(&self, plane: Plane, rows: &Range<usize>) -> Place {
        Place {
            data_at: plane.data_at + rows.start * self.data_bytes,
            num_elements: rows.len() * self.width,
            scales_at: plane.scales_at + rows.start * self.scale_bytes,
            num_scales: rows.len() * self.num_heads,
        }
    }
}

/// A configuration that passed every check, with the sizes that follow from it.
///
/// # Invariants
///
/// No dimension is zero. The planes and their scales lie one after the other, and the whole buffer
/// is at most `isize::MAX` bytes, so that no product of an index inside these bounds with the size
/// of a row can overflow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) capacity: usize,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
    /// Elements of one token in one plane.
    pub(crate) width: usize,
    /// Bytes of the buffer: keys and values, and the scales of both.
    pub(crate) num_bytes: usize,
    row: Row,
    /// Keys and values. All that has any bytes is aligned as [`PLANE_ALIGNMENT_BYTES`] says.
    planes: [Plane; 2],
}

impl Geometry {
    /// Heads and dimensions of a token.
    pub(crate) fn token_shape(&self) -> [usize; 2] {
        [self.num_heads, self.head_dim]
    }

    /// Bytes of one token in one plane.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row.data_bytes + self.row.scale_bytes
    }

    /// Where keys and values of some rows are.
    #[inline]
    pub(crate) fn places(&self, rows: &Range<usize>) -> [Place; 2] {
        // One by one, for `map` would be a call.
        let [keys, values] = self.planes;
        [self.row.place(keys, rows), self.row.place(values, rows)]
    }

    pub(crate) fn new<T: Element>(config: &KVCacheConfig) -> Result<Self> {
        let KVCacheConfig { max_tokens_per_seq: capacity, num_heads, hidden_dim_per_head } =
            *config;
        for (field, value) in [
            ("max_tokens_per_seq", capacity),
            ("num_heads", num_heads),
            ("hidden_dim_per_head", hidden_dim_per_head),
        ] {
            if value == 0 {
                return Err(KvError::InvalidConfig { field });
            }
        }
        let sizes = || {
            let row = Row::new::<T>(num_heads, hidden_dim_per_head)?;
            let (mut num_bytes, mut planes) = (0_usize, [Plane::default(); 2]);
            let [keys, values] = &mut planes;
            for (at, row_bytes) in [
                (&mut keys.data_at, row.data_bytes),
                (&mut values.data_at, row.data_bytes),
                (&mut keys.scales_at, row.scale_bytes),
                (&mut values.scales_at, row.scale_bytes),
            ] {
                // What has no bytes is anywhere.
                if row_bytes > 0 {
                    *at = num_bytes.checked_next_multiple_of(PLANE_ALIGNMENT_BYTES)?;
                    num_bytes = row_bytes.checked_mul(capacity)?.checked_add(*at)?;
                }
            }
            isize::try_from(num_bytes).ok()?;
            Some((row, planes, num_bytes))
        };
        let (row, planes, num_bytes) = sizes().ok_or(KvError::SizeOverflow {
            capacity,
            num_heads,
            head_dim: hidden_dim_per_head,
            itemsize: T::DTYPE.itemsize(),
        })?;
        let (width, head_dim) = (row.width, hidden_dim_per_head);
        Ok(Self { capacity, num_heads, head_dim, width, num_bytes, row, planes })
    }
}

/// The shape of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockShape {
    /// Tokens of a block.
    pub(crate) block_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl BlockShape {
    /// Heads and dimensions of a token.
    pub(crate) fn token_shape(&self) -> [usize; 2] {
        [self.num_kv_heads, self.head_dim]
    }
}

/// The sizes of many blocks in one buffer: `[block][layer][K or V][slot][head][dim]`, and after the
/// elements of each block its scales, `[layer][K or V][slot][head]`.
///
/// # Invariants
///
/// No dimension is zero, and the whole buffer, the null block included, is at most `isize::MAX`
/// bytes, so that no product of indices inside these bounds can overflow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockGeometry {
    /// Blocks of the buffer: those that can be used, and the null block.
    pub(crate) num_places: usize,
    pub(crate) shape: BlockShape,
    /// Elements of one token in one plane.
    pub(crate) width: usize,
    pub(crate) block_bytes: usize,
    pub(crate) num_bytes: usize,
    row: Row,
    /// Where the scales of a block begin in it.
    scales_offset: usize,
}

impl BlockGeometry {
    pub(crate) fn new<T: Element>(num_blocks: usize, shape: BlockShape) -> Result<Self> {
        let BlockShape { block_size, num_layers, num_kv_heads, head_dim } = shape;
        for (field, value) in [
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("num_layers", num_layers),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
        ] {
            if value == 0 {
                return Err(KvError::InvalidConfig { field });
            }
        }
        let sizes = || {
            let num_places = num_blocks.checked_add(1)?;
            let row = Row::new::<T>(num_kv_heads, head_dim)?;
            let num_rows = block_size.checked_mul(2)?.checked_mul(num_layers)?;
            let scales_offset = num_rows
                .checked_mul(row.data_bytes)?
                .checked_next_multiple_of(align_of::<T::Scale>())?;
            let block_bytes = num_rows.checked_mul(row.scale_bytes)?.checked_add(scales_offset)?;
            let num_bytes = block_bytes.checked_mul(num_places)?;
            isize::try_from(num_bytes).ok()?;
            let width = row.width;
            Some(Self { num_places, shape, width, block_bytes, num_bytes, row, scales_offset })
        };
        sizes().ok_or_else(|| KvError::PoolSizeOverflow {
            factors: Box::new([num_blocks, block_size, num_layers, num_kv_heads, head_dim]),
            itemsize: T::DTYPE.itemsize(),
        })
    }

    /// Where a block begins, in bytes.
    pub(crate) fn block_at(&self, block: BlockId) -> usize {
        block.index() * self.block_bytes
    }

    /// Where keys and values of some slots are.
    pub(crate) fn places(&self, block: BlockId, layer: usize, slots: &Range<usize>) -> [Place; 2] {
        let block_at = self.block_at(block);
        let plane = |side: usize| {
            let num_rows = (2 * layer + side) * self.shape.block_size;
            let data_at = block_at + num_rows * self.row.data_bytes;
            let scales_at = block_at + self.scales_offset + num_rows * self.row.scale_bytes;
            self.row.place(Plane { data_at, scales_at }, slots)
        };
        [plane(0), plane(1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_on_a_cache_line_after_the_keys() {
        let config = KVCacheConfig { max_tokens_per_seq: 3, num_heads: 1, hidden_dim_per_head: 5 };
        let geometry = Geometry::new::<f32>(&config).unwrap();
        assert_eq!((geometry.width, geometry.num_bytes), (5, 124));
        let [keys, values] = geometry.places(&(1..3));
        assert_eq!((keys.data_at, keys.num_elements), (20, 10));
        assert_eq!((values.data_at, values.num_elements), (84, 10));
    }

    #[test]
    fn scales_begin_on_a_cache_line_after_the_values() {
        let config = KVCacheConfig { max_tokens_per_seq: 3, num_heads: 2, hidden_dim_per_head: 5 };
        let geometry = Geometry::new::<i8>(&config).unwrap();
        let place =
            |data_at, scales_at| Place { data_at, num_elements: 10, scales_at, num_scales: 2 };
        assert_eq!(geometry.places(&(1..2)), [place(10, 136), place(74, 200)]);
        assert_eq!((geometry.num_bytes, geometry.row_bytes()), (216, 18));
    }

    #[test]
    fn the_largest_size_that_fits_is_accepted_and_one_more_token_is_not() {
        let largest = isize::MAX.unsigned_abs() / (2 * 64);
        let mut config =
            KVCacheConfig { max_tokens_per_seq: largest, num_heads: 4, hidden_dim_per_head: 4 };
        assert!(Geometry::new::<f32>(&config).is_ok());
        config.max_tokens_per_seq += 1;
        assert!(matches!(Geometry::new::<f32>(&config), Err(KvError::SizeOverflow { .. })));
    }

    fn shape(
        block_size: usize,
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> BlockShape {
        BlockShape { block_size, num_layers, num_kv_heads, head_dim }
    }

    #[test]
    fn a_block_is_contiguous_and_the_null_block_has_a_place() {
        let geometry = BlockGeometry::new::<f32>(3, shape(4, 5, 2, 6)).unwrap();
        assert_eq!((geometry.width, geometry.block_bytes), (12, 1920));
        assert_eq!((geometry.num_places, geometry.num_bytes), (4, 7680));
        let [keys, values] = geometry.places(block(2), 3, &(1..3));
        assert_eq!((keys.data_at, keys.num_elements), (3840 + 6 * 192 + 48, 24));
        assert_eq!(values.data_at - keys.data_at, 192);
    }

    #[test]
    fn the_scales_of_a_block_lie_behind_its_elements_where_they_are_aligned() {
        let geometry = BlockGeometry::new::<i8>(3, shape(1, 1, 1, 3)).unwrap();
        // 6 bytes, 2 to align, and 2 scales.
        assert_eq!((geometry.block_bytes, geometry.num_bytes), (16, 64));
        let [keys, values] = geometry.places(block(2), 0, &(0..1));
        assert_eq!((keys.data_at, keys.scales_at, keys.num_scales), (32, 40, 1));
        assert_eq!((values.data_at, values.scales_at), (35, 44));
    }

    fn block(id: u32) -> BlockId {
        BlockId::new(id).unwrap()
    }

    #[test]
    fn blocks_that_no_address_space_can_hold_are_refused() {
        let blocks = |num_blocks| BlockGeometry::new::<f32>(num_blocks, shape(4, 1, 1, 4));
        let largest = isize::MAX.unsigned_abs() / 128 - 1;
        assert!(blocks(largest).is_ok());
        for num_blocks in [largest + 1, usize::MAX] {
            let error = blocks(num_blocks).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "the size of the blocks overflows: 2 x {num_blocks} blocks x 4 tokens x 1 layers x \
                     1 heads x 4 elements of 4 bytes"
                )
            );
        }
        let zero = BlockGeometry::new::<f32>(1, shape(1, 0, 1, 1));
        assert!(matches!(zero, Err(KvError::InvalidConfig { field: "num_layers" })));
    }
}
