//! `TensorView`: the object that exports keys or values.

#![expect(unsafe_code, reason = "the buffer protocol")]

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::call::call;
use super::dlpack::{CPU, Request};
use super::lease::{Layout, SpanMemory, Tensor};
use crate::dtype::DType;

/// The keys or the values of a span, as memory that other libraries read in place.
///
/// It offers the buffer protocol (``np.asarray``, ``memoryview``) and DLPack (``np.from_dlpack``,
/// ``torch.from_dlpack``, ``jax.dlpack.from_dlpack``), both without a copy. Those of a view are
/// read-only, those of a reservation can be written. While it, or anything made from it, is alive,
/// the tokens stay pinned, or the rows reserved.
///
/// Read-only memory is exported through DLPack with the read-only flag of version 1. A consumer
/// that does not speak that version gets a BufferError; ``copy=True`` gives it a copy of its own.
/// Note that ``torch.from_dlpack`` ignores the flag: never write to a tensor over a view.
#[pyclass(name = "TensorView", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(in crate::python) struct PyTensorView {
    memory: Py<SpanMemory>,
    /// At the address that the buffer protocol hands out, as are the strides.
    layout: Layout,
    strides_bytes: Layout,
}

impl PyTensorView {
    pub(in crate::python) fn new(tensor: Tensor<'_>) -> Self {
        let Tensor { memory, layout, .. } = tensor;
        Self { memory: memory.unbind(), layout, strides_bytes: layout.strides_bytes() }
    }

    fn tensor<'py>(&self, py: Python<'py>) -> PyResult<Tensor<'py>> {
        Tensor::again(py, &self.memory, &self.layout)
    }
}

#[pymethods]
impl PyTensorView {
    /// The shape: [tokens, num_heads, head_dim].
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.axes())
    }

    /// Bytes from one element to the next along each axis.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.strides_bytes.axes())
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.dtype.name()
    }

    /// Bytes of the memory.
    #[getter]
    fn nbytes(&self) -> isize {
        self.layout.nbytes()
    }

    /// Whether the memory is only to be read.
    #[getter]
    fn readonly(&self) -> bool {
        self.layout.readonly
    }

    fn __len__(&self) -> usize {
        self.layout.axes()[0].unsigned_abs()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let readonly = if slf.get().layout.readonly { "True" } else { "False" };
        let (shape, dtype) = (slf.get().shape(slf.py())?, slf.get().dtype());
        Ok(format!("TensorView(shape={shape}, dtype='{dtype}', readonly={readonly})"))
    }

    /// Exports the memory through DLPack; see the class.
    ///
    /// Raises BufferError for a stream, another device than the CPU, and for read-only memory if
    /// `max_version` is below (1, 0) and no copy was asked for.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = Request::new(stream, max_version, dl_device, copy)?;
        request.export(slf.get().tensor(slf.py())?)
    }

    /// What NumPy asks for where it can not use the buffer protocol, for example to say why.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let array = slf.get().tensor(py)?.into_array()?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        let copy = py.import("numpy")?.getattr("array")?;
        call(&copy, &PyTuple::new(py, [array])?, Some(&options))
    }

    /// The device as DLPack numbers it: (1, 0), the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }

    /// # Safety
    ///
    /// `view` is what the buffer protocol passes: a `Py_buffer` to fill, or null.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let Some(mut view) = ptr::NonNull::new(view) else {
            return Err(PyBufferError::new_err("there is no Py_buffer to fill"));
        };
        // SAFETY: the caller passes a `Py_buffer` that is its own to fill.
        let view = unsafe { view.as_mut() };
        // What the protocol asks for in case of an error.
        view.obj = ptr::null_mut();
        let this = slf.get();
        let data = this.tensor(slf.py())?.data;
        let wants = |flag: c_int| flags & flag == flag;
        if wants(ffi::PyBUF_WRITABLE) && this.layout.readonly {
            return Err(PyBufferError::new_err("the tokens of a view are read-only"));
        }
        if wants(ffi::PyBUF_F_CONTIGUOUS) {
            return Err(PyBufferError::new_err("the memory is in C order, not in Fortran order"));
        }
        view.buf = data.as_ptr().cast::<c_void>();
        view.len = this.layout.nbytes();
        view.itemsize = this.layout.itemsize();
        view.readonly = c_int::from(this.layout.readonly);
        // Without a shape it is a flat run of bytes.
        let num_axes = if wants(ffi::PyBUF_ND) { this.layout.axes().len() } else { 1 };
        view.ndim = c_int::try_from(num_axes)?;
        // What follows points into `slf`, which does not move, and which `obj` keeps alive.
        let if_wanted = |flag, pointer: *const isize| {
            if wants(flag) { pointer.cast_mut() } else { ptr::null_mut() }
        };
        view.shape = if_wanted(ffi::PyBUF_ND, this.layout.axes().as_ptr());
        view.strides = if_wanted(ffi::PyBUF_STRIDES, this.strides_bytes.axes().as_ptr());
        let format = match this.layout.dtype {
            DType::F32 => c"f",
            DType::F16 => c"e",
            // The protocol has no bfloat16; these are its bits.
            DType::BF16 => c"H",
            DType::I8 => c"b",
        };
        view.format =
            if wants(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { ptr::null_mut() };
        view.suboffsets = ptr::null_mut();
        view.internal = ptr::null_mut();
        view.obj = slf.into_any().into_ptr();
        Ok(())
    }
}
