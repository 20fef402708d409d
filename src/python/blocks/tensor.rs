//! `CacheTensor`.

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::dtype::DType;
use crate::handle::TensorRef;
use crate::python::buffer::{CPU, Layout, Lease, Request, Side, Tensor, call, new_array};

/// A layer's keys, or its values, where they lie: [tokens, num_heads, head_dim] in segments.
///
/// Made by ``key_cache`` and ``value_cache`` of a handle. Nothing is gathered unless asked. It stays
/// as it is while it, or an array over it, lives, whatever happens to the handle; ``release()`` ends
/// that. As a context manager it gives up its own share at the end of the block.
///
/// ``np.asarray(tensor)`` is without a copy if there is one segment. DLPack has room for one segment
/// only, or for a copy.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=2, num_kv_heads=1, head_dim=4)
/// >>> handle = manager.allocate([1, 2, 3])
/// >>> keys = handle.key_cache(0)
/// >>> keys.shape, [segment.shape for segment in keys.segments]
/// ((3, 1, 4), [(2, 1, 4), (1, 1, 4)])
/// >>> keys.numpy().shape
/// (3, 1, 4)
#[pyclass(name = "CacheTensor", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyCacheTensor {
    shape: [usize; 3],
    dtype: DType,
    num_segments: usize,
    lease: Lease,
}

impl PyCacheTensor {
    pub(super) fn new(py: Python<'_>, tensor: TensorRef) -> PyResult<Self> {
        Ok(Self {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
            num_segments: tensor.num_segments(),
            lease: Lease::one_side(py, tensor)?,
        })
    }

    /// What a handle answers.
    pub(super) fn of_layer(py: Python<'_>, tensor: Option<TensorRef>) -> PyResult<Option<Self>> {
        tensor.map(|tensor| Self::new(py, tensor)).transpose()
    }

    /// The core's tensor.
    pub(in crate::python) fn tensor(&self, py: Python<'_>) -> PyResult<TensorRef> {
        self.lease.memory(py)?.get().whole_tensor()
    }

    /// One segment, of which the side means nothing.
    fn segment<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Tensor<'py>> {
        self.lease.segment(py, index)?.tensor(py, Side::Keys)
    }

    fn array<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        self.segment(py, index)?.into_array()
    }
}

#[pymethods]
impl PyCacheTensor {
    /// The shape: (tokens, num_heads, head_dim).
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape)
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Where the elements are: ``"cpu"``.
    #[getter]
    fn device(&self) -> &'static str {
        "cpu"
    }

    /// Number of segments; 0 without tokens.
    #[getter]
    fn num_segments(&self) -> usize {
        self.num_segments
    }

    /// The segments in order: a new list of read-only arrays [tokens, num_heads, head_dim].
    #[getter]
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        // So that a tensor that is over says so, also without tokens.
        self.lease.check(py)?;
        let arrays = (0..self.num_segments).map(|index| self.array(py, index));
        PyList::new(py, arrays.collect::<PyResult<Vec<_>>>()?)
    }

    /// What the heads of each segment are multiplied by: a new list of read-only float32 arrays
    /// [tokens, num_heads]. None unless the elements are int8.
    #[getter]
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.lease.check(py)?;
        if !self.dtype.has_scales() {
            return Ok(None);
        }
        let arrays = (0..self.num_segments).filter_map(|index| {
            let scales =
                self.lease.segment(py, index).and_then(|segment| segment.scales(py, Side::Keys));
            scales.and_then(|scales| scales.map(Tensor::into_array).transpose()).transpose()
        });
        PyList::new(py, arrays.collect::<PyResult<Vec<_>>>()?).map(Some)
    }

    /// Whether ``release()`` was called, or the ``with`` block is over.
    #[getter]
    fn released(&self) -> bool {
        self.lease.is_over()
    }

    /// Returns one array: read-only and without a copy if there is one segment, else a copy.
    ///
    /// Raises ReleasedError if the tensor is over.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.num_segments {
            0 => {
                self.lease.check(py)?;
                new_array(py, self.dtype, &self.shape)
            }
            1 => self.array(py, 0),
            _ => {
                let concatenate = py.import("numpy")?.getattr("concatenate")?;
                call(&concatenate, &PyTuple::new(py, [self.segments(py)?])?, None)
            }
        }
    }

    /// Ends the tensor now.
    ///
    /// Raises ViewsAliveError (a BufferError), and leaves the tensor as it is, while arrays over it are
    /// alive. Releasing twice is fine.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.lease.release(py)
    }

    /// Exports the memory through DLPack, if it is one segment; with ``copy=True`` a copy of all.
    ///
    /// Raises BufferError for several segments without a copy, and where ``TensorView`` does.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = Request::new(stream, max_version, dl_device, copy)?;
        if self.num_segments == 1 {
            return request.export(self.segment(py, 0)?);
        }
        if self.num_segments > 1 && !request.wants_copy {
            return Err(PyBufferError::new_err(format!(
                "the tensor lies in {} segments, and DLPack has room for one: export each of \
                 segments, or pass copy=True for a copy of all",
                self.num_segments
            )));
        }
        self.lease.check(py)?;
        let segments = (0..self.num_segments).map(|index| self.segment(py, index));
        let segments = segments.collect::<PyResult<Vec<_>>>()?;
        request.export_copy(py, Layout::of_copy(self.dtype, self.shape)?, &segments)
    }

    /// The device as DLPack numbers it: (1, 0), the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }

    /// What ``np.asarray`` asks for.
    ///
    /// Raises ValueError if there are several segments and ``copy`` is ``False``.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if self.num_segments > 1 && copy == Some(false) {
            return Err(PyValueError::new_err(format!(
                "the tensor lies in {} segments: one array of them is a copy",
                self.num_segments
            )));
        }
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy.filter(|_| self.num_segments == 1))?;
        let array = py.import("numpy")?.getattr("array")?;
        call(&array, &PyTuple::new(py, [self.numpy(py)?])?, Some(&options))
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().lease.check(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.lease.give_up();
    }

    fn __len__(&self) -> usize {
        let [num_tokens, ..] = self.shape;
        num_tokens
    }

    fn __repr__(&self) -> String {
        let [tokens, heads, dim] = self.shape;
        let (dtype, num_segments) = (self.dtype(), self.num_segments);
        let released = if self.released() { ", released" } else { "" };
        format!(
            "CacheTensor(shape=({tokens}, {heads}, {dim}), dtype='{dtype}', \
             num_segments={num_segments}{released})"
        )
    }
}
