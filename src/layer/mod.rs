//! One layer's keys and values of one sequence.

mod owned;
mod span;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use owned::{PinnedSpan, ReservedSpan};
pub use span::{KVCacheEntry, KVSpan};

use crate::config::{Geometry, KVCacheConfig};
use crate::dtype::{Element, Numbers, Transfer};
use crate::error::{KvError, Result};
use crate::memory::{Deadline, Patience, RowWrite, Rows, Source, Target};

/// The keys and values of one sequence in one transformer layer, in one pre-allocated buffer.
///
/// A clone shares the tokens; [`deep_clone`](Self::deep_clone) copies them. All methods take
/// `&self`, and all of them can be called from any thread at any time.
///
/// # Shapes
///
/// A token is `num_heads * hidden_dim_per_head` elements of keys and as many of values, heads
/// outermost. Several tokens lie one after the other: `[tokens, num_heads, head_dim]` in C order.
///
/// # Units
///
/// Positions and lengths are tokens; ranges are half-open.
///
/// # Element types
///
/// | `T` | holds | takes and gives |
/// |---|---|---|
/// | `f32` | what was written | `f32` |
/// | [`f16`](crate::f16), [`bf16`](crate::bf16) | the nearest element | the same, and `f32` |
/// | `i8` | the nearest of 255 multiples of a scale, one for each head of a token | `f32` |
///
/// An `f32` is rounded to nearest, ties to even, while it is copied into the cache. The scale of an
/// int8 head is its largest magnitude divided by 127; a head with an infinity or NaN has none, and is
/// refused ([`KvError::NotFinite`]). Spans show what is stored, with its scales.
///
/// # Threads
///
/// Tokens `0..len` are published.
///
/// * Writing past the length ([`append`](Self::append), [`reserve`](Self::reserve),
///   [`initialize`](Self::initialize) and writes at or past it) never waits for a reader or a view,
///   and never disturbs one. Such calls wait for each other.
/// * Changing what is published (overwriting, [`truncate`](Self::truncate),
///   [`reset`](Self::reset)) waits for closures that are reading, whichever tokens they read, and
///   fails at once with [`KvError::Pinned`] while a view of an overlapping range is alive. The
///   variants that end in `_timeout` wait for views as well.
/// * The same from inside a read closure of the same cache, on the same thread, is
///   [`KvError::WouldDeadlock`]. (A closure that waits for *another* thread to overwrite hangs, as
///   with any lock; give that thread a timeout.)
/// * Readers do not wait for each other, and a read inside a read can not deadlock. Readers let
///   an overwriter that is waiting go first for up to 2 ms, so that they can not starve it.
/// * A batch is seen whole or not at all.
///
/// # Errors
///
/// After any error the cache is as it was. No panic, not even in a closure, leaves it unusable.
/// Arguments are checked before the state of the cache. A cache whose configuration has a zero or
/// is too large for the address space reports that ([`KvError::InvalidConfig`],
/// [`KvError::SizeOverflow`]) from every method that needs the geometry.
///
/// # Memory
///
/// The buffer is allocated at full capacity by the first call that needs it ([`initialize`](
/// Self::initialize), [`append`](Self::append), [`reserve`](Self::reserve) or
/// [`prefault`](Self::prefault); from then on the cache is initialized), as zeros, which cost no
/// physical memory until they are written ([`prefault`](Self::prefault) has them provided at
/// once). It is given back when the last clone and the last view are gone.
///
/// # Source
///
/// The API is that of the `LayerKvCache` in the crate `ghostlink-core`, a runtime for distributed inference; pins, reservations and the
/// threading contract are this crate's own.
///
/// # Examples
///
/// ```
/// use kvspan::{KVCacheConfig, LayerKvCache};
///
/// let cache = LayerKvCache::new(KVCacheConfig {
///     max_tokens_per_seq: 1024,
///     num_heads: 2,
///     hidden_dim_per_head: 4,
/// });
/// cache.initialize(2)?; // two tokens of zeros
/// cache.write_kv(1, &[1.0; 8], &[2.0; 8])?;
/// cache.append(&[3.0; 16], &[4.0; 16])?; // tokens 2 and 3
///
/// let sum: f32 = cache.with_read_range(0, 4, |span| span.keys.iter().sum())?;
/// assert_eq!(sum, 8.0 + 2.0 * 24.0);
/// # Ok::<(), kvspan::KvError>(())
/// ```
pub struct LayerKvCache<T: Element = f32> {
    /// The configuration the cache was made with.
    ///
    /// A field for compatibility's sake: to change it changes nothing, because the geometry is
    /// fixed when the cache is made.
    pub config: KVCacheConfig,
    rows: Result<Arc<Rows<T>>>,
}

