//! Geometry of a cache, and all arithmetic on sizes, which is checked here and nowhere else.

use crate::dtype::Element;
use crate::error::{KvError, Result};

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

/// A configuration that passed every check, with the sizes that follow from it.
///
/// # Invariants
///
/// No dimension is zero. `width = num_heads * head_dim`, `values_offset >= capacity * width`, and
/// the whole buffer is at most `isize::MAX` bytes, so that no product of an index inside these
/// bounds with `width` can overflow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) capacity: usize,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
    /// Elements of one token in one plane.
    pub(crate) width: usize,
    /// Where the values begin, in elements; a multiple of the plane alignment.
    pub(crate) values_offset: usize,
    /// Elements of the buffer, keys and values together.
    pub(crate) num_elements: usize,
}

impl Geometry {
    /// Heads and dimensions of a token.
    pub(crate) fn token_shape(&self) -> [usize; 2] {
        [self.num_heads, self.head_dim]
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
        let itemsize = T::DTYPE.itemsize();
        let sizes = || {
            let width = num_heads.checked_mul(hidden_dim_per_head)?;
            let plane_elements = width.checked_mul(capacity)?;
            let values_offset =
                plane_elements.checked_next_multiple_of(PLANE_ALIGNMENT_BYTES / itemsize)?;
            let num_elements = values_offset.checked_add(plane_elements)?;
            let num_bytes = num_elements.checked_mul(itemsize)?;
            isize::try_from(num_bytes).ok()?;
            Some((width, values_offset, num_elements))
        };
        let (width, values_offset, num_elements) = sizes().ok_or(KvError::SizeOverflow {
            capacity,
            num_heads,
            head_dim: hidden_dim_per_head,
            itemsize,
        })?;
        Ok(Self {
            capacity,
            num_heads,
            head_dim: hidden_dim_per_head,
            width,
            values_offset,
            num_elements,
        })
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

/// The sizes of many blocks in one buffer: `[block][layer][K or V][slot][head][dim]`.
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
    /// Elements of the keys, or of the values, of one layer of a block.
    pub(crate) plane_elements: usize,
    pub(crate) block_elements: usize,
    pub(crate) num_elements: usize,
    pub(crate) block_bytes: usize,
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
        let itemsize = T::DTYPE.itemsize();
        let sizes = || {
            let num_places = num_blocks.checked_add(1)?;
            let width = num_kv_heads.checked_mul(head_dim)?;
            let plane_elements = width.checked_mul(block_size)?;
            let block_elements = plane_elements.checked_mul(2)?.checked_mul(num_layers)?;
            let num_elements = block_elements.checked_mul(num_places)?;
            isize::try_from(num_elements.checked_mul(itemsize)?).ok()?;
            Some(Self {
                num_places,
                shape,
                width,
                plane_elements,
                block_elements,
                num_elements,
                block_bytes: block_elements * itemsize,
            })
        };
        sizes().ok_or(KvError::SizeOverflow {
            capacity: num_blocks.saturating_mul(block_size).saturating_mul(num_layers),
            num_heads: num_kv_heads,
            head_dim,
            itemsize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_on_a_cache_line_after_the_keys() {
        let config = KVCacheConfig { max_tokens_per_seq: 3, num_heads: 1, hidden_dim_per_head: 5 };
        let geometry = Geometry::new::<f32>(&config).unwrap();
        assert_eq!((geometry.width, geometry.values_offset, geometry.num_elements), (5, 16, 31));
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
        assert_eq!((geometry.width, geometry.plane_elements), (12, 48));
        assert_eq!((geometry.block_elements, geometry.block_bytes), (480, 1920));
        assert_eq!((geometry.num_places, geometry.num_elements), (4, 1920));
    }

    #[test]
    fn blocks_that_no_address_space_can_hold_are_refused() {
        let blocks = |num_blocks| BlockGeometry::new::<f32>(num_blocks, shape(4, 1, 1, 4));
        let largest = isize::MAX.unsigned_abs() / 128 - 1;
        assert!(blocks(largest).is_ok());
        assert!(matches!(blocks(largest + 1), Err(KvError::SizeOverflow { .. })));
        assert!(matches!(blocks(usize::MAX), Err(KvError::SizeOverflow { .. })));
        let zero = BlockGeometry::new::<f32>(1, shape(1, 0, 1, 1));
        assert!(matches!(zero, Err(KvError::InvalidConfig { field: "num_layers" })));
    }
}
