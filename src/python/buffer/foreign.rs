//! Memory that others own: arrays that keys and values come from, and arrays they go to.

#![expect(unsafe_code, reason = "foreign memory is reached through raw pointers only")]

use std::ptr::NonNull;

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::memory::{Source, Target};
use crate::python::error::InvalidInputError;

/// C-contiguous `float32` memory of a NumPy array, a buffer or a DLPack exporter.
///
/// Other threads may write to it while it is copied, so no reference to it is ever made. It can be
/// copied detached, since its owner is held.
///
/// # Invariants
///
/// `data` is aligned and points to as many elements as `dims` says, as long as `owner` lives; they
/// may be written if `writable`.
pub(in crate::python) struct Foreign<'py> {
    name: &'static str,
    data: NonNull<f32>,
    dims: Dims,
    writable: bool,
    _owner: Holder<'py>,
}

/// The axes of an array of one to three dimensions.
#[derive(Clone, Copy)]
struct Dims {
    axes: [usize; 3],
    num_axes: usize,
}

#[expect(dead_code, reason = "holding it is what it is for")]
enum Holder<'py> {
    Object(Bound<'py, PyAny>),
    Buffer(PyUntypedBuffer),
}

impl<'py> Foreign<'py> {
    /// Takes any object that offers such memory. `name` is what the caller calls it, in plural.
    pub(in crate::python) fn extract(
        object: &Bound<'py, PyAny>,
        name: &'static str,
    ) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            return Self::from_array(array, name);
        }
        if let Ok(buffer) = PyUntypedBuffer::get(object) {
            return Self::from_buffer(buffer, name);
        }
        let py = object.py();
        if object.hasattr("__dlpack__")? {
            let array =
                py.import("numpy")?.call_method1("from_dlpack", (object,)).map_err(|cause| {
                    let error = invalid(format!(
                        "{name} can not be read through DLPack as float32 in host memory: {cause}"
                    ));
                    error.set_cause(py, Some(cause));
                    error
                })?;
            return Self::from_array(array.cast()?, name);
        }
        Err(PyTypeError::new_err(format!(
            "{name} must be a float32 array (NumPy, or any C-contiguous buffer or DLPack exporter), \
             not {}",
            object.get_type().name()?
        )))
    }

    fn from_array(array: &Bound<'py, PyUntypedArray>, name: &'static str) -> PyResult<Self> {
        let dtype = array.dtype();
        if !dtype.is_equiv_to(&numpy::dtype::<f32>(array.py())) {
            return Err(wrong_dtype(name, &dtype.str()?.to_string()));
        }
        if !array.is_c_contiguous() {
            return Err(not_contiguous(name, &array.getattr("strides")?.to_string()));
        }
        let dims = Dims::new(array.shape(), name)?;
        // SAFETY: `array` is an array object, whose fields may be read while attached.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        let (data, flags) = (fields.data, fields.flags);
        let data = aligned(data.cast(), name)?;
        let writable = flags & NPY_ARRAY_WRITEABLE != 0;
        Ok(Self { name, data, dims, writable, _owner: Holder::Object(array.clone().into_any()) })
    }

    fn from_buffer(buffer: PyUntypedBuffer, name: &'static str) -> PyResult<Self> {
        // 'f' is a native float, and '<f' is one as well where that is the native order.
        let native = if cfg!(target_endian = "little") { "<f" } else { ">f" };
        let format = buffer.format().to_string_lossy().into_owned();
        if !["f", "@f", "=f", native].contains(&format.as_str()) {
            return Err(wrong_dtype(name, &format!("'{format}' (a struct format)")));
        }
        if !buffer.is_c_contiguous() {
            return Err(not_contiguous(name, &format!("{:?}", buffer.strides())));
        }
        let dims = Dims::new(buffer.shape(), name)?;
        let data = aligned(buffer.buf_ptr().cast(), name)?;
        let writable = !buffer.readonly();
        Ok(Self { name, data, dims, writable, _owner: Holder::Buffer(buffer) })
    }

    /// The elements of one token, `[heads, dim]` or `[heads * dim]`.
    pub(in crate::python) fn one_token(&self, heads: usize, dim: usize) -> PyResult<()> {
        match *self.dims.axes() {
            [width] if width == heads * dim => Ok(()),
            [h, d] if (h, d) == (heads, dim) => Ok(()),
            _ => Err(self.wrong_shape(&format!("({heads}, {dim}) or ({},)", heads * dim))),
        }
    }

    /// The number of tokens in `[tokens, heads, dim]` or `[tokens, heads * dim]`.
    pub(in crate::python) fn many_tokens(&self, heads: usize, dim: usize) -> PyResult<usize> {
        match *self.dims.axes() {
            [tokens, h, d] if (h, d) == (heads, dim) => Ok(tokens),
            [tokens, width] if width == heads * dim => Ok(tokens),
            _ => {
                Err(self
                    .wrong_shape(&format!("(tokens, {heads}, {dim}) or (tokens, {})", heads * dim)))
            }
        }
    }

    /// Accepts the elements of one token or of many.
    pub(in crate::python) fn any_tokens(&self, heads: usize, dim: usize) -> PyResult<usize> {
        if self.one_token(heads, dim).is_ok() {
            return Ok(1);
        }
        self.many_tokens(heads, dim).map_err(|_| {
            let width = heads * dim;
            self.wrong_shape(&format!(
                "(tokens, {heads}, {dim}), (tokens, {width}), ({heads}, {dim}) or ({width},)"
            ))
        })
    }

    /// Accepts what tokens can be copied to: as `any_tokens`, or flat.
    pub(in crate::python) fn room(&self, heads: usize, dim: usize) -> PyResult<()> {
        if !self.writable {
            return Err(invalid(format!("{} are read-only", self.name)));
        }
        if self.dims.axes().len() > 1 {
            self.any_tokens(heads, dim)?;
        }
        Ok(())
    }

    pub(in crate::python) fn nbytes(&self) -> usize {
        self.len() * size_of::<f32>()
    }

    fn len(&self) -> usize {
        self.dims.axes().iter().product()
    }

    /// The memory as something to copy from.
    pub(in crate::python) fn source(&self) -> Source<'_, f32> {
        // SAFETY: the type's invariant.
        unsafe { Source::from_raw(self.data, self.len()) }
    }

    /// The memory as something to copy to, once [`room`](Self::room) has accepted it.
    pub(in crate::python) fn target(&self) -> Target<'_, f32> {
        let len = if self.writable { self.len() } else { 0 };
        // SAFETY: the type's invariant; what may not be written has no room.
        unsafe { Target::from_raw(self.data, len) }
    }

    /// One token of an array of many.
    pub(in crate::python) fn token(&self, index: usize, width: usize) -> Source<'_, f32> {
        assert!(index < self.len() / width, "the token is inside the array");
        // SAFETY: the assertion keeps it inside.
        let data = unsafe { self.data.add(index * width) };
        // SAFETY: likewise, with the type's invariant.
        unsafe { Source::from_raw(data, width) }
    }

    fn wrong_shape(&self, wanted: &str) -> PyErr {
        let dims: Vec<String> = self.dims.axes().iter().map(ToString::to_string).collect();
        let comma = if dims.len() == 1 { "," } else { "" };
        let (name, given) = (self.name, dims.join(", "));
        invalid(format!("{name} have shape ({given}{comma}), but {wanted} is wanted"))
    }
}

