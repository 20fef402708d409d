//! `LayerKvCache`.

use std::ops::Range;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyTuple};

use super::buffer::{Foreign, Lease, Opened, Room, Side, Tokens, Values, Wanted, call, new_array};
use super::config::PyKVCacheConfig;
use super::convert::{NumTokens, Seconds, in_entry, positions_of, push};
use super::error::InvalidInputError;
use super::fork::{self, ProcessLocal};
use super::patience;
use super::reserved::{PyReservedSpan, positions};
use super::span::PyKVSpan;
use super::typed::{AnyLayerKvCache, AnyPinnedSpan, each, of_dtype, same_for_each};
use crate::dtype::Element;
use crate::layer::LayerKvCache;
use crate::memory::RowWrite;

/// The keys and values of one sequence in one transformer layer, in one pre-allocated buffer.
///
/// Safe to use from many threads. Tokens ``0..len`` are published: appending past them never waits
/// for a reader or a view and never disturbs one; changing them (overwriting, ``truncate``,
/// ``reset``) raises PinnedError while a view of an overlapping range is alive, or waits for it up
/// to ``timeout`` seconds if one is given (``float("inf")`` waits without limit, ``None`` not at
/// all). No wait holds the interpreter, and Ctrl-C ends every
/// wait. After any exception the cache is as it was.
///
/// Keys and values are C-contiguous: NumPy arrays, any other buffer, or DLPack exporters such as
/// PyTorch tensors. One token is [num_heads, head_dim] or flat; many are
/// [tokens, num_heads, head_dim] or [tokens, num_heads * head_dim].
///
/// They have the dtype of the cache, and are copied as they are, or float32, and are rounded to
/// nearest, ties to even, while they are copied. bfloat16 is that of ml_dtypes, PyTorch or JAX. A
/// cache of int8 takes float32 alone, and finds a scale for each head of a token: its largest
/// magnitude divided by 127; infinity and NaN are refused. ``read_kv``, ``read_range`` and
/// ``read_range_into`` give float32 of int8; views give the int8 and the scales.
///
/// An empty cache is false, as an empty list is: ask ``cache is None`` for a missing one.
///
/// ``copy.copy`` gives a cache that shares the tokens, ``copy.deepcopy`` one with a copy of them.
/// A cache can not be used in a child that was forked after it was made.
///
/// Parameters
/// ----------
/// config : KVCacheConfig, optional
///     The shape; by default ``KVCacheConfig()``. No buffer is allocated yet.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(num_heads=2, hidden_dim_per_head=4))
/// >>> prompt = np.ones((3, 2, 4), dtype=np.float32)
/// >>> cache.append(prompt, prompt)
/// range(0, 3)
/// >>> span = cache.view()
/// >>> span.keys.shape
/// (3, 2, 4)
#[pyclass(name = "LayerKvCache", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(super) struct PyLayerKvCache {
    config: PyKVCacheConfig,
    cache: ProcessLocal<AnyLayerKvCache>,
}

impl PyLayerKvCache {
    pub(super) fn with_cache(config: PyKVCacheConfig, cache: AnyLayerKvCache) -> Self {
        Self { config, cache: ProcessLocal::new(cache) }
    }

    pub(super) fn parts(&self) -> PyResult<(PyKVCacheConfig, &AnyLayerKvCache)> {
        Ok((self.config, self.cache.get()?))
    }

    /// Heads and elements of a head.
    fn dims(&self) -> [usize; 2] {
        [self.config.config.num_heads, self.config.config.hidden_dim_per_head]
    }

    /// Bytes of the keys and the values of so many tokens.
    fn nbytes_of(&self, num_tokens: usize) -> usize {
        let itemsize = self.config.dtype.itemsize();
        num_tokens.saturating_mul(2 * self.config.config.token_width() * itemsize)
    }

    /// Bytes from the length of the cache to `end`, which a call may have to zero.
    #[inline]
    fn nbytes_up_to(&self, cache: &AnyLayerKvCache, end: usize) -> usize {
        let len = each!(cache, cache => cache.len());
        // Most calls leave no gap.
        if end <= len { 0 } else { self.nbytes_of(end - len) }
    }

    fn len(&self) -> PyResult<usize> {
        let cache = self.cache.get()?;
        Ok(each!(cache, cache => cache.len()))
    }

    fn wanted(&self, tokens: Tokens) -> [Wanted; 2] {
        let (dtype, [heads, dim]) = (self.config.dtype, self.dims());
        ["keys", "values"].map(|name| Wanted { name, dtype, tokens, heads, dim })
    }