impl LayerKvCache {
    /// Makes an empty cache of `f32`.
    ///
    /// Allocates no buffer and can not fail: what is wrong with `config` is reported at the first
    /// use. For another element type see [`with_element`](LayerKvCache::with_element).
    pub fn new(config: KVCacheConfig) -> Self {
        Self::with_element(config)
    }
}

impl<T: Element> LayerKvCache<T> {
    /// Makes an empty cache of any element type, as [`new`](LayerKvCache::new) does of `f32`.
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache, bf16};
    ///
    /// let config = KVCacheConfig { num_heads: 1, hidden_dim_per_head: 2, ..Default::default() };
    /// let cache = LayerKvCache::<bf16>::with_element(config);
    /// cache.append(&[1.0, 1.001], &[0.0, -2.5])?;
    /// assert_eq!(cache.read_kv(0)?.keys, [bf16::ONE, bf16::ONE]);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn with_element(config: KVCacheConfig) -> Self {
        let rows = Geometry::new::<T>(&config).map(|geometry| Arc::new(Rows::new(geometry)));
        Self { config, rows }
    }

    // Writing

    /// Makes the first `seq_len` tokens readable; those that were never written are zeros.
    ///
    /// The first call allocates the buffer. The length becomes `seq_len`, or the capacity if that
    /// is less, and never shrinks: a later call with a smaller number changes nothing.
    ///
    /// # Errors
    ///
    /// * [`KvError::EmptyInitialize`] if `seq_len` is 0.
    /// * [`KvError::OutOfMemory`] if the system does not give the buffer.
    /// * [`KvError::Reserved`] if the length would move while a reservation is alive.
    pub fn initialize(&self, seq_len: usize) -> Result<()> {
        self.initialize_until(seq_len, Deadline::Never)
    }

    /// Writes one token's keys and values at `token_idx`.
    ///
    /// The bound is the capacity, not the length: a write past the length moves it, and the gap
    /// reads as zeros. A write below the length replaces the token.
    ///
    /// # Errors
    ///
    /// In this order: [`KvError::LengthMismatch`] if `keys` and `values` differ in length,
    /// [`KvError::WidthMismatch`] if they are not one token wide, [`KvError::CapacityExceeded`],
    /// [`KvError::NotFinite`] for int8, [`KvError::NotInitialized`], then [`KvError::WouldDeadlock`], [`KvError::Pinned`] and
    /// [`KvError::Reserved`] as the type says.
    ///
    /// # Complexity
    ///
    /// One copy of two rows, no allocation; below the length, O(views alive) to look for a pin.
    pub fn write_kv<S: Element>(&self, token_idx: usize, keys: &[S], values: &[S]) -> Result<()>
    where
        T: Transfer<S>,
    {
        self.write_row(token_idx, keys.into(), values.into(), Patience::CLOSURES)
    }

    /// Does [`write_kv`](Self::write_kv), waiting up to `timeout` for closures and for views.
    ///
    /// A view that only this thread could drop is waited for in vain.
    ///
    /// # Errors
    ///
    /// Those of [`write_kv`](Self::write_kv), with [`KvError::Timeout`] in place of
    /// [`KvError::Pinned`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use kvspan::{KVCacheConfig, KvError, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(4)?;
    /// let row = vec![1.0; cache.config.token_width()];
    /// let pinned = cache.pin_range(0, 4)?;
    /// let late = cache.write_kv_timeout(2, &row, &row, Duration::from_millis(1));
    /// assert_eq!(late, Err(KvError::Timeout { range: 2..3, pins: 1 }));
    /// # drop(pinned);
    /// # Ok::<(), KvError>(())
    /// ```
    pub fn write_kv_timeout<S: Element>(
        &self,
        token_idx: usize,
        keys: &[S],
        values: &[S],
        timeout: Duration,
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        let patience = Patience::for_everything(timeout);
        self.write_row(token_idx, keys.into(), values.into(), patience)
    }

    /// Writes many tokens, all or none: entries are `(token_idx, keys, values)`, in any order.
    ///
    /// If an index occurs more than once, the last entry wins. An empty batch succeeds, even
    /// before [`initialize`](Self::initialize).
    ///
    /// # Errors
    ///
    /// Those of [`write_kv`](Self::write_kv). A bad argument is reported as
    /// [`KvError::BatchEntry`], with the position of the first bad entry; nothing is written.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, KvError, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(1)?;
    /// let row = vec![1.0; cache.config.token_width()];
    /// cache.write_kv_batch(&[(5, &row, &row), (3, &row, &row)])?;
    /// assert_eq!(cache.len(), 6);
    ///
    /// let bad = cache.write_kv_batch(&[(6, &row, &row), (7, &row, &row[1..])]);
    /// assert!(matches!(bad, Err(KvError::BatchEntry { index: 1, .. })));
    /// assert_eq!(cache.len(), 6);
    /// # Ok::<(), KvError>(())
    /// ```
    pub fn write_kv_batch<S: Element>(&self, entries: &[(usize, &[S], &[S])]) -> Result<()>
    where
        T: Transfer<S>,
    {
        self.write_batch(single_rows(entries), Patience::CLOSURES)
    }

    /// Does [`write_kv_batch`](Self::write_kv_batch), waiting up to `timeout` for closures and for
    /// views.
    ///
    /// # Errors
    ///
    /// Those of [`write_kv_batch`](Self::write_kv_batch), with [`KvError::Timeout`] in place of
    /// [`KvError::Pinned`].
    pub fn write_kv_batch_timeout<S: Element>(
        &self,
        entries: &[(usize, &[S], &[S])],
        timeout: Duration,
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        self.write_batch(single_rows(entries), Patience::for_everything(timeout))
    }

    /// Adds one or more tokens at the end, and returns their positions.
    ///
    /// Strict: what does not fit is refused whole. Unlike [`write_kv`](Self::write_kv) it needs no
    /// [`initialize`](Self::initialize), which would begin the sequence with a token of zeros.
    ///
    /// # Errors
    ///
    /// [`KvError::LengthMismatch`]; [`KvError::WidthMismatch`] unless the lengths are a multiple
    /// of a token; [`KvError::NotFinite`] for int8; [`KvError::CapacityExceeded`];
    /// [`KvError::Reserved`]; [`KvError::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// let prompt = vec![0.5; 10 * cache.config.token_width()];
    /// assert_eq!(cache.append(&prompt, &prompt)?, 0..10);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn append<S: Element>(&self, keys: &[S], values: &[S]) -> Result<Range<usize>>
    where
        T: Transfer<S>,
    {
        self.append_until(keys.into(), values.into(), Deadline::Never)
    }

    /// Takes the next `num_tokens` rows to compute into; see [`ReservedSpan`].
    ///
    /// Like [`append`](Self::append) it needs no [`initialize`](Self::initialize).
    ///
    /// # Errors
    ///
    /// [`KvError::CapacityExceeded`]; [`KvError::Reserved`] if another reservation is alive;
    /// [`KvError::OutOfMemory`].
    pub fn reserve(&self, num_tokens: usize) -> Result<ReservedSpan<T>> {
        self.reserve_until(num_tokens, Deadline::Never)
    }

    /// Makes `new_len` the length. The tokens beyond it are gone.
    ///
    /// # Errors
    ///
    /// [`KvError::RangeOutOfBounds`] if `new_len` is more than the length;
    /// [`KvError::WouldDeadlock`], [`KvError::Pinned`] and [`KvError::Reserved`] as the type says.
    /// To truncate to the present length does nothing and always succeeds.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(10)?;
    /// cache.truncate(7)?; // three draft tokens were rejected
    /// assert_eq!(cache.len(), 7);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn truncate(&self, new_len: usize) -> Result<()> {
        self.truncate_with(new_len, Patience::CLOSURES)
    }

    /// Does [`truncate`](Self::truncate), waiting up to `timeout` for closures and for views.
    ///
    /// # Errors
    ///
    /// Those of [`truncate`](Self::truncate), with [`KvError::Timeout`] in place of
    /// [`KvError::Pinned`].
    pub fn truncate_timeout(&self, new_len: usize, timeout: Duration) -> Result<()> {
        self.truncate_with(new_len, Patience::for_everything(timeout))
    }

    /// Makes the cache empty, and keeps the buffer for the next sequence.
    ///
    /// # Errors
    ///
    /// Those of [`truncate`](Self::truncate).
    pub fn reset(&self) -> Result<()> {
        self.truncate(0)
    }

    /// Does [`reset`](Self::reset), waiting up to `timeout` for closures and for views.
    ///
    /// # Errors
    ///
    /// Those of [`truncate_timeout`](Self::truncate_timeout).
    pub fn reset_timeout(&self, timeout: Duration) -> Result<()> {
        self.truncate_timeout(0, timeout)
    }

    // Reading

    /// Calls `f` with the keys and the values of one token, where they lie; without scales, for which
    /// there is [`with_read_range`](Self::with_read_range).
    ///
    /// # Locking
    ///
    /// The tokens can not change while `f` runs. `f` can do anything with the cache but change
    /// published tokens.
    ///
    /// # Errors
    ///
    /// [`KvError::TokenOutOfRange`] if the token is not stored; `f` is not called.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(1)?;
    /// let dot = cache.with_read_kv(0, |k, v| k.iter().zip(v).map(|(k, v)| k * v).sum::<f32>())?;
    /// assert_eq!(dot, 0.0);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn with_read_kv<F, R>(&self, token_idx: usize, f: F) -> Result<R>
    where
        F: FnOnce(&[T], &[T]) -> R,
    {
        // The range of the last `usize` is empty, but past any length all the same.
        let end = token_idx.saturating_add(1);
        self.rows()?
            .visit(token_idx, Some(end), |keys, values| f(keys.data, values.data))
            .map_err(|error| for_token(error, token_idx))
    }

    /// Calls `f` with the tokens `start_token..end_token`, where they lie.
    ///
    /// The empty range up to the length is fine, even before [`initialize`](Self::initialize).
    ///
    /// # Locking
    ///
    /// As for [`with_read_kv`](Self::with_read_kv).
    ///
    /// # Errors
    ///
    /// [`KvError::InvertedRange`], then [`KvError::RangeOutOfBounds`] if the range ends past the
    /// length; `f` is not called.
    pub fn with_read_range<F, R>(&self, start_token: usize, end_token: usize, f: F) -> Result<R>
    where
        F: FnOnce(KVSpan<'_, T>) -> R,
    {
        let rows = self.rows()?;
        rows.visit(start_token, Some(end_token), |keys, values| {
            let range = start_token..end_token;
            f(KVSpan::new(rows.geometry().token_shape(), range, [keys, values]))
        })
    }

    /// Copies the tokens `start_token..end_token` to the start of two buffers.
    ///
    /// Longer buffers are fine; what is past the tokens is left alone.
    ///
    /// # Errors
    ///
    /// [`KvError::InvertedRange`], then [`KvError::OutputTooShort`], then
    /// [`KvError::RangeOutOfBounds`]. Nothing is copied.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(3)?;
    /// let mut keys = vec![1.0; 2 * cache.config.token_width()];
    /// let mut values = keys.clone();
    /// cache.read_range_into(1, 3, &mut keys, &mut values)?;
    /// assert!(keys.iter().chain(&values).all(|&x| x == 0.0));
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn read_range_into<S: Element>(
        &self,
        start_token: usize,
        end_token: usize,
        keys_out: &mut [S],
        values_out: &mut [S],
    ) -> Result<()>
    where
        T: Transfer<S>,
    {
        let range = start_token..end_token;
        let (keys, values) = (&mut keys_out.into(), &mut values_out.into());
        self.copy_out_until(range, keys, values, Deadline::Never)
    }

    /// Returns a copy of one token, of int8 as `f32`.
    ///
    /// # Errors
    ///
    /// Those of [`with_read_kv`](Self::with_read_kv), which needs no copy.
    pub fn read_kv(&self, token_idx: usize) -> Result<KVCacheEntry<T::Number>> {
        let token = self.read_range(token_idx, token_idx.saturating_add(1));
        let (keys, values) = token.map_err(|error| for_token(error, token_idx))?;
        Ok(KVCacheEntry { keys, values })
    }

    /// Returns a copy of the tokens `start..end`: keys and values, of int8 as `f32`.
    ///
    /// # Errors
    ///
    /// Those of [`with_read_range`](Self::with_read_range), which needs no copy.
    pub fn read_range(&self, start: usize, end: usize) -> Result<(Numbers<T>, Numbers<T>)> {
        self.with_read_range(start, end, |span| span.to_vecs())
    }

    /// Keeps the tokens `start..end` as they are, and their memory alive, while the result lives.
    ///
    /// # Locking
    ///
    /// Holds no lock afterwards; see [`PinnedSpan`].
    ///
    /// # Errors
    ///
    /// [`KvError::InvertedRange`], then [`KvError::RangeOutOfBounds`].
    pub fn pin_range(&self, start: usize, end: usize) -> Result<PinnedSpan<T>> {
        self.pin_until(start, Some(end), Deadline::Never)
    }

    // The cache itself

    /// Returns the number of tokens stored.
    pub fn len(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.len())
    }

    /// Returns true if no tokens are stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens that fit; 0 if the configuration is not usable.
    pub fn capacity(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.geometry().capacity)
    }

    /// Returns the bytes of the buffer, keys and values together; 0 before it is allocated.
    pub fn nbytes(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.nbytes())
    }

    /// Has the system provide the whole buffer now, so that no later write pays for a page fault.
    ///
    /// Allocates the buffer if need be, and changes no token.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfMemory`].
    ///
    /// # Complexity
    ///
    /// The time the system needs to zero the memory; in huge pages about a quarter of that for
    /// small ones.
    pub fn prefault(&self) -> Result<()> {
        self.prefault_until(Deadline::Never)
    }

    /// Returns a cache of its own with a copy of the tokens.
    ///
    /// # Locking
    ///
    /// As for a closure that reads all tokens: what would change one waits for the copy.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KVCacheConfig, LayerKvCache};
    ///
    /// let cache = LayerKvCache::new(KVCacheConfig::default());
    /// cache.initialize(3)?;
    /// let copy = cache.deep_clone()?;
    /// cache.reset()?;
    /// assert_eq!(copy.len(), 3);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn deep_clone(&self) -> Result<Self> {
        let rows = self.rows()?;
        let copy = Rows::new(*rows.geometry());
        if rows.nbytes() > 0 {
            rows.visit(0, None, |keys, values| {
                copy.append((&keys).into(), (&values).into(), Deadline::Never)
            })??;
        }
        Ok(Self { config: self.config, rows: Ok(Arc::new(copy)) })
    }
}

