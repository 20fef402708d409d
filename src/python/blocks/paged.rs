//! `PagedKvCacheHandle`.

use numpy::PyArray1;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::guarded::Guarded;
use super::manager::PyKvCacheManager;
use super::report::PyCacheHandleStats;
use super::table::PyBlockTable;
use super::tensor::PyCacheTensor;
use super::typed::{AnyPagedHandle, Changing, Reading};
use crate::error::{KvError, Result};
use crate::handle::TensorRef;
use crate::python::convert::{Layer, in_entry, push, type_name};
use crate::python::error::InvalidInputError;

/// One sequence of a ``KvCacheManager``, and its hold on its blocks.
///
/// Made by ``KvCacheManager.allocate`` and ``fork``; the manager is what reads and writes it. Dropping
/// it frees the sequence, and so does the end of a ``with`` block, or ``close()``. A handle whose
/// sequence was freed refuses every use with StaleHandleError; its plain properties still answer.
///
/// Calls from several threads for one handle wait for each other where one changes it. It is a
/// ``KvCacheHandle``.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=4)
/// >>> with manager.allocate([1, 2, 3, 4, 5], "chat-7") as handle:
/// ...     manager.commit(handle, [1, 2, 3, 4, 5])
/// ...     print(handle.num_tokens, handle.block_table.physical_blocks)
/// 5 [1, 2]
/// >>> handle.is_valid
/// False
/// >>> manager.probe([1, 2, 3, 4, 5])
/// 4
#[pyclass(name = "PagedKvCacheHandle", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyPagedKvCacheHandle {
    manager: Py<PyKvCacheManager>,
    cache_id: String,
    pub(super) handle: Guarded<AnyPagedHandle>,
}

impl PyPagedKvCacheHandle {
    pub(super) fn new(manager: Py<PyKvCacheManager>, handle: AnyPagedHandle) -> Self {
        Self { manager, cache_id: handle.cache_id(), handle: Guarded::new(handle) }
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

/// A handle that a caller gave.
#[derive(Debug)]
pub(super) struct Given<'py>(pub(super) Bound<'py, PyPagedKvCacheHandle>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let handle = object.cast::<PyPagedKvCacheHandle>();
        handle.map(|handle| Self(handle.to_owned())).map_err(|_| no_handle(&object))
    }
}

fn no_handle(object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!(
        "a PagedKvCacheHandle is wanted, which KvCacheManager.allocate and fork make, not {}",
        type_name(object)
    ))
}

/// Handles that a caller gave, in a tuple: that holds them all, so that no reference to each is taken.
#[derive(Debug)]
pub(super) struct GivenMany<'py>(Bound<'py, PyTuple>);

impl<'py> FromPyObject<'_, 'py> for GivenMany<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Ok(Self(tuple.to_owned()));
        }
        if let Ok(list) = object.cast::<PyList>() {
            return Ok(Self(list.to_tuple()));
        }
        let mut items = Vec::new();
        for item in object.try_iter()? {
            push(py, &mut items, item?)?;
        }
        PyTuple::new(py, items).map(Self)
    }
}

impl<'py> GivenMany<'py> {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn handles(&self) -> PyResult<Vec<Borrowed<'_, 'py, PyPagedKvCacheHandle>>> {
        let mut handles = Vec::with_capacity(self.len());
        for (index, item) in self.0.iter_borrowed().enumerate() {
            // No class derives from it.
            let handle = item.cast_exact::<PyPagedKvCacheHandle>();
            handles.push(handle.map_err(|_| in_entry(item.py(), index, no_handle(&item)))?);
        }
        Ok(handles)
    }

    /// Calls `call` detached, beside others who do so, with all handles in the order given.
    pub(super) fn read<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Reading<'_>) -> Result<R> + Send,
    ) -> PyResult<R> {
        let handles = self.handles()?;
        Guarded::read_all(py, handles.iter().map(|handle| &handle.get().handle), call)
    }

    /// Calls `call` detached, and alone with all handles, in the order given.
    ///
    /// # Errors
    ///
    /// `InvalidInputError` if a handle is given twice.
    pub(super) fn change<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Changing<'_>) -> Result<R> + Send,
    ) -> PyResult<R> {
        let handles = self.handles()?;
        let locks = handles.iter().map(|handle| &handle.get().handle);
        Guarded::change_all(py, locks, || check_distinct(&handles), call)
    }

    /// # Errors
    ///
    /// `InvalidInputError` if a handle is given twice.
    pub(super) fn check_distinct(&self) -> PyResult<()> {
        check_distinct(&self.handles()?)
    }
}

fn check_distinct(handles: &[Borrowed<'_, '_, PyPagedKvCacheHandle>]) -> PyResult<()> {
    let mut places = (0..handles.len()).collect::<Vec<_>>();
    places.sort_by_key(|&place| (handles[place].as_ptr().addr(), place));
    let same = |[left, right]: &&[usize; 2]| handles[*left].is(handles[*right]);
    let Some([first, second]) = places.array_windows().find(same) else { return Ok(()) };
    let cache_id = &handles[*first].get().cache_id;
    Err(InvalidInputError::new_err((format!(
        "the handle {cache_id} is given twice, at {first} and at {second}"
    ),)))
}

