//! What a reader sees: borrowed spans, and owned copies.

use std::ops::Range;

use bytemuck::Zeroable;

use crate::dtype::{Element, Numbers};
use crate::memory::{Stored, Target};

/// Keys and values of a range of tokens, borrowed where they lie.
///
/// # Shapes
///
/// `keys` and `values` are both `[len, num_heads, head_dim]` in C order: element `(t, h, d)` is at
/// `(t * num_heads + h) * head_dim + d`, where `t` counts from the start of the span. Where the type
/// has scales, that element is to be multiplied by the scale at `t * num_heads + h`.
///
/// # Examples
///
/// ```
/// use kvspan::{KVCacheConfig, LayerKvCache};
///
/// let cache = LayerKvCache::new(KVCacheConfig {
///     max_tokens_per_seq: 16,
///     num_heads: 2,
///     hidden_dim_per_head: 4,
/// });
/// cache.append(&[1.0; 24], &[2.0; 24])?; // three tokens
///
/// cache.with_read_range(1, 3, |span| {
///     assert_eq!((span.start(), span.end(), span.len()), (1, 3, 2));
///     assert_eq!(span.keys.len(), span.len() * span.num_heads() * span.head_dim());
///     let (keys, values) = span.token(0).unwrap(); // token 1 of the cache
///     assert_eq!((keys, values), ([1.0; 8].as_slice(), [2.0; 8].as_slice()));
/// })?;
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone, Copy, PartialEq)]
pub struct KVSpan<'a, T: Element = f32> {
    /// The keys.
    pub keys: &'a [T],
    /// The values.
    pub values: &'a [T],
    /// What each head of the keys is multiplied by, if its type needs that: `[len, num_heads]`.
    pub key_scales: &'a [T::Scale],
    /// The same for the values.
    pub value_scales: &'a [T::Scale],
    start: usize,
    end: usize,
    num_heads: usize,
    head_dim: usize,
}

impl<'a, T: Element> KVSpan<'a, T> {
    /// `range` has as many tokens as `keys` and `values` have rows of `[num_heads, head_dim]`.
    pub(crate) fn new(
        [num_heads, head_dim]: [usize; 2],
        range: Range<usize>,
        [keys, values]: [Stored<'a, T>; 2],
    ) -> Self {
        let Range { start, end } = range;
        Self {
            keys: keys.data,
            values: values.data,
            key_scales: keys.scales,
            value_scales: values.scales,
            start,
            end,
            num_heads,
            head_dim,
        }
    }

    /// Returns the first token's position in the cache.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the position one past the last token.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns the number of KV heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Returns the number of elements in one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the keys and the values of one token, `[num_heads, head_dim]` each, or `None` past
    /// the end. `index` counts from the start of the span.
    pub fn token(&self, index: usize) -> Option<(&'a [T], &'a [T])> {
        if index >= self.len() {
            return None;
        }
        let width = self.num_heads * self.head_dim;
        let row = index * width..(index + 1) * width;
        Some((self.keys.get(row.clone())?, self.values.get(row)?))
    }
}

impl<T: Element> KVSpan<'_, T> {
    /// Returns copies of the keys and of the values, multiplied by their scales if they have any.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let config = KVCacheConfig { num_heads: 1, hidden_dim_per_head: 2, ..Default::default() };
    /// let cache = LayerKvCache::<i8>::with_element(config);
    /// cache.append(&[12.7, 1.0], &[0.0, -254.0])?;
    /// cache.with_read_range(0, 1, |span| {
    ///     assert_eq!((span.values, span.value_scales), ([0, -127].as_slice(), [2.0].as_slice()));
    ///     let (keys, values) = span.to_vecs();
    ///     assert!((keys[0] - 12.7).abs() < 1e-6 && (keys[1] - 1.0).abs() < 1e-6);
    ///     assert_eq!(values, [0.0, -254.0]);
    /// })?;
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn to_vecs(&self) -> (Numbers<T>, Numbers<T>) {
        let copy = |data: &[T], scales| {
            let mut numbers = vec![T::Number::zeroed(); data.len()];
            Stored { data, scales }.copy_to(&mut Target::new(&mut numbers));
            numbers
        };
        (copy(self.keys, self.key_scales), copy(self.values, self.value_scales))
    }
}

/// Says which tokens these are and what shape they have, never the data.
impl<T: Element> std::fmt::Debug for KVSpan<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KVSpan")
            .field("tokens", &(self.start..self.end))
            .field("num_heads", &self.num_heads)
            .field("head_dim", &self.head_dim)
            .finish_non_exhaustive()
    }
}

/// An owned copy of one token's keys and values, `[num_heads, head_dim]` each.
#[derive(Clone, Debug, PartialEq)]
pub struct KVCacheEntry<T = f32> {
    /// The keys.
    pub keys: Vec<T>,
    /// The values.
    pub values: Vec<T>,
}
