//! `PagedSpan`, a view of tokens that lie in blocks.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PyTuple};

use crate::dtype::DType;
use crate::python::buffer::{Lease, SpanMemory};
use crate::python::span::PyKVSpan;
use crate::python::typed::{AnyPagedSpan, each};

/// A view of tokens of one layer of a sequence, where they lie: one ``KVSpan`` a block.
///
/// Made by ``KvCacheManager.view``. The tokens do not change while it, one of its segments, or an
/// array, memoryview or tensor over them lives, or until ``release()``; what happens to the sequence
/// is of no concern to it, also when that is freed. A block that is in the way of a write is copied
/// first, one that is given back waits. Each segment keeps the whole view.
///
/// ``len`` counts the tokens; iterating gives the segments. As a context manager it gives up its
/// own share at the end of the block; segments and arrays that are still alive keep theirs.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=2, num_kv_heads=1, head_dim=4)
/// >>> handle = manager.allocate([1, 2, 3])
/// >>> rows = np.ones((3, 1, 4), dtype=np.float32)
/// >>> manager.write(handle, 0, 0, rows, rows)
/// >>> with manager.view(handle, 0) as span:
/// ...     print(len(span), [segment.keys.shape for segment in span])
/// 3 [(2, 1, 4), (1, 1, 4)]
#[pyclass(name = "PagedSpan", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyPagedSpan {
    range: Range<usize>,
    dtype: DType,
    token_shape: [usize; 2],
    /// Positions of each segment.
    segments: Vec<Range<usize>>,
    lease: Lease,
}

impl PyPagedSpan {
    pub(super) fn new(py: Python<'_>, span: AnyPagedSpan) -> PyResult<Self> {
        let (range, [_, num_heads, head_dim]) = each!(&span, span => (span.range(), span.shape()));
        Ok(Self {
            range,
            dtype: span.dtype(),
            token_shape: [num_heads, head_dim],
            segments: each!(&span, span => {
                span.segments().map(|segment| segment.start()..segment.end()).collect()
            }),
            lease: Lease::paged(py, span)?,
        })
    }

    /// What holds the tokens.
    pub(in crate::python) fn memory(&self, py: Python<'_>) -> PyResult<Py<SpanMemory>> {
        self.lease.memory(py)
    }
}

#[pymethods]
impl PyPagedSpan {
    /// The segments in order, each a ``KVSpan`` of the tokens of one block: a new list.
    #[getter]
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        // So that a view that is over says so, also without tokens.
        self.lease.check(py)?;
        let segments = self.segments.iter().enumerate().map(|(index, range)| {
            let lease = self.lease.segment(py, index)?;
            Ok(PyKVSpan::of_segment(range.clone(), self.token_shape, self.dtype, lease))
        });
        PyList::new(py, segments.collect::<PyResult<Vec<_>>>()?)
    }

    /// Number of segments.
    #[getter]
    fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// Position of the first token in the sequence.
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
        let [num_heads, _] = self.token_shape;
        num_heads
    }

    /// Elements of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        let [_, head_dim] = self.token_shape;
        head_dim
    }

    /// Whether ``release()`` was called, or the ``with`` block is over.
    #[getter]
    fn released(&self) -> bool {
        self.lease.is_over()
    }

    /// Ends the view now.
    ///
    /// Raises ViewsAliveError (a BufferError), and leaves the view as it is, while segments, or arrays
    /// over them, are alive. Releasing twice is fine.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.lease.release(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().lease.check(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.lease.give_up();
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.segments(py)?.try_iter()
    }

    fn __len__(&self) -> usize {
        self.range.len()
    }

    fn __repr__(&self) -> String {
        let Range { start, end } = self.range;
        let ([heads, dim], num_segments) = (self.token_shape, self.num_segments());
        let released = if self.released() { ", released" } else { "" };
        format!(
            "PagedSpan(start={start}, end={end}, num_heads={heads}, head_dim={dim}, dtype='{}', \
             num_segments={num_segments}{released})",
            self.dtype.name()
        )
    }
}