#[pymethods]
impl PyPagedKvCacheHandle {
    /// The manager that made it.
    #[getter]
    fn manager(&self, py: Python<'_>) -> Py<PyKvCacheManager> {
        self.manager.clone_ref(py)
    }

    /// The name of the handle, which no other one in this process has.
    #[getter]
    fn cache_id(&self) -> &str {
        &self.cache_id
    }

    /// Whether the handle can be used: false once its sequence was freed.
    #[getter]
    fn is_valid(&self, py: Python<'_>) -> PyResult<bool> {
        self.handle.read(py, |handle| Ok(handle.is_valid()))
    }

    /// Which blocks the sequence has: a copy of its ``BlockTable``.
    ///
    /// Assigning one makes the sequence as long as it says; it must name the blocks that the sequence
    /// has, from the first on. Raises InconsistentTableError if not, or if without storage a block
    /// would have to be copied, and what ``extend`` and ``truncate`` raise; nothing has changed then.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<PyBlockTable> {
        self.handle.read(py, |handle| Ok(handle.block_table().clone())).map(PyBlockTable::new)
    }

    #[setter]
    fn set_block_table(&self, py: Python<'_>, table: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(table) = table.cast::<PyBlockTable>() else {
            let given = type_name(table);
            return Err(PyTypeError::new_err(format!("a BlockTable is wanted, not {given}")));
        };
        let table = table.get().table();
        self.handle.change(py, |handle| handle.set_table(table))
    }

    /// Where the memory is: ``"cpu"``.
    #[getter]
    fn device(&self) -> &'static str {
        "cpu"
    }

    /// Number of tokens of the sequence.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.handle.read(py, |handle| Ok(handle.num_tokens()))
    }

    /// How many of the first tokens were there already when the sequence was allocated.
    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.handle.read(py, |handle| Ok(handle.num_cached_tokens()))
    }

    /// How many of the first tokens were committed.
    #[getter]
    fn num_committed_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.handle.read(py, |handle| Ok(handle.num_committed_tokens()))
    }

    /// The tokens that are known, those allocated and committed: a new array of uint32.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let tokens = self.handle.read(py, |handle| Ok(handle.tokens().to_vec()))?;
        Ok(PyArray1::from_vec(py, tokens))
    }

    /// Number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.manager.get().config().num_layers
    }

    /// Number of KV heads.
    #[getter]
    fn num_heads(&self) -> usize {
        self.manager.get().config().num_kv_heads
    }

    /// Elements of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.manager.get().config().head_dim
    }

    /// Returns the keys of a layer as a ``CacheTensor``, or ``None`` without storage.
    ///
    /// Raises LayerOutOfRangeError or StaleHandleError.
    fn key_cache(&self, py: Python<'_>, layer: Layer) -> PyResult<Option<PyCacheTensor>> {
        let keys = self.handle.read(py, |handle| handle.key_cache(layer.0))?;
        PyCacheTensor::of_layer(py, keys)
    }

    /// Returns the values of a layer as a ``CacheTensor``, or ``None`` without storage.
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

    /// Returns a handle of its own with the same tokens, as ``KvCacheManager.fork`` does.
    ///
    /// Raises StaleHandleError.
    fn clone_handle(&self, py: Python<'_>) -> PyResult<Self> {
        let clone = self.handle.read(py, |handle| handle.fork(None))?;
        Ok(Self::new(self.manager.clone_ref(py), clone))
    }

    /// Returns how much the sequence has, and how full that is.
    fn stats(&self, py: Python<'_>) -> PyResult<PyCacheHandleStats> {
        let stats = self.handle.read(py, |handle| Ok(handle.stats()))?;
        PyCacheHandleStats::new(py, &stats)
    }

    /// Frees the sequence, unless that was done before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.read(py, |handle| {
            handle.close();
            Ok(())
        })
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let cache_id = || slf.get().cache_id.clone();
        if slf.get().is_valid(slf.py())? {
            return Ok(slf);
        }
        Err(KvError::StaleHandle { cache_id: cache_id() }.into())
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let cache_id = &self.cache_id;
        if !self.handle.is_ours() {
            return Ok(format!("PagedKvCacheHandle({cache_id}, made before fork())"));
        }
        self.handle.read(py, |handle| {
            let (tokens, cached) = (handle.num_tokens(), handle.num_cached_tokens());
            let (blocks, freed) =
                (handle.block_table().num_blocks(), if handle.is_valid() { "" } else { ", freed" });
            Ok(format!(
                "PagedKvCacheHandle({cache_id}, num_tokens={tokens}, num_cached_tokens={cached}, \
                 num_blocks={blocks}{freed})"
            ))
        })
    }
}
