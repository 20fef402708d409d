//! `ContiguousKvCacheHandle`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyTuple};

use super::guarded::Guarded;
use super::report::PyCacheHandleStats;
use super::table::PyBlockTable;
use super::tensor::PyCacheTensor;
use super::typed::AnyContiguousHandle;
use crate::error::KvError;
use crate::handle::TensorRef;
use crate::python::buffer::{Foreign, Tokens, Wanted};
use crate::python::cache::PyLayerKvCache;
use crate::python::config::PyKVCacheConfig;
use crate::python::convert::{Layer, push, type_name};
use crate::python::error::InvalidInputError;
use crate::python::fork;
use crate::python::reserved::positions;
use crate::python::typed::AnyLayerKvCache;

/// One sequence in one ``LayerKvCache`` a layer. It is a ``KvCacheHandle``.
///
/// Its block table is a single block, number 1, as large as the capacity; its tokens are those that
/// all layers have. A clone shares the layers until one of the two appends through its handle, which
/// copies them. What happens to a cache outside of the handle, the handle sees.
///
/// Calls from several threads for one handle wait for each other where one appends.
///
/// Parameters
/// ----------
/// layers : sequence of LayerKvCache
///     The caches of a model's layers, the first layer first, all of one shape and capacity.
///
/// Raises
/// ------
/// LayersDifferError
///     (a ValueError) If they do not have one shape and capacity.
/// InvalidInputError
///     (a ValueError) If a cache is given twice, or one that shares its tokens, as ``copy.copy``
///     makes it.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> config = kvspan.KVCacheConfig(max_tokens_per_seq=16, num_heads=2, hidden_dim_per_head=4)
/// >>> handle = kvspan.ContiguousKvCacheHandle([kvspan.LayerKvCache(config) for _ in range(3)])
/// >>> rows = np.ones((5, 2, 4), dtype=np.float32)
/// >>> for layer in range(handle.num_layers):
/// ...     positions = handle.append(layer, rows, rows)
/// >>> positions, handle.num_tokens
/// (range(0, 5), 5)
/// >>> handle.key_cache(0)
/// CacheTensor(shape=(5, 2, 4), dtype='float32', num_segments=1)
#[pyclass(name = "ContiguousKvCacheHandle", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyContiguousKvCacheHandle {
    config: PyKVCacheConfig,
    num_layers: usize,
    cache_id: String,
    handle: Guarded<AnyContiguousHandle>,
}

impl PyContiguousKvCacheHandle {
    fn with_handle(config: PyKVCacheConfig, handle: AnyContiguousHandle) -> Self {
        let (num_layers, cache_id) = (handle.num_layers(), handle.cache_id());
        Self { config, num_layers, cache_id, handle: Guarded::new(handle) }
    }

    /// The keys and the values of a layer.
    pub(in crate::python) fn tensors(
        &self,
        py: Python<'_>,
        layer: Layer,
    ) -> PyResult<(Option<TensorRef>, Option<TensorRef>)> {
        self.handle.read(py, |handle| handle.kv_cache(layer.0))
    }
}

#[pymethods]
impl PyContiguousKvCacheHandle {
    #[new]
    fn new(layers: &Bound<'_, PyAny>) -> PyResult<Self> {
        fork::check_process()?;
        let mut given: Vec<Bound<'_, PyLayerKvCache>> = Vec::new();
        for (layer, cache) in layers.try_iter()?.enumerate() {
            let cache = cache?.cast_into::<PyLayerKvCache>().map_err(|other| {
                let other = type_name(&other.into_inner());
                PyTypeError::new_err(format!("layer {layer} must be a LayerKvCache, not {other}"))
            })?;
            push(layers.py(), &mut given, cache)?;
        }
        let parts = given.iter().map(|cache| cache.get().parts());
        let parts = parts.collect::<PyResult<Vec<_>>>()?;
        for (layer, &(_, cache)) in parts.iter().enumerate() {
            let is_same = |&(_, earlier): &(_, &AnyLayerKvCache)| cache.is_clone_of(earlier);
            if let Some(first) = parts[..layer].iter().position(is_same) {
                return Err(InvalidInputError::new_err((format!(
                    "layers {first} and {layer} are the same cache, or share their tokens"
                ),)));
            }
        }
        let caches = parts.iter().map(|&(_, cache)| cache.clone()).collect();
        let handle = AnyContiguousHandle::new(caches)?;
        let config = parts.first().map_or_else(PyKVCacheConfig::default, |&(config, _)| config);
        Ok(Self::with_handle(config, handle))
    }