/// The same, with what the callers in this crate settle for themselves: where the elements are, and
/// how long to wait.
impl<T: Element> LayerKvCache<T> {
    /// The geometry that was fixed when the cache was made.
    pub(crate) fn geometry(&self) -> Result<&Geometry> {
        self.rows().map(|rows| rows.geometry())
    }

    /// Whether one is a clone of the other.
    #[cfg(feature = "python")]
    pub(crate) fn is_clone_of(&self, other: &Self) -> bool {
        matches!((&self.rows, &other.rows), (Ok(own), Ok(others)) if Arc::ptr_eq(own, others))
    }

    fn rows(&self) -> Result<&Arc<Rows<T>>> {
        self.rows.as_ref().map_err(Clone::clone)
    }

    pub(crate) fn initialize_until(&self, seq_len: usize, deadline: Deadline) -> Result<()> {
        if seq_len == 0 {
            return Err(KvError::EmptyInitialize);
        }
        self.rows()?.initialize(seq_len, deadline)
    }

    pub(crate) fn write_row(
        &self,
        at: usize,
        keys: Source<'_, T>,
        values: Source<'_, T>,
        patience: Patience,
    ) -> Result<()> {
        let write = std::iter::once(RowWrite { at, rows: 1, keys, values });
        self.rows()?.batch(write).map_err(|(_, error)| error)?.write(patience)
    }

