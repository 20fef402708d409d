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
}
