//! What the buffer protocol shows of an object.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// What an object offers.
pub(super) enum Shown {
    Buffer(PyUntypedBuffer),
    /// One element, of which there is no buffer with a shape.
    Scalar,
    /// It is no exporter.
    Nothing,
}

impl Shown {
    /// Looks through a memoryview, which adds what some exporters leave out, such as the strides.
    pub(super) fn by(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match PyMemoryView::from(object) {
            Ok(view) if view.getattr("ndim")?.extract::<usize>()? == 0 => Ok(Self::Scalar),
            Ok(view) => PyUntypedBuffer::get(&view).map(Self::Buffer),
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => Ok(Self::Nothing),
            Err(error) => Err(error),
        }
    }
}

/// A format without what says that its byte order is the native one.
pub(super) fn native(format: &str) -> &str {
    let native = if cfg!(target_endian = "little") { '<' } else { '>' };
    format.strip_prefix(['@', '=', native]).unwrap_or(format)
}
