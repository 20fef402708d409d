//! `KVSpan`, a view of pinned tokens.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::buffer::{Lease, PyTensorView, Side, SpanMemory, Tensor};
use super::typed::{AnyPinnedSpan, each};
use crate::dtype::DType;

/// A view of tokens: keys and values where they lie, which do not change while the view lives.
///
/// Made by ``LayerKvCache.view`` and passed to the callback of ``with_read_range``; those of a
/// ``PagedSpan`` are one block each. The tokens stay pinned until the last array, memoryview, tensor
/// or capsule over them is gone, or until ``release()``. Appending to the cache is never disturbed;
/// what would change the tokens raises PinnedError. As a context manager it gives up its own share of
/// the pin at the end of the block; arrays that are still alive keep theirs.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(num_heads=2, hidden_dim_per_head=4))
/// >>> rows = np.ones((3, 2, 4), dtype=np.float32)
/// >>> cache.append(rows, 2 * rows)
/// range(0, 3)
/// >>> with cache.view(1, 3) as span:
/// ...     print(span.keys.shape, float(span.values.sum()), len(span))
/// (2, 2, 4) 32.0 2
#[pyclass(name = "KVSpan", module = "kvspan", frozen, weakref, freelist = 64)]
#[derive(Debug)]
pub(super) struct PyKVSpan {
    range: Range<usize>,
    num_heads: usize,
    head_dim: usize,
    dtype: DType,
    lease: Lease,
}

impl PyKVSpan {
    pub(super) fn new(py: Python<'_>, pinned: AnyPinnedSpan) -> PyResult<Self> {
        let dtype = pinned.dtype();
        let (range, num_heads, head_dim) =
            each!(&pinned, pinned => (pinned.range(), pinned.num_heads(), pinned.head_dim()));
        Ok(Self { range, num_heads, head_dim, dtype, lease: Lease::pinned(py, pinned)? })
    }

    /// What holds the tokens.
    pub(super) fn memory(&self, py: Python<'_>) -> PyResult<Py<SpanMemory>> {
        self.lease.memory(py)
    }

    /// The segment of a sequence that lies in one block.
    pub(super) fn of_segment(
        range: Range<usize>,
        [num_heads, head_dim]: [usize; 2],
        dtype: DType,
        lease: Lease,
    ) -> Self {
        Self { range, num_heads, head_dim, dtype, lease }
    }
}

#[pymethods]
impl PyKVSpan {
    /// The keys: a read-only NumPy array [tokens, num_heads, head_dim] over the cache's memory.
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.tensor(py, Side::Keys)?.into_array()
    }

    /// The values: a read-only NumPy array [tokens, num_heads, head_dim] over the cache's memory.
    #[getter]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.tensor(py, Side::Values)?.into_array()
    }

    /// The keys as an exporter for other libraries: buffer protocol and DLPack.
    #[getter]
    fn key_view(&self, py: Python<'_>) -> PyResult<PyTensorView> {
        self.lease.tensor(py, Side::Keys).map(PyTensorView::new)
    }

    /// The values as an exporter for other libraries: buffer protocol and DLPack.
    #[getter]
    fn value_view(&self, py: Python<'_>) -> PyResult<PyTensorView> {
        self.lease.tensor(py, Side::Values).map(PyTensorView::new)
    }

    /// What the heads of the keys are multiplied by: a read-only NumPy array of float32 [tokens,
    /// num_heads] over the cache's memory. None unless the cache is one of int8.
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

    /// Position of the first token in the cache, or in the sequence.
    #[getter]
    fn start(&self) -> usize {
        self.range.start
    }

    /// Position one past the last token.
    #[getter]
    fn end(&self) -> usize {
        self.range.end
    }

    /// Number of KV heads.
    #[getter]
    fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Elements of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Whether ``release()`` was called, or the ``with`` block is over.
    #[getter]
    fn released(&self) -> bool {
        self.lease.is_over()
    }

    /// Ends the pin now.
    ///
    /// Raises ViewsAliveError (a BufferError), and leaves the span as it is, while arrays,
    /// memoryviews, tensors, capsules or exporters over it are alive. Releasing twice is fine.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.lease.release(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().lease.tensor(slf.py(), Side::Keys)?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.lease.give_up();
    }

    fn __len__(&self) -> usize {
        self.range.len()
    }

    fn __repr__(&self) -> String {
        let Range { start, end } = self.range;
        let (heads, dim, released) = (self.num_heads, self.head_dim, self.released());
        let (dtype, released) = (self.dtype(), if released { ", released" } else { "" });
        format!(
            "KVSpan(start={start}, end={end}, num_heads={heads}, head_dim={dim}, \
             dtype='{dtype}'{released})"
        )
    }
}