    /// Adds tokens to one layer, and returns their positions as a range.
    ///
    /// Raises what ``LayerKvCache.append`` raises, LayerOutOfRangeError or StaleHandleError.
    fn append<'py>(
        &self,
        py: Python<'py>,
        layer: Layer,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyRange>> {
        let (dtype, tokens) = (self.config.dtype, Tokens::Any);
        let (heads, dim) = (self.num_heads(), self.head_dim());
        let wanted = ["keys", "values"].map(|name| Wanted { name, dtype, tokens, heads, dim });
        let (keys, values) = Foreign::pair([keys, values], wanted)?;
        let (keys, values) = (keys.values(), values.values());
        let range = self.handle.change(py, |handle| handle.append_from(layer.0, keys, values))?;
        positions(py, &range)
    }

    /// Returns the cache of a layer: one that shares the tokens, as ``copy.copy`` makes it.
    ///
    /// Raises LayerOutOfRangeError or StaleHandleError.
    fn layer(&self, py: Python<'_>, layer: Layer) -> PyResult<PyLayerKvCache> {
        let cache = self.handle.read(py, |handle| handle.layer(layer.0))?;
        Ok(PyLayerKvCache::with_cache(self.config, cache))
    }

    /// Which blocks the sequence has: a new ``BlockTable`` of one block, number 1.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<PyBlockTable> {
        self.handle.read(py, |handle| Ok(handle.current_table())).map(PyBlockTable::new)
    }

    /// The name of the handle, which no other one in this process has.
    #[getter]
    fn cache_id(&self) -> &str {
        &self.cache_id
    }

    /// Whether the handle can be used: false once it was closed.
    #[getter]
    fn is_valid(&self, py: Python<'_>) -> PyResult<bool> {
        self.handle.read(py, |handle| Ok(handle.is_valid()))
    }

    /// Where the memory is: ``"cpu"``.
    #[getter]
    fn device(&self) -> &'static str {
        "cpu"
    }

    /// Number of tokens that all layers have; 0 once the handle was closed.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.handle.read(py, |handle| Ok(handle.num_tokens()))
    }

    /// Number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.num_layers
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

    /// Returns the keys of a layer as a ``CacheTensor`` of one segment; of none without tokens.
    ///
    /// Raises LayerOutOfRangeError or StaleHandleError.
    fn key_cache(&self, py: Python<'_>, layer: Layer) -> PyResult<Option<PyCacheTensor>> {
        let keys = self.handle.read(py, |handle| handle.key_cache(layer.0))?;
        PyCacheTensor::of_layer(py, keys)
    }

    /// Returns the values of a layer as a ``CacheTensor`` of one segment; of none without tokens.
    ///
    /// Raises LayerOutOfRangeError or StaleHandleError.
    fn value_cache(&self, py: Python<'_>, layer: Layer) -> PyResult<Option<PyCacheTensor>> {
        let values = self.handle.read(py, |handle| handle.value_cache(layer.0))?;
        PyCacheTensor::of_layer(py, values)
    }

    /// Returns the keys and the values of a layer, both of one moment.
    ///
    /// They are one view, which ends with the last of the two.
    ///
    /// Raises LayerOutOfRangeError or StaleHandleError.
    fn kv_cache(
        &self,
        py: Python<'_>,
        layer: Layer,
    ) -> PyResult<(Option<PyCacheTensor>, Option<PyCacheTensor>)> {
        let (keys, values) = self.tensors(py, layer)?;
        Ok((PyCacheTensor::of_layer(py, keys)?, PyCacheTensor::of_layer(py, values)?))
    }

    /// Returns a handle of its own on the same layers, until one of the two appends.
    ///
    /// Raises StaleHandleError.
    fn clone_handle(&self, py: Python<'_>) -> PyResult<Self> {
        let clone = self.handle.read(py, AnyContiguousHandle::share)?;
        Ok(Self::with_handle(self.config, clone))
    }

    /// Returns how much the sequence has, and how full that is.
    fn stats(&self, py: Python<'_>) -> PyResult<PyCacheHandleStats> {
        let stats = self.handle.read(py, |handle| Ok(handle.stats()))?;
        PyCacheHandleStats::new(py, &stats)
    }

    /// Gives the layers up, unless that was done before. Their caches stay as they are.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.change(py, |handle| {
            handle.close();
            Ok(())
        })
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        if slf.get().is_valid(slf.py())? {
            return Ok(slf);
        }
        Err(KvError::StaleHandle { cache_id: slf.get().cache_id.clone() }.into())
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (cache_id, num_layers) = (&self.cache_id, self.num_layers);
        if !self.handle.is_ours() {
            return Ok(format!("ContiguousKvCacheHandle({cache_id}, made before fork())"));
        }
        self.handle.read(py, |handle| {
            let num_tokens = handle.num_tokens();
            let closed = if handle.is_valid() { "" } else { ", closed" };
            Ok(format!(
                "ContiguousKvCacheHandle({cache_id}, num_tokens={num_tokens}, \
                 num_layers={num_layers}{closed})"
            ))
        })
    }
}
