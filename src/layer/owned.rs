//! Spans that own their share of the cache's memory.

use std::fmt;
use std::ops::Range;
#[cfg(feature = "python")]
use std::ptr::NonNull;

use super::span::KVSpan;
use crate::dtype::Element;
use crate::memory::{PinnedRows, ReservedRows};

/// Tokens that stay as they are, and whose memory stays, for as long as this lives.
///
/// Made by [`LayerKvCache::pin_range`](super::LayerKvCache::pin_range). It holds no lock: the cache
/// can be read and appended to, and even be gone altogether. Only what would change the pinned
/// tokens is refused ([`KvError::Pinned`](crate::KvError::Pinned)).
///
/// [`span`](Self::span) borrows from `self`, so that what it returns can not outlive the pin. (A
/// `Deref` to a [`KVSpan`], which is `Copy`, could not promise that.)
///
/// ```
/// use kvspan::{KVCacheConfig, KvError, LayerKvCache};
///
/// let cache = LayerKvCache::new(KVCacheConfig::default());
/// let width = cache.config.token_width();
/// cache.append(&vec![1.0; 2 * width], &vec![2.0; 2 * width])?;
///
/// let pinned = cache.pin_range(0, 1)?;
/// let row = vec![9.0; width];
/// assert_eq!(cache.write_kv(0, &row, &row), Err(KvError::Pinned { range: 0..1, pins: 1 }));
/// cache.write_kv(1, &row, &row)?; // not pinned
/// drop(cache);
/// assert_eq!(pinned.span().keys[0], 1.0);
/// # Ok::<(), KvError>(())
/// ```
#[must_use = "the pin ends when it is dropped"]
pub struct PinnedSpan<T: Element = f32> {
    rows: PinnedRows<T>,
}

impl<T: Element> PinnedSpan<T> {
    pub(super) fn new(rows: PinnedRows<T>) -> Self {
        Self { rows }
    }

    /// Borrows the pinned tokens.
    pub fn span(&self) -> KVSpan<'_, T> {
        KVSpan::new(self.rows.geometry().token_shape(), self.range(), self.rows.stored())
    }

    /// Returns the keys, `[len, num_heads, head_dim]`.
    pub fn keys(&self) -> &[T] {
        self.span().keys
    }

    /// Returns the values, `[len, num_heads, head_dim]`.
    pub fn values(&self) -> &[T] {
        self.span().values
    }

    /// Returns the pinned tokens' positions in the cache.
    pub fn range(&self) -> Range<usize> {
        self.rows.range().clone()
    }

    /// Returns the number of KV heads.
    pub fn num_heads(&self) -> usize {
        self.rows.geometry().num_heads
    }

    /// Returns the number of elements in one head.
    pub fn head_dim(&self) -> usize {
        self.rows.geometry().head_dim
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.rows.range().len()
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.rows.range().is_empty()
    }
}

/// Rows past the length, to compute keys and values into; [`commit`](Self::commit) publishes them
/// as tokens, and dropping it discards them.
///
/// Made by [`LayerKvCache::reserve`](super::LayerKvCache::reserve). The rows are zero to begin
/// with. Until it is gone, everything that would move the length fails with
/// [`KvError::Reserved`](crate::KvError::Reserved); reading and overwriting go on.
///
/// ```
/// use kvspan::{KVCacheConfig, LayerKvCache};
///
/// let cache = LayerKvCache::new(KVCacheConfig::default());
/// let mut rows = cache.reserve(3)?;
/// let (keys, values) = rows.keys_and_values_mut();
/// keys.fill(1.0);
/// values.fill(2.0);
/// assert_eq!(cache.len(), 0); // nobody sees them yet
/// assert_eq!(rows.commit(), 0..3);
/// assert_eq!(cache.len(), 3);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[must_use = "the rows are discarded when it is dropped"]
pub struct ReservedSpan<T: Element = f32> {
    rows: ReservedRows<T>,
}

impl<T: Element> ReservedSpan<T> {
    pub(super) fn new(rows: ReservedRows<T>) -> Self {
        Self { rows }
    }

    /// Borrows the rows for reading.
    pub fn span(&self) -> KVSpan<'_, T> {
        KVSpan::new(self.rows.geometry().token_shape(), self.range(), self.rows.stored())
    }

    /// Where the keys and the values are, and their scales, for whoever shares this object to read and
    /// write.
    #[cfg(feature = "python")]
    pub(crate) fn pointers(&self) -> [(NonNull<T>, NonNull<T::Scale>); 2] {
        self.rows.pointers()
    }

    /// Borrows the keys and the values for writing, `[len, num_heads, head_dim]` each.
    pub fn keys_and_values_mut(&mut self) -> (&mut [T], &mut [T]) {
        let [keys, values] = self.rows.stored_mut();
        (keys.data, values.data)
    }

    /// Borrows the scales of the keys and of the values for writing, `[len, num_heads]` each; see
    /// [`KVSpan::key_scales`]. Whoever writes elements that need scales writes those as well.
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let config = KVCacheConfig { num_heads: 1, hidden_dim_per_head: 2, ..Default::default() };
    /// let cache = LayerKvCache::<i8>::with_element(config);
    /// let mut rows = cache.reserve(1)?;
    /// rows.keys_and_values_mut().0.copy_from_slice(&[127, -64]);
    /// rows.scales_mut().0[0] = 0.5; // 63.5 and -32
    /// assert_eq!(rows.commit(), 0..1);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn scales_mut(&mut self) -> (&mut [T::Scale], &mut [T::Scale]) {
        let [keys, values] = self.rows.stored_mut();
        (keys.scales, values.scales)
    }

    /// Returns the positions that the rows will have.
    pub fn range(&self) -> Range<usize> {
        self.rows.range().clone()
    }

    /// Returns the number of KV heads.
    pub fn num_heads(&self) -> usize {
        self.rows.geometry().num_heads
    }

    /// Returns the number of elements in one head.
    pub fn head_dim(&self) -> usize {
        self.rows.geometry().head_dim
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.range().len()
    }

    /// Returns true if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.range().is_empty()
    }

    /// Publishes the rows, all at once, and returns the positions of the new tokens.
    pub fn commit(self) -> Range<usize> {
        let range = self.range();
        self.rows.commit();
        range
    }
}

impl<T: Element> fmt::Debug for PinnedSpan<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedSpan").field(&self.span()).finish()
    }
}

impl<T: Element> fmt::Debug for ReservedSpan<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReservedSpan").field(&self.span()).finish()
    }
}
