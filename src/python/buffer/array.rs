//! NumPy arrays, made through its C API: three to four times cheaper than `np.asarray` over an
//! exporter, and on the path of every decode step.

#![expect(unsafe_code, reason = "the C API of NumPy")]

use std::ffi::{c_int, c_void};
use std::ptr;

use numpy::npyffi::{
    NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NpyTypes, PY_ARRAY_API, get_type_object,
};
use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::exceptions::{PyImportError, PyModuleNotFoundError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::lease::Tensor;
use crate::dtype::{DType, f16};

impl<'py> Tensor<'py> {
    /// An array over the memory, which it keeps alive.
    pub(in crate::python) fn into_array(self) -> PyResult<Bound<'py, PyAny>> {
        let Self { memory, data, mut layout } = self;
        let py = memory.py();
        let flags = if layout.readonly { NPY_ARRAY_CARRAY_RO } else { NPY_ARRAY_CARRAY };
        let descr = descr(py, layout.dtype)?;
        // SAFETY: `data` is aligned, and holds as many elements as the axes say. That it stays is
        // seen to before anybody gets the array.
        let array = unsafe { new(descr, layout.axes_mut(), data.as_ptr().cast(), flags) }?;
        let base = memory.into_any().into_ptr();
        // SAFETY: `array` is an array without a base; the reference to the memory is given away.
        let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), base) };
        if failed < 0 { Err(PyErr::fetch(py)) } else { Ok(array) }
    }
}

/// A new array for the caller to fill before anybody else sees it.
pub(in crate::python) fn new_array<'py>(
    py: Python<'py>,
    dtype: DType,
    axes: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let axes: Result<Vec<_>, _> = axes.iter().map(|&axis| isize::try_from(axis)).collect();
    let descr = descr(py, dtype)?;
    // SAFETY: NumPy allocates the memory.
    unsafe { new(descr, &mut axes?, ptr::null_mut(), 0) }
}

/// What NumPy calls an element type.
///
/// # Errors
///
/// `ImportError` if it takes `ml_dtypes`, and that is not installed.
fn descr(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyArrayDescr>> {
    match dtype {
        DType::F32 => Ok(numpy::dtype::<f32>(py)),
        DType::F16 => Ok(numpy::dtype::<f16>(py)),
        DType::I8 => Ok(numpy::dtype::<i8>(py)),
        DType::BF16 => bfloat16(py).cloned(),
    }
}

static BFLOAT16: PyOnceLock<Py<PyArrayDescr>> = PyOnceLock::new();

/// NumPy has no bfloat16 of its own. The first time, a package is imported, which runs Python code.
pub(super) fn bfloat16(py: Python<'_>) -> PyResult<&Bound<'_, PyArrayDescr>> {
    let descr = BFLOAT16.get_or_try_init(py, || {
        let scalar =
            py.import("ml_dtypes").map_err(|error| missing(py, error))?.getattr("bfloat16")?;
        PyArrayDescr::new(py, scalar).map(Bound::unbind)
    });
    descr.map(|descr| descr.bind(py))
}

/// The same if it was needed before.
#[inline]
pub(super) fn known_bfloat16(py: Python<'_>) -> Option<&Bound<'_, PyArrayDescr>> {
    BFLOAT16.get(py).map(|descr| descr.bind(py))
}

fn missing(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyModuleNotFoundError>(py) {
        return error;
    }
    let error_for_caller = PyImportError::new_err(
        "NumPy arrays of bfloat16 need the package ml_dtypes: install it (pip install ml_dtypes), \
         reach the rows through key_view and value_view (DLPack, or a buffer of uint16), or use \
         float32 arrays: append and write round them, read_range_into fills them",
    );
    error_for_caller.set_cause(py, Some(error));
    error_for_caller
}

/// Makes a C-ordered array.
///
/// # Safety
///
/// `data` is null, or aligned and valid for as many elements as `axes` say.
unsafe fn new<'py>(
    descr: Bound<'py, PyArrayDescr>,
    axes: &mut [isize],
    data: *mut c_void,
    flags: c_int,
) -> PyResult<Bound<'py, PyAny>> {
    let py = descr.py();
    let num_axes = c_int::try_from(axes.len())?;
    // SAFETY: NumPy is imported, or this raises; its types live as long as it does.
    let array_type = unsafe { get_type_object(py, NpyTypes::PyArray_Type) };
    // SAFETY: the reference to the descriptor is given away; there are `num_axes` axes; the caller
    // answers for `data`.
    let array = unsafe {
        PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            array_type,
            descr.into_dtype_ptr(),
            num_axes,
            axes.as_mut_ptr(),
            ptr::null_mut(),
            data,
            flags,
            ptr::null_mut(),
        )
    };
    // SAFETY: it is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, array) }
}