    fn pin(&self, py: Python<'_>, start: usize, end: Option<usize>) -> PyResult<AnyPinnedSpan> {
        let cache = self.cache.get()?;
        patience::run(py, 0, None, |patience| {
            Ok(same_for_each!(cache, cache => cache.pin_until(start, end, patience.deadline)?))
        })
    }

    /// All tokens there are.
    pub(super) fn pin_all(&self, py: Python<'_>) -> PyResult<AnyPinnedSpan> {
        self.pin(py, 0, None)
    }

    fn pin_token(&self, py: Python<'_>, token_idx: NumTokens) -> PyResult<AnyPinnedSpan> {
        self.pin(py, token_idx.0, Some(token_idx.0.saturating_add(1)))
    }

    /// New arrays with the keys and the values of a range.
    fn copies<'py>(
        &self,
        py: Python<'py>,
        range: Range<usize>,
        axes: &[usize],
    ) -> PyResult<Bound<'py, PyTuple>> {
        // Before there is an attempt to allocate as much. It is not pinned, so that to read it keeps
        // nobody from changing it.
        let cache = self.cache.get()?;
        each!(cache, cache => cache.check_stored(range.start, range.end))?;
        let dtype = self.config.dtype.of_copies();
        let (keys, values) = (new_array(py, dtype, axes)?, new_array(py, dtype, axes)?);
        let (keys_room, values_room) = self.room([&keys, &values], ["keys", "values"])?;
        self.copy_out(py, range, &keys_room, &values_room)?;
        PyTuple::new(py, [&keys, &values])
    }

    fn room<'a, 'py>(
        &self,
        objects: [&'a Bound<'py, PyAny>; 2],
        names: [&'static str; 2],
    ) -> PyResult<(Room<'a, 'py>, Room<'a, 'py>)> {
        Room::pair(objects, names, self.config.dtype, self.dims())
    }

    fn copy_out(
        &self,
        py: Python<'_>,
        range: Range<usize>,
        keys: &Room<'_, '_>,
        values: &Room<'_, '_>,
    ) -> PyResult<()> {
        let cache = self.cache.get()?;
        let nbytes = self.nbytes_of(range.len());
        let (mut keys, mut values) = (keys.values(), values.values());
        each!(cache, cache => patience::run(py, nbytes, None, |patience| {
            let (range, deadline) = (range.clone(), patience.deadline);
            cache.copy_out_until(range, &mut keys.target(), &mut values.target(), deadline)
        }))
    }

    /// Writes rows `(token, keys, values)` given one by one.
    fn write_entries(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let mut fields = Vec::new();
        for (index, entry) in entries.try_iter()?.enumerate() {
            let entry = entry?;
            let tuple = entry.cast::<PyTuple>().map_err(PyErr::from);
            let checked = tuple.and_then(entry_fields).map_err(|error| in_entry(py, index, error));
            push(py, &mut fields, checked?)?;
        }
        // What may run Python code is all done before the first look at an array.
        let mut opened = Vec::new();
        for (index, (token, keys, values)) in fields.iter().enumerate() {
            let [keys_wanted, values_wanted] = self.wanted(Tokens::One);
            let pair = Opened::new(keys, keys_wanted)
                .and_then(|keys| Ok((keys, Opened::new(values, values_wanted)?)));
            push(py, &mut opened, (token.0, pair.map_err(|error| in_entry(py, index, error))?))?;
        }
        let rows = opened
            .into_iter()
            .enumerate()
            .map(|(index, (at, (keys, values)))| {
                let looked = keys.look().and_then(|keys| Ok((at, keys, values.look()?)));
                looked.map_err(|error| in_entry(py, index, error))
            })
            .collect::<PyResult<Vec<_>>>()?;
        let writes: Vec<_> =
            rows.iter().map(|(at, keys, values)| (*at, keys.values(), values.values())).collect();
        let nbytes = rows.iter().map(|(_, keys, values)| keys.nbytes() + values.nbytes()).sum();
        self.write_batch(py, &writes, nbytes, timeout)
    }

    /// Writes rows given as three arrays.
    fn write_arrays(
        &self,
        py: Python<'_>,
        token_idxs: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        // First, since it may run Python code, which may take the memory of an array away.
        let tokens = positions_of(token_idxs)?;
        let (keys, values) = Foreign::pair([keys, values], self.wanted(Tokens::Many))?;
        let width = self.config.config.token_width();
        let given = (tokens.len(), keys.len() / width, values.len() / width);
        if given.0 != given.1 || given.0 != given.2 {
            return Err(InvalidInputError::new_err((format!(
                "{} token indices were given with {} rows of keys and {} rows of values: all \
                 must be the same",
                given.0, given.1, given.2
            ),)));
        }
        let writes: Vec<_> = tokens
            .into_iter()
            .enumerate()
            .map(|(row, at)| (at, keys.token(row, width), values.token(row, width)))
            .collect();
        self.write_batch(py, &writes, keys.nbytes() + values.nbytes(), timeout)
    }

    fn write_batch(
        &self,
        py: Python<'_>,
        writes: &[(usize, Values<'_>, Values<'_>)],
        nbytes: usize,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let cache = self.cache.get()?;
        let end = writes.iter().map(|(at, ..)| at.saturating_add(1)).max().unwrap_or(0);
        let nbytes = nbytes.max(self.nbytes_up_to(cache, end));
        patience::run(
            py,
            nbytes,
            timeout.map(|timeout| timeout.0),
            |patience| each!(cache, cache => cache.write_batch(writes.iter().map(row_write), patience)),
        )
    }
}

