//! `ReservedSpan`, rows to compute into.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::PyRange;

use super::buffer::{Lease, PyTensorView, Side, Tensor};
use super::typed::{AnyReservedSpan, each};
use crate::dtype::DType;

/// Rows past the length of a cache, to compute keys and values into.
///
/// Made by ``LayerKvCache.reserve``. The rows are zero to begin with, and nobody else sees them.
/// ``commit()`` publishes them as tokens, ``discard()`` gives them up, and so does dropping the
/// object. As a context manager it commits at the end of the block, or discards if the block
/// raises. Until then everything else that would move the length raises ReservedError.
///
/// What is published can not be written any more, so ``commit()``, also that at the end of a block,
/// refuses while arrays over the rows are alive, and the reservation stays open. Use ``rows.keys[...] = k`` or ``out=rows.keys`` rather than keeping the arrays in
/// variables, or delete those before the block ends.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(num_heads=2, hidden_dim_per_head=4))
/// >>> with cache.reserve(3) as rows:
/// ...     rows.keys[...] = 1.0
/// ...     np.multiply(rows.keys, 2.0, out=rows.values)[0, 0, 0]
/// np.float32(2.0)
/// >>> len(cache)
/// 3
#[pyclass(name = "ReservedSpan", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(super) struct PyReservedSpan {
    range: Range<usize>,
    dtype: DType,
    lease: Lease,
}

impl PyReservedSpan {
    pub(super) fn new(py: Python<'_>, reserved: AnyReservedSpan) -> PyResult<Self> {
        let (range, dtype) = (each!(&reserved, reserved => reserved.range()), reserved.dtype());
        Ok(Self { range, dtype, lease: Lease::reserved(py, reserved)? })
    }
}

#[pymethods]
impl PyReservedSpan {
    /// The keys to write: a NumPy array [tokens, num_heads, head_dim] over the cache's memory.
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.tensor(py, Side::Keys)?.into_array()
    }

    /// The values to write: a NumPy array [tokens, num_heads, head_dim] over the cache's memory.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.tensor(py, Side::Values)?.into_array()
    }

    /// The keys as an exporter for other libraries: buffer protocol and DLPack, both writable.
    #[getter]
    fn key_view(&self, py: Python<'_>) -> PyResult<PyTensorView> {
        self.lease.tensor(py, Side::Keys).map(PyTensorView::new)
    }

    /// The values as an exporter for other libraries: buffer protocol and DLPack, both writable.
    #[getter]
    fn value_view(&self, py: Python<'_>) -> PyResult<PyTensorView> {
        self.lease.tensor(py, Side::Values).map(PyTensorView::new)
    }

    /// What the heads of the keys are multiplied by: a NumPy array of float32 [tokens, num_heads] to
    /// write, zero to begin with. None unless the cache is one of int8.
    #[getter]
    fn key_scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.lease.scales(py, Side::Keys)?.map(Tensor::into_array).transpose()
    }

    /// What the heads of the values are multiplied by, as ``key_scales``.
    #[getter]
    fn value_scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.lease.scales(py, Side::Values)?.map(Tensor::into_array).transpose()
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Position that the first row will have.
    #[getter]
    fn start(&self) -> usize {
        self.range.start
    }

    /// Position one past the last row.
    #[getter]
    fn end(&self) -> usize {
        self.range.end
    }

    /// Whether the rows were committed or discarded, or the ``with`` block is over.
    #[getter]
    fn ended(&self) -> bool {
        self.lease.is_over()
    }

    /// Publishes the rows, all at once, and returns their positions.
    ///
    /// Raises ViewsAliveError (a BufferError), and leaves the reservation as it is, while arrays
    /// over the rows are alive; ReleasedError if it was ended before.
    fn commit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        self.lease.commit(py)?;
        positions(py, &self.range)
    }

    /// Gives the rows up.
    ///
    /// Raises ViewsAliveError (a BufferError), and leaves the reservation as it is, while arrays
    /// over the rows are alive. Discarding twice is fine.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        self.lease.release(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().lease.tensor(slf.py(), Side::Keys)?;
        Ok(slf)
    }

    #[pyo3(signature = (exception_type, _exception, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: Option<&Bound<'_, PyAny>>,
        _exception: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if exception_type.is_some() {
            // Arrays of the block may live on in the traceback; the last to go gives the rows up.
            self.lease.give_up();
        } else if !self.lease.is_over() {
            self.commit(py)?;
        }
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.range.len()
    }

    fn __repr__(&self) -> String {
        let Range { start, end } = self.range;
        let (dtype, ended) = (self.dtype.name(), if self.lease.is_over() { ", ended" } else { "" });
        format!("ReservedSpan(start={start}, end={end}, dtype='{dtype}'{ended})")
    }
}

/// A Python range of positions.
pub(super) fn positions<'py>(
    py: Python<'py>,
    range: &Range<usize>,
) -> PyResult<Bound<'py, PyRange>> {
    PyRange::new(py, range.start.try_into()?, range.end.try_into()?)
}
