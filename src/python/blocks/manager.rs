//! `KvCacheManager`.

#![expect(clippy::needless_pass_by_value, reason = "arguments from Python are extracted by value")]

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::keys::GivenPrompt;
use super::options::{ExtraKeys, Options, TextOrBytes, cache_salt, lora_id, request_id};
use super::paged::{Given, GivenMany, PyPagedKvCacheHandle};
use super::report::{PyBlockCopy, PyInspection, PyLeakReport, PyManagerStats};
use super::span::PyPagedSpan;
use super::typed::AnyKvCacheManager;
use crate::dtype::DType;
use crate::manager::{KvCacheManagerConfig, Storage};
use crate::prefix::Duplicates;
use crate::python::buffer::{Foreign, Room, TokenIds, Tokens, Wanted, new_array};
use crate::python::config::{Dimension, Dtype};
use crate::python::convert::{Layer, NumTokens, in_range, positions_of};
use crate::python::error::InvalidInputError;
use crate::python::fork::{self, ProcessLocal};
use crate::python::patience::is_long_copy;

/// Blocks of keys and values, which sequences with equal beginnings share.
///
/// ``allocate`` starts a sequence: what is cached of its beginning is found and held, and blocks for
/// the rest are taken, in one step. ``write`` its keys and values from ``num_cached_tokens`` on, layer
/// by layer, and ``commit`` the tokens: full blocks can be found from then on. ``extend`` makes room
/// for more. A ``fork`` has the same tokens; a block is copied when one of the two writes to it.
/// ``free``, or the end of the handle, gives the blocks back; committed ones can be found until they
/// are reused, the least recently used first.
///
/// Safe to use from many threads. After any exception everything is as it was. Every use of a handle
/// raises StaleHandleError if its sequence was freed, and ForeignHandleError if another manager made
/// it.
///
/// Tokens are numbers from 0 to 2**32 - 1: C-contiguous int32, uint32 or int64 (NumPy arrays, other
/// buffers, DLPack exporters), or sequences of integers, which cost more. Keys and values are
/// C-contiguous and of the manager's dtype or float32, as ``LayerKvCache`` takes them:
/// [num_kv_heads, head_dim] or flat for one token, [tokens, num_kv_heads, head_dim] or
/// [tokens, num_kv_heads * head_dim] for many.
///
/// A manager can not be used in a child that was forked after it was made.
///
/// Parameters
/// ----------
/// num_blocks : int
///     Blocks that sequences can have. Block 0, the null block, comes on top.
/// block_size : int, default 16
///     Tokens of a block.
/// num_layers : int, default 1
///     Layers of the model.
/// num_kv_heads : int, default 4
///     KV heads of a layer (not query heads).
/// head_dim : int, default 64
///     Elements of one head.
/// dtype : str or numpy.dtype, default "float32"
///     Element type: "float32", "float16", "bfloat16", or "int8" with a scale for each head of a
///     token; see ``LayerKvCache``.
/// storage : bool, default True
///     Whether there is memory for keys and values. Without it the manager keeps count of blocks
///     alone, and what would read or write content raises NoStorageError; ``prepare_write`` says what
///     to copy before content is written elsewhere.
/// prefix_caching : bool, default True
///     Whether sequences share what they have in common.
/// merge_duplicates : bool, default True
///     Whether a block that is committed with the content of another one is given back for it, which
///     changes the block table of the sequence.
/// namespace : str or bytes, optional
///     What keys and values depend on besides the tokens: the model, for example.
/// epoch : int, default 0
///     What to begin with. ``advance_epoch`` raises it, to make everything older unreachable.
///
/// Raises
/// ------
/// InvalidConfigError
///     (a ValueError) If a number is zero, negative or too large, or the dtype is not known.
/// OutOfMemoryError
///     (a MemoryError) If the system does not give the memory.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=2, num_kv_heads=1, head_dim=4)
/// >>> prompt = [11, 12, 13, 14, 15]
/// >>> first = manager.allocate(prompt)
/// >>> rows = np.ones((5, 1, 4), dtype=np.float32)
/// >>> manager.write(first, 0, 0, rows, rows)
/// >>> manager.commit(first, prompt)
///
/// Another sequence with the same prompt computes the last token only.
///
/// >>> second = manager.allocate(prompt)
/// >>> second.num_cached_tokens
/// 4
/// >>> manager.read_range(second, 0, 0, 4)[0].sum()
/// np.float32(16.0)
#[pyclass(name = "KvCacheManager", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyKvCacheManager {
    config: KvCacheManagerConfig,
    nbytes: usize,
    dtype: DType,
    manager: ProcessLocal<AnyKvCacheManager>,
}