impl Dims {
    fn new(shape: &[usize], name: &str) -> PyResult<Self> {
        let num_axes = shape.len();
        if !(1..=3).contains(&num_axes) {
            return Err(invalid(format!("{name} have {num_axes} axes, but 1 to 3 are wanted")));
        }
        let mut axes = [1; 3];
        axes[..num_axes].copy_from_slice(shape);
        Ok(Self { axes, num_axes })
    }

    fn axes(&self) -> &[usize] {
        &self.axes[..self.num_axes]
    }
}

fn aligned(data: *mut f32, name: &str) -> PyResult<NonNull<f32>> {
    match NonNull::new(data) {
        Some(data) if data.is_aligned() => Ok(data),
        // No elements, so no place either.
        None => Ok(NonNull::dangling()),
        Some(_) => Err(invalid(format!(
            "{name} are not aligned to {} bytes: pass a copy",
            align_of::<f32>()
        ))),
    }
}

fn wrong_dtype(name: &str, given: &str) -> PyErr {
    invalid(format!(
        "{name} have dtype {given}, but float32 is wanted: convert them first, for example with \
         .astype('float32')"
    ))
}

fn not_contiguous(name: &str, strides: &str) -> PyErr {
    invalid(format!(
        "{name} are not C-contiguous (strides {strides}): pass np.ascontiguousarray of them"
    ))
}

fn invalid(message: String) -> PyErr {
    InvalidInputError::new_err((message,))
}