#[pymethods]
impl PyLayerKvCache {
    #[new]
    #[pyo3(signature = (config = None))]
    fn new(config: Option<PyKVCacheConfig>) -> PyResult<Self> {
        fork::check_process()?;
        let config = config.unwrap_or_default();
        let cache = of_dtype!(config.dtype, T => LayerKvCache::<T>::with_element(config.config));
        Ok(Self::with_cache(config, cache))
    }

    // Writing

    /// Makes the first `seq_len` tokens readable; those never written are zeros.
    ///
    /// The first call allocates the buffer. The length becomes `seq_len`, or the capacity if that
    /// is less, and never shrinks.
    ///
    /// Raises InvalidInputError if `seq_len` is 0, OutOfMemoryError, and ReservedError if the
    /// length would move while a reservation is open.
    fn initialize(&self, py: Python<'_>, seq_len: NumTokens) -> PyResult<()> {
        let cache = self.cache.get()?;
        let nbytes = self.nbytes_up_to(cache, seq_len.0.min(self.capacity()));
        patience::run(
            py,
            nbytes,
            None,
            |patience| each!(cache, cache => cache.initialize_until(seq_len.0, patience.deadline)),
        )
    }

    /// Writes one token's keys and values at `token_idx`.
    ///
    /// The bound is the capacity, not the length: a write past the length moves it, and the gap
    /// reads as zeros; a write below it replaces the token. For the usual case of adding tokens at
    /// the end see ``append``.
    ///
    /// Raises InvalidInputError, CapacityExceededError, NotInitializedError before ``initialize``,
    /// PinnedError while a view of the token is alive, or KvTimeoutError after `timeout` seconds.
    #[pyo3(signature = (token_idx, keys, values, *, timeout = None))]
    fn write_kv(
        &self,
        py: Python<'_>,
        token_idx: NumTokens,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let (keys, values) = Foreign::pair([keys, values], self.wanted(Tokens::One))?;
        let cache = self.cache.get()?;
        let gap = self.nbytes_up_to(cache, token_idx.0);
        let (nbytes, timeout) = (gap.max(2 * keys.nbytes()), timeout.map(|timeout| timeout.0));
        let (keys, values) = (keys.values(), values.values());
        each!(cache, cache => patience::run(py, nbytes, timeout, |patience| {
            cache.write_row(token_idx.0, keys.source(), values.source(), patience)
        }))
    }