impl PyKvCacheManager {
    pub(super) fn config(&self) -> &KvCacheManagerConfig {
        &self.config
    }

    /// The core's manager, which must be called detached where that can wait.
    pub(super) fn core(&self) -> PyResult<&AnyKvCacheManager> {
        self.manager.get()
    }

    /// KV heads and elements of a head.
    fn dims(&self) -> [usize; 2] {
        [self.config.num_kv_heads, self.config.head_dim]
    }

    fn wanted(&self, tokens: Tokens) -> [Wanted; 2] {
        let (dtype, [heads, dim]) = (self.dtype, self.dims());
        ["keys", "values"].map(|name| Wanted { name, dtype, tokens, heads, dim })
    }
}

#[pymethods]
impl PyKvCacheManager {
    #[new]
    #[pyo3(
        signature = (
            num_blocks,
            *,
            block_size = None,
            num_layers = None,
            num_kv_heads = None,
            head_dim = None,
            dtype = Dtype(DType::F32),
            storage = true,
            prefix_caching = true,
            merge_duplicates = true,
            namespace = None,
            epoch = Epoch(0),
        ),
        text_signature = "(num_blocks, *, block_size=16, num_layers=1, num_kv_heads=4, head_dim=64, \
                          dtype='float32', storage=True, prefix_caching=True, \
                          merge_duplicates=True, namespace=None, epoch=0)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's are named")]
    fn new(
        py: Python<'_>,
        num_blocks: Dimension,
        block_size: Option<Dimension>,
        num_layers: Option<Dimension>,
        num_kv_heads: Option<Dimension>,
        head_dim: Option<Dimension>,
        dtype: Dtype,
        storage: bool,
        prefix_caching: bool,
        merge_duplicates: bool,
        namespace: Option<TextOrBytes>,
        epoch: Epoch,
    ) -> PyResult<Self> {
        fork::check_process()?;
        let defaults = KvCacheManagerConfig::default();
        let given =
            |dimension: Option<Dimension>, default| dimension.map_or(default, |given| given.0);
        let config = KvCacheManagerConfig {
            num_blocks: num_blocks.0,
            block_size: given(block_size, defaults.block_size),
            num_layers: given(num_layers, defaults.num_layers),
            num_kv_heads: given(num_kv_heads, defaults.num_kv_heads),
            head_dim: given(head_dim, defaults.head_dim),
            storage: if storage { Storage::Owned } else { Storage::Elsewhere },
            prefix_caching,
            duplicates: if merge_duplicates { Duplicates::Merge } else { Duplicates::Keep },
            namespace: namespace.map(|namespace| namespace.0),
            epoch: epoch.0,
        };
        let manager = py.detach(|| AnyKvCacheManager::new(dtype.0, &config))?;
        let nbytes = manager.nbytes();
        Ok(Self { config, dtype: dtype.0, nbytes, manager: ProcessLocal::with_long_drop(manager) })
    }

    // Sequences

    /// Starts a sequence on `tokens`, with blocks for them and for `lookahead` more.
    ///
    /// The longest beginning that is cached is shared, in whole blocks; at least one token is left to
    /// compute. Only sequences with equal `cache_salt` and `lora_id` share, which are text: the number
    /// of an adapter is passed as ``str(id)``. `extra_keys` says what else decides the content of a
    /// block, the digests of its images for example: pairs of a block index and a list of str or bytes,
    /// in ascending order, or a dict of them. A ``KeyChain`` has all of that in its keys, and can stand
    /// for `tokens`.
    ///
    /// Raises OutOfBlocksError, RequestExistsError if a live sequence has the name `request_id`, and
    /// InvalidInputError for what is no token.
    #[pyo3(signature = (
        tokens, request_id = None, *, cache_salt = None, lora_id = None, extra_keys = None,
        lookahead = NumTokens(0)
    ), text_signature = "($self, tokens, request_id=None, *, cache_salt=None, lora_id=None, extra_keys=None, lookahead=0)")]
    fn allocate(
        slf: &Bound<'_, Self>,
        tokens: GivenPrompt,
        #[pyo3(from_py_with = request_id)] request_id: Option<&str>,
        #[pyo3(from_py_with = cache_salt)] cache_salt: Option<&str>,
        #[pyo3(from_py_with = lora_id)] lora_id: Option<&str>,
        extra_keys: Option<ExtraKeys>,
        lookahead: NumTokens,
    ) -> PyResult<PyPagedKvCacheHandle> {
        let lookahead = lookahead.0;
        let options = Options { request_id, cache_salt, lora_id, extra_keys, lookahead };
        let (manager, prompt) = (slf.get().core()?, tokens.with(&options)?);
        let handle = slf.py().detach(|| options.with(|all| manager.allocate(prompt, all)))?;
        Ok(PyPagedKvCacheHandle::new(slf.clone().unbind(), handle))
    }

    /// Returns how many of `tokens`, or of a ``KeyChain``, would be cached, without any effect.
    ///
    /// Raises InvalidInputError for what is no token.
    #[pyo3(signature = (tokens, *, cache_salt = None, lora_id = None, extra_keys = None))]
    fn probe(
        &self,
        py: Python<'_>,
        tokens: GivenPrompt,
        #[pyo3(from_py_with = cache_salt)] cache_salt: Option<&str>,
        #[pyo3(from_py_with = lora_id)] lora_id: Option<&str>,
        extra_keys: Option<ExtraKeys>,
    ) -> PyResult<usize> {
        let options = Options { cache_salt, lora_id, extra_keys, ..Options::default() };
        let (manager, prompt) = (self.core()?, tokens.with(&options)?);
        Ok(py.detach(|| options.with(|all| manager.probe(prompt, all)))?)
    }

    /// Makes room for `num_tokens` more tokens at the end, which are zero.
    ///
    /// Returns what was copied, if the first of them lie in a block that others have as well.
    ///
    /// Raises OutOfBlocksError.
    #[pyo3(
        signature = (handle, num_tokens = NumTokens(1)),
        text_signature = "($self, handle, num_tokens=1)"
    )]
    fn extend(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        num_tokens: NumTokens,
    ) -> PyResult<Option<PyBlockCopy>> {
        let (manager, handle) = (self.core()?, &handle.0.get().handle);
        if handle.try_change(|handle| manager.try_extend(handle, num_tokens.0)) == Some(true) {
            return Ok(None);
        }
        let copy = handle.change(py, |handle| manager.extend(handle, num_tokens.0))?;
        Ok(copy.map(PyBlockCopy::from))
    }

    /// Makes `new_len` the length of a sequence, and gives back the blocks that it needs no more.
    ///
    /// If that cuts a committed block that others have as well, the sequence gets a copy of it, which
    /// is returned.
    ///
    /// Raises OutOfRangeError if the sequence is shorter, and OutOfBlocksError if there is no block
    /// for the copy.
    fn truncate(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        new_len: NumTokens,
    ) -> PyResult<Option<PyBlockCopy>> {
        let manager = self.core()?;
        let copy =
            handle.0.get().handle.change(py, |handle| manager.truncate(handle, new_len.0))?;
        Ok(copy.map(PyBlockCopy::from))
    }

    /// Starts a sequence that shares all tokens of another one. Blocks of a lookahead stay with that one.
    ///
    /// When one of the two writes to a block, that block alone is copied.
    ///
    /// Raises RequestExistsError if a live sequence has the name `request_id`.
    #[pyo3(signature = (handle, request_id = None))]
    fn fork(
        slf: &Bound<'_, Self>,
        handle: Given<'_>,
        #[pyo3(from_py_with = request_id)] request_id: Option<&str>,
    ) -> PyResult<PyPagedKvCacheHandle> {
        let manager = slf.get().core()?;
        let fork =
            handle.0.get().handle.read(slf.py(), |handle| manager.fork(handle, request_id))?;
        Ok(PyPagedKvCacheHandle::new(slf.clone().unbind(), fork))
    }

    /// Gives the blocks of a sequence back. Its handle is stale then.
    ///
    /// Raises StaleHandleError if that was done before; see ``PagedKvCacheHandle.close`` for a call
    /// that may be repeated.
    fn free(&self, py: Python<'_>, handle: Given<'_>) -> PyResult<()> {
        let manager = self.core()?;
        handle.0.get().handle.read(py, |handle| manager.free(handle))
    }

    /// Gives the blocks of the sequence of this name back, wherever its handle is.
    ///
    /// Raises UnknownRequestError (a KeyError) if there is none, or none any more.
    fn free_request(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        let manager = self.core()?;
        Ok(py.detach(|| manager.free_request(request_id))?)
    }

    // Content

    /// Writes keys and values of one or more tokens of a sequence in one layer.
    ///
    /// The tokens must be there: ``extend`` makes room for more. A block that other sequences have, or
    /// that a view pins there, is copied first. A committed block, which is a full one, can not be found
    /// any more, and neither it nor what follows is committed: commit those tokens again. Tokens that
    /// were committed in a block that is not full yet stay committed.
    ///
    /// Raises InvalidInputError, LayerOutOfRangeError, OutOfRangeError past the length,
    /// OutOfBlocksError if there is no block for a copy, or NoStorageError.
    fn write(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        layer: Layer,
        position: NumTokens,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let manager = self.core()?;
        let (keys, values) = Foreign::pair([keys, values], self.wanted(Tokens::Any))?;
        let (keys, values) = (keys.values(), values.values());
        handle
            .0
            .get()
            .handle
            .change(py, |handle| manager.write_from(handle, layer.0, position.0, keys, values))
    }

    /// Writes one token of each of many sequences in one layer, all or none.
    ///
    /// Token ``positions[i]`` of ``handles[i]`` gets row ``i`` of keys and values [sequences,
    /// num_kv_heads, head_dim].
    ///
    /// Raises InvalidInputError if there are not as many positions and rows as handles, or a handle is
    /// given twice, and what ``write`` raises.
    fn write_many(
        &self,
        py: Python<'_>,
        layer: Layer,
        handles: GivenMany<'_>,
        positions: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let manager = self.core()?;
        // First, since it may run Python code, which may take the memory of an array away.
        let positions = positions_of(positions)?;
        let (keys, values) = Foreign::pair([keys, values], self.wanted(Tokens::Many))?;
        let (keys, values) = (keys.values(), values.values());
        handles.change(py, |handles| {
            manager.write_many_from(layer.0, handles, &positions, keys, values)
        })
    }

    /// Makes the blocks of the tokens `start` to `end` the sequence's own, as ``write`` does first, and
    /// returns those that were copied for that.
    ///
    /// Whoever keeps the content elsewhere (``storage=False``) calls this before each write to slots of
    /// the sequence, and makes the copies: other sequences have the same slots after a ``fork``, even
    /// those that were made room for before it. As with ``write``, a committed block can not be found
    /// any more, and neither it nor what follows is committed. It holds until the sequence is forked or
    /// those tokens are committed.
    ///
    /// Raises OutOfRangeError past the length, and OutOfBlocksError if there are too few blocks.
    fn prepare_write(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        start: NumTokens,
        end: NumTokens,
    ) -> PyResult<Vec<PyBlockCopy>> {
        let manager = self.core()?;
        let copies = handle
            .0
            .get()
            .handle
            .change(py, |handle| manager.prepare_write(handle, start.0, end.0))?;
        Ok(copies.into_iter().map(PyBlockCopy::from).collect())
    }

    /// Returns a view of the tokens `start` to `end` of one layer, by default all; see ``PagedSpan``.
    ///
    /// Raises LayerOutOfRangeError, OutOfRangeError if the range is not stored, or NoStorageError.
    #[pyo3(
        signature = (handle, layer, start = NumTokens(0), end = None),
        text_signature = "($self, handle, layer, start=0, end=None)"
    )]
    fn view(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        layer: Layer,
        start: NumTokens,
        end: Option<NumTokens>,
    ) -> PyResult<PyPagedSpan> {
        let manager = self.core()?;
        let span = handle.0.get().handle.read(py, |handle| {
            let end = end.map_or_else(|| handle.num_tokens(), |end| end.0);
            manager.view(handle, layer.0, start.0, end)
        })?;
        PyPagedSpan::new(py, span)
    }

    /// Returns new arrays [tokens, num_kv_heads, head_dim] with the keys and the values of the tokens
    /// `start` to `end` of one layer, by default all.
    ///
    /// Raises what ``view`` raises.
    #[pyo3(
        signature = (handle, layer, start = NumTokens(0), end = None),
        text_signature = "($self, handle, layer, start=0, end=None)"
    )]
    fn read_range<'py>(
        &self,
        py: Python<'py>,
        handle: Given<'_>,
        layer: Layer,
        start: NumTokens,
        end: Option<NumTokens>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let manager = self.core()?;
        // Before there is an attempt to allocate as much.
        let range = handle.0.get().handle.read(py, |handle| {
            manager.check_readable(handle, layer.0, start.0, end.map(|end| end.0))
        })?;
        let [heads, dim] = self.dims();
        let (dtype, axes) = (self.dtype.of_copies(), [range.len(), heads, dim]);
        let (keys, values) = (new_array(py, dtype, &axes)?, new_array(py, dtype, &axes)?);
        let end = NumTokens(range.end);
        self.read_range_into(py, handle, layer, start, end, &keys, &values)?;
        PyTuple::new(py, [&keys, &values])
    }

    /// Copies the tokens `start` to `end` of one layer to the start of two writable arrays.
    ///
    /// Larger arrays are fine; what is past the tokens is left alone.
    ///
    /// Raises InvalidInputError if an array is of another kind, read-only or too small, and what
    /// ``view`` raises.
    #[expect(clippy::too_many_arguments, reason = "Python's are named")]
    fn read_range_into(
        &self,
        py: Python<'_>,
        handle: Given<'_>,
        layer: Layer,
        start: NumTokens,
        end: NumTokens,
        keys_out: &Bound<'_, PyAny>,
        values_out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let manager = self.core()?;
        let names = ["keys_out", "values_out"];
        let (keys, values) = Room::pair([keys_out, values_out], names, self.dtype, self.dims())?;
        let (mut keys, mut values) = (keys.values(), values.values());
        let range = start.0..end.0;
        handle.0.get().handle.read(py, |handle| {
            manager.read_range_to(handle, layer.0, range, &mut keys, &mut values)
        })
    }

    /// Says that `tokens` follow the committed ones, and are written in all layers.
    ///
    /// The blocks that are full can be found from now on. A block that has the same content as another
    /// one is given back, and the sequence shares the other: its block table and its slots change then.
    /// A manager that is made with ``merge_duplicates=False`` keeps both instead.
    ///
    /// Raises OutOfRangeError if the sequence is not as long, TokenMismatchError if it was allocated
    /// with other tokens, and WrongBlockStateError if a sequence that shares the block has committed
    /// it with other tokens.
    fn commit(&self, py: Python<'_>, handle: Given<'_>, tokens: TokenIds) -> PyResult<()> {
        let (manager, handle) = (self.core()?, &handle.0.get().handle);
        let is_short = !is_long_copy(size_of_val(tokens.0.as_slice()));
        let done = is_short
            && handle.try_change(|handle| manager.try_commit(handle, &tokens.0)) == Some(true);
        if done {
            return Ok(());
        }
        handle.change(py, |handle| manager.commit(handle, &tokens.0))
    }

    /// Raises the epoch by one, and returns it: what was computed before can not be found any more.
    ///
    /// To be called once the weights of the model have changed. Sequences that live, and their forks,
    /// go on in the epoch in which they began, so that what they commit later can not be found either;
    /// a ``KeyChain`` that was made before belongs to its epoch as well. Blocks of older epochs are reused when
    /// their turn comes.
    ///
    /// Raises InvalidInputError if the epoch is the largest number of 64 bits already.
    fn advance_epoch(&self) -> PyResult<u64> {
        Ok(self.core()?.advance_epoch()?)
    }

    /// Makes everything that is cached impossible to find, while no sequence lives. See
    /// ``advance_epoch`` for what can be called under load.
    ///
    /// Raises BlocksInUseError if blocks are in use, or pinned by views.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        let manager = self.core()?;
        Ok(py.detach(|| manager.reset_prefix_cache())?)
    }

    // Asking

    /// Returns the numbers, all of one instant; see ``ManagerStats``.
    fn stats(&self, py: Python<'_>) -> PyResult<PyManagerStats> {
        let manager = self.core()?;
        Ok(py.detach(|| manager.stats()).into())
    }

    /// Returns a picture of all blocks; see ``Inspection``.
    fn inspect(&self, py: Python<'_>) -> PyResult<PyInspection> {
        let manager = self.core()?;
        Ok(PyInspection(py.detach(|| manager.inspect())))
    }

    /// Returns who holds blocks, and which ones only views keep; see ``LeakReport``.
    fn leak_report(&self, py: Python<'_>) -> PyResult<PyLeakReport> {
        let manager = self.core()?;
        Ok(PyLeakReport(py.detach(|| manager.leak_report())))
    }

    /// Counts everything again that is kept count of.
    ///
    /// Raises CorruptedError if something does not add up, which would be a bug in this package.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        let manager = self.core()?;
        Ok(py.detach(|| manager.check_integrity())?)
    }

    /// Draws the pool with matplotlib, as a grid of blocks in the colours of their states.
    ///
    /// A block that several sequences share is darker, and in a small pool it has their number. In a
    /// pool of more than 4,096 blocks a cell stands for several, and has the mean of their colours.
    ///
    /// Draws on ``ax``, by default in a new figure, and returns the axes. Raises ImportError if
    /// matplotlib is not installed; it is the extra ``plot`` of this package.
    #[pyo3(signature = (ax = None))]
    fn plot<'py>(
        slf: &Bound<'py, Self>,
        ax: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("kvspan._plot")?.call_method1("plot_pool", (slf, ax))
    }

    /// What notebooks show: the numbers of ``stats()`` and of the geometry, as a table.
    #[pyo3(name = "_repr_html_")]
    fn repr_html<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("kvspan._plot")?.call_method1("pool_as_html", (slf,))
    }

    /// Blocks that sequences can have.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.config.num_blocks
    }

    /// Tokens of a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.config.num_layers
    }

    /// Number of KV heads.
    #[getter]
    fn num_kv_heads(&self) -> usize {
        self.config.num_kv_heads
    }

    /// Elements of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.config.head_dim
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Whether there is memory for keys and values.
    #[getter]
    fn has_storage(&self) -> bool {
        self.config.storage == Storage::Owned
    }

    /// Whether sequences share what they have in common.
    #[getter]
    fn prefix_caching(&self) -> bool {
        self.config.prefix_caching
    }

    /// What keys and values depend on besides the tokens, as bytes: text as UTF-8. ``None`` if nothing
    /// was said.
    #[getter]
    fn namespace(&self) -> Option<&[u8]> {
        self.config.namespace.as_deref()
    }

    /// The epoch of the sequences that are started now.
    #[getter]
    fn epoch(&self) -> PyResult<u64> {
        Ok(self.core()?.epoch())
    }

    /// Bytes of all blocks, the null block included; 0 without storage.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let Ok(manager) = self.core() else {
            return "KvCacheManager(made before fork())".to_owned();
        };
        let stats = py.detach(|| manager.stats());
        let KvCacheManagerConfig { block_size, num_layers, num_kv_heads, head_dim, .. } =
            &self.config;
        let (dtype, storage) =
            (self.dtype(), if self.has_storage() { "" } else { ", storage=False" });
        format!(
            "KvCacheManager({} blocks: {} in use, {} cached, {} free; block_size={block_size}, \
             num_layers={num_layers}, num_kv_heads={num_kv_heads}, head_dim={head_dim}, \
             dtype='{dtype}'{storage})",
            stats.num_blocks, stats.num_in_use, stats.num_cached, stats.num_free
        )
    }
}

/// A u64 that is no position and no dimension.
#[derive(Clone, Copy, Debug)]
struct Epoch(u64);

impl<'py> FromPyObject<'_, 'py> for Epoch {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let epoch = in_range(object, |given| {
            InvalidInputError::new_err((format!(
                "the epoch must be 0 or more and fit 64 bits, but it is {given}"
            ),))
        });
        epoch.map(Self)
    }
}
