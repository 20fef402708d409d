//! NumPy arrays, made through its C API: three to four times cheaper than `np.asarray` over an
//! exporter, and on the path of every decode step.

#![expect(unsafe_code, reason = "the C API of NumPy")]

use std::ffi::{c_int, c_void};
use std::ptr;

use numpy::PyArrayDescrMethods;
use numpy::npyffi::{
    NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NpyTypes, PY_ARRAY_API, get_type_object,
};
use pyo3::prelude::*;

use super::lease::Tensor;

impl<'py> Tensor<'py> {
    /// An array over the memory, which it keeps alive.
    pub(in crate::python) fn into_array(self) -> PyResult<Bound<'py, PyAny>> {
        let Self { memory, data, mut layout } = self;
        let py = memory.py();
        let flags = if layout.readonly { NPY_ARRAY_CARRAY_RO } else { NPY_ARRAY_CARRAY };
        // SAFETY: `data` is aligned, and holds as many elements as the axes say. That it stays is
        // seen to before anybody gets the array.
        let array = unsafe { new(py, layout.axes_mut(), data.as_ptr().cast(), flags) }?;
        let base = memory.into_any().into_ptr();
        // SAFETY: `array` is an array without a base; the reference to the memory is given away.
        let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), base) };
        if failed < 0 { Err(PyErr::fetch(py)) } else { Ok(array) }
    }
}

/// A new array of `f32` for the caller to fill before anybody else sees it.
pub(in crate::python) fn new_array<'py>(
    py: Python<'py>,
    axes: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let axes: Result<Vec<_>, _> = axes.iter().map(|&axis| isize::try_from(axis)).collect();
    // SAFETY: NumPy allocates the memory.
    unsafe { new(py, &mut axes?, ptr::null_mut(), 0) }
}

/// Makes a C-ordered array of `f32`.
///
/// # Safety
///
/// `data` is null, or aligned and valid for as many elements as `axes` say.
unsafe fn new<'py>(
    py: Python<'py>,
    axes: &mut [isize],
    data: *mut c_void,
    flags: c_int,
) -> PyResult<Bound<'py, PyAny>> {
    let num_axes = c_int::try_from(axes.len())?;
    // SAFETY: NumPy is imported, or this raises; its types live as long as it does.
    let array_type = unsafe { get_type_object(py, NpyTypes::PyArray_Type) };
    // SAFETY: the reference to the descriptor is given away; there are `num_axes` axes; the caller
    // answers for `data`.
    let array = unsafe {
        PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            array_type,
            numpy::dtype::<f32>(py).into_dtype_ptr(),
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