    pub(crate) fn write_batch<'a>(
        &self,
        writes: impl Iterator<Item = RowWrite<'a, T>> + Clone,
        patience: Patience,
    ) -> Result<()> {
        let batch = self
            .rows()?
            .batch(writes)
            .map_err(|(index, error)| KvError::BatchEntry { index, source: Box::new(error) })?;
        batch.write(patience)
    }

    pub(crate) fn append_until(
        &self,
        keys: Source<'_, T>,
        values: Source<'_, T>,
        deadline: Deadline,
    ) -> Result<Range<usize>> {
        self.rows()?.append(keys, values, deadline)
    }

    pub(crate) fn reserve_until(
        &self,
        num_tokens: usize,
        deadline: Deadline,
    ) -> Result<ReservedSpan<T>> {
        self.rows()?.reserve(num_tokens, deadline).map(ReservedSpan::new)
    }

    pub(crate) fn truncate_with(&self, new_len: usize, patience: Patience) -> Result<()> {
        self.rows()?.truncate(new_len, patience)
    }

    pub(crate) fn copy_out_until(
        &self,
        range: Range<usize>,
        keys: &mut Target<'_, T>,
        values: &mut Target<'_, T>,
        deadline: Deadline,
    ) -> Result<()> {
        self.rows()?.copy_out(range, keys, values, deadline)
    }

    pub(crate) fn pin_until(
        &self,
        start: usize,
        end: Option<usize>,
        deadline: Deadline,
    ) -> Result<PinnedSpan<T>> {
        self.rows()?.pin(start, end, deadline).map(PinnedSpan::new)
    }

    #[cfg(feature = "python")]
    pub(crate) fn check_stored(&self, start: usize, end: usize) -> Result<()> {
        self.rows()?.check_stored(start, end)
    }

    pub(crate) fn prefault_until(&self, deadline: Deadline) -> Result<()> {
        self.rows()?.prefault(deadline)
    }
}

/// Shares the tokens.
impl<T: Element> Clone for LayerKvCache<T> {
    fn clone(&self) -> Self {
        Self { config: self.config, rows: self.rows.clone() }
    }
}

impl Default for LayerKvCache {
    fn default() -> Self {
        Self::new(KVCacheConfig::default())
    }
}

/// Says the configuration and the length, never the data.
impl<T: Element> fmt::Debug for LayerKvCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerKvCache")
            .field("config", &self.config)
            .field("dtype", &T::DTYPE)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

fn single_rows<'a, T: Element + Transfer<S>, S: Element>(
    entries: &[(usize, &'a [S], &'a [S])],
) -> impl Iterator<Item = RowWrite<'a, T>> + Clone {
    entries.iter().map(|&(at, keys, values)| RowWrite {
        at,
        rows: 1,
        keys: keys.into(),
        values: values.into(),
    })
}

/// Says a range error in terms of the one token that was asked for.
fn for_token(error: KvError, token: usize) -> KvError {
    match error {
        KvError::RangeOutOfBounds { len, .. } => KvError::TokenOutOfRange { token, len },
        other => other,
    }
}