    /// Writes many tokens, all or none; readers see all of them or none.
    ///
    /// Either ``write_kv_batch([(token_idx, keys, values), ...])``, or three arrays:
    /// ``write_kv_batch(token_idxs, keys, values)`` with integers [n] and keys and values
    /// [n, num_heads, head_dim]. In any order; if an index occurs twice the last one wins. An empty
    /// batch is fine.
    ///
    /// Raises what ``write_kv`` raises, and says which entry is at fault.
    #[pyo3(signature = (token_idxs, keys = None, values = None, *, timeout = None))]
    fn write_kv_batch(
        &self,
        py: Python<'_>,
        token_idxs: &Bound<'_, PyAny>,
        keys: Option<&Bound<'_, PyAny>>,
        values: Option<&Bound<'_, PyAny>>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        match (keys, values) {
            (None, None) => self.write_entries(py, token_idxs, timeout),
            (Some(keys), Some(values)) => self.write_arrays(py, token_idxs, keys, values, timeout),
            _ => Err(PyTypeError::new_err(
                "write_kv_batch takes a list of (token_idx, keys, values), or three arrays",
            )),
        }
    }

    /// Adds one or more tokens at the end, and returns their positions as a range.
    ///
    /// Strict: what does not fit is refused whole (CapacityExceededError). Needs no
    /// ``initialize``. Never waits for a reader or a view.
    ///
    /// Raises InvalidInputError, CapacityExceededError, ReservedError or OutOfMemoryError.
    fn append<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyRange>> {
        let (keys, values) = Foreign::pair([keys, values], self.wanted(Tokens::Any))?;
        let cache = self.cache.get()?;
        let nbytes = keys.nbytes() + values.nbytes();
        let (keys, values) = (keys.values(), values.values());
        let range = patience::run(py, nbytes, None, |patience| {
            each!(cache, cache => {
                cache.append_until(keys.source(), values.source(), patience.deadline)
            })
        })?;
        positions(py, &range)
    }

    /// Takes the next `num_tokens` rows to compute into; see ``ReservedSpan``.
    ///
    /// Raises CapacityExceededError, ReservedError if a reservation is open, or OutOfMemoryError.
    fn reserve(&self, py: Python<'_>, num_tokens: NumTokens) -> PyResult<PyReservedSpan> {
        let cache = self.cache.get()?;
        let nbytes = self.nbytes_of(num_tokens.0);
        let reserved = patience::run(py, nbytes, None, |patience| {
            Ok(same_for_each!(cache, cache => {
                cache.reserve_until(num_tokens.0, patience.deadline)?
            }))
        })?;
        PyReservedSpan::new(py, reserved)
    }

    /// Makes `new_len` the length. The tokens beyond it are gone.
    ///
    /// Raises OutOfRangeError if `new_len` is more than the length, PinnedError while a view of the
    /// tokens beyond is alive, KvTimeoutError after `timeout` seconds, or ReservedError.
    #[pyo3(signature = (new_len, *, timeout = None))]
    fn truncate(
        &self,
        py: Python<'_>,
        new_len: NumTokens,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let cache = self.cache.get()?;
        patience::run(
            py,
            0,
            timeout.map(|timeout| timeout.0),
            |patience| each!(cache, cache => cache.truncate_with(new_len.0, patience)),
        )
    }

    /// Makes the cache empty, and keeps the buffer for the next sequence.
    ///
    /// Raises what ``truncate`` raises.
    #[pyo3(signature = (*, timeout = None))]
    fn reset(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        self.truncate(py, NumTokens(0), timeout)
    }

    // Reading

    /// Returns a view of the tokens `start` to `end`, by default all of them; see ``KVSpan``.
    ///
    /// Raises OutOfRangeError if the range is not stored.
    #[pyo3(signature = (start = NumTokens(0), end = None), text_signature = "($self, start=0, end=None)")]
    fn view(&self, py: Python<'_>, start: NumTokens, end: Option<NumTokens>) -> PyResult<PyKVSpan> {
        let pinned = self.pin(py, start.0, end.map(|end| end.0))?;
        PyKVSpan::new(py, pinned)
    }

    /// Calls ``f(keys, values)`` with read-only arrays [num_heads, head_dim] of one token, and
    /// returns its result.
    ///
    /// `f` runs under a pin and no lock: it may call the cache, start threads, raise, or keep the
    /// arrays, which then keep the token pinned. Those of an int8 cache are without their scales, for
    /// which there is ``with_read_range``.
    ///
    /// Raises OutOfRangeError if the token is not stored, and whatever `f` raises.
    fn with_read_kv<'py>(
        &self,
        py: Python<'py>,
        token_idx: NumTokens,
        f: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let lease = Lease::pinned(py, self.pin_token(py, token_idx)?)?;
        let [keys, values] = [Side::Keys, Side::Values]
            .map(|side| lease.tensor(py, side)?.of_one_token().into_array());
        // From here on the arrays alone keep the token pinned.
        drop(lease);
        call(f, &PyTuple::new(py, [keys?, values?])?, None)
    }

    /// Calls ``f(span)`` with a ``KVSpan`` of the tokens `start_token` to `end_token`, and returns
    /// its result. As for ``with_read_kv``, `f` runs under a pin and no lock.
    ///
    /// Raises OutOfRangeError if the range is not stored, and whatever `f` raises.
    fn with_read_range<'py>(
        &self,
        py: Python<'py>,
        start_token: NumTokens,
        end_token: NumTokens,
        f: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let span = self.view(py, start_token, Some(end_token))?;
        call(f, &PyTuple::new(py, [span])?, None)
    }

    /// Copies the tokens `start_token` to `end_token` to the start of two writable arrays.
    ///
    /// Larger arrays are fine; what is past the tokens is left alone. They can have the shapes of
    /// keys and values, or be flat.
    ///
    /// Raises InvalidInputError if an array is of another kind, read-only or too small, and
    /// OutOfRangeError if the range is not stored.
    fn read_range_into(
        &self,
        py: Python<'_>,
        start_token: NumTokens,
        end_token: NumTokens,
        keys_out: &Bound<'_, PyAny>,
        values_out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let names = ["keys_out", "values_out"];
        let (keys, values) = self.room([keys_out, values_out], names)?;
        self.copy_out(py, start_token.0..end_token.0, &keys, &values)
    }

    /// Returns new arrays [num_heads, head_dim] with the keys and the values of one token.
    ///
    /// Raises OutOfRangeError if the token is not stored.
    fn read_kv<'py>(&self, py: Python<'py>, token_idx: NumTokens) -> PyResult<Bound<'py, PyTuple>> {
        let [heads, dim] = self.dims();
        let range = token_idx.0..token_idx.0.saturating_add(1);
        self.copies(py, range, &[heads, dim])
    }

    /// Returns new arrays [tokens, num_heads, head_dim] with the keys and the values of the tokens
    /// `start` to `end`.
    ///
    /// Raises OutOfRangeError if the range is not stored.
    fn read_range<'py>(
        &self,
        py: Python<'py>,
        start: NumTokens,
        end: NumTokens,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let [heads, dim] = self.dims();
        self.copies(py, start.0..end.0, &[end.0.saturating_sub(start.0), heads, dim])
    }

    // The cache itself

    /// Returns true if no tokens are stored.
    fn is_empty(&self) -> PyResult<bool> {
        Ok(self.len()? == 0)
    }

    /// Has the system provide the whole buffer now, so that no later write pays for a page fault.
    ///
    /// Allocates the buffer if need be, and changes no token. Raises OutOfMemoryError.
    fn prefault(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.cache.get()?;
        patience::run(
            py,
            usize::MAX,
            None,
            |patience| each!(cache, cache => cache.prefault_until(patience.deadline)),
        )
    }

    /// The configuration the cache was made with.
    #[getter]
    fn config(&self) -> PyKVCacheConfig {
        self.config
    }

    /// Number of tokens that fit.
    #[getter]
    fn capacity(&self) -> usize {
        self.config.config.max_tokens_per_seq
    }

    /// Number of KV heads.
    #[getter]
    fn num_heads(&self) -> usize {
        self.config.config.num_heads
    }

    /// Elements of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.config.config.hidden_dim_per_head
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.config.dtype()
    }

    /// Bytes of the buffer, keys and values together; 0 before it is allocated.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        let cache = self.cache.get()?;
        Ok(each!(cache, cache => cache.nbytes()))
    }

    fn __len__(&self) -> PyResult<usize> {
        self.len()
    }

    fn __copy__(&self) -> PyResult<Self> {
        Ok(Self::with_cache(self.config, self.cache.get()?.clone()))
    }

    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> PyResult<Self> {
        let cache = self.cache.get()?;
        let copy = py.detach(|| -> crate::error::Result<_> {
            Ok(same_for_each!(cache, cache => cache.deep_clone()?))
        })?;
        Ok(Self::with_cache(self.config, copy))
    }

    fn __repr__(&self) -> String {
        let Ok(len) = self.len() else {
            return "LayerKvCache(made before fork())".to_owned();
        };
        let (capacity, [heads, dim], dtype) = (self.capacity(), self.dims(), self.dtype());
        format!(
            "LayerKvCache(len={len}, capacity={capacity}, num_heads={heads}, head_dim={dim}, \
             dtype='{dtype}')"
        )
    }
}

fn row_write<'a, T: Element>(
    &(at, keys, values): &(usize, Values<'a>, Values<'a>),
) -> RowWrite<'a, T> {
    RowWrite { at, rows: 1, keys: keys.source(), values: values.source() }
}

/// What an entry of a batch is made of: `(token_idx, keys, values)`.
fn entry_fields<'py>(
    entry: &Bound<'py, PyTuple>,
) -> PyResult<(NumTokens, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    if entry.len() != 3 {
        return Err(InvalidInputError::new_err((format!(
            "(token_idx, keys, values) is wanted, but the tuple has {} items",
            entry.len()
        ),)));
    }
    Ok((entry.get_item(0)?.extract()?, entry.get_item(1)?, entry.get_item(2)?))
}
