//! Memory that others own: arrays that keys and values come from, and arrays they go to.

#![expect(unsafe_code, reason = "foreign memory is reached through raw pointers only")]

use std::ptr::NonNull;

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::memory::{Source, Target};
use crate::python::error::{InvalidInputError, KvCacheError};

/// C-contiguous `float32` memory of a NumPy array, a buffer or a DLPack exporter.
///
/// Other threads may write to it while it is copied, so no reference to it is ever made. It can be
/// copied detached, since its owner is held.
///
/// # Invariants
///
/// `data` is aligned and points to `len` elements as long as `_owner` lives; they may be written if
/// what was asked for is [`Tokens::Room`].
pub(in crate::python) struct Foreign<'a, 'py> {
    data: NonNull<f32>,
    len: usize,
    _owner: Owner<'a, 'py>,
}

enum Owner<'a, 'py> {
    /// The caller's reference, which outlives the call.
    Caller(&'a Bound<'py, PyUntypedArray>),
    Array(Bound<'py, PyUntypedArray>),
    Buffer(PyUntypedBuffer),
}

/// The shapes that keys or values may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::python) enum Tokens {
    /// One token: `[heads, dim]` or `[heads * dim]`.
    One,
    /// `[tokens, heads, dim]` or `[tokens, heads * dim]`.
    Many,
    /// Either of the above.
    Any,
    /// Writable, and shaped as any of the above or flat.
    Room,
}

/// What a caller gave, and what is wanted: for the checks and for what they say.
#[derive(Clone, Copy)]
pub(in crate::python) struct Wanted {
    /// What the caller calls it, in plural.
    pub(in crate::python) name: &'static str,
    pub(in crate::python) tokens: Tokens,
    pub(in crate::python) heads: usize,
    pub(in crate::python) dim: usize,
}

/// An object that offers such memory, before its place is looked up.
///
/// In two steps, because only the first may run Python code, which may take the memory of an array
/// away. Open all that a call is given, then look.
pub(in crate::python) struct Opened<'a, 'py> {
    owner: Owner<'a, 'py>,
    wanted: Wanted,
}

impl<'a, 'py> Opened<'a, 'py> {
    #[inline]
    pub(in crate::python) fn new(object: &'a Bound<'py, PyAny>, wanted: Wanted) -> PyResult<Self> {
        let owner = match object.cast::<PyUntypedArray>() {
            Ok(array) => Owner::Caller(array),
            Err(_) => Owner::of_other(object, &wanted)?,
        };
        Ok(Self { owner, wanted })
    }

    pub(in crate::python) fn look(self) -> PyResult<Foreign<'a, 'py>> {
        let Self { owner, wanted } = self;
        let (data, len) = match &owner {
            Owner::Caller(array) => wanted.in_array(array)?,
            Owner::Array(array) => wanted.in_array(array)?,
            Owner::Buffer(buffer) => wanted.in_buffer(buffer)?,
        };
        Ok(Foreign { data, len, _owner: owner })
    }
}

impl<'py> Owner<'_, 'py> {
    #[cold]
    fn of_other(object: &Bound<'py, PyAny>, wanted: &Wanted) -> PyResult<Self> {
        let py = object.py();
        // A memoryview adds what some exporters leave out, such as the strides.
        let view = PyMemoryView::from(object);
        if !view.as_ref().is_err_and(|error| error.is_instance_of::<PyTypeError>(py)) {
            if let Ok(view) = &view
                && view.getattr("ndim")?.extract::<usize>()? == 0
            {
                return Err(wanted.wrong_shape(&[]));
            }
            let buffer = view.and_then(|view| PyUntypedBuffer::get(&view));
            return buffer.map(Owner::Buffer).map_err(|e| wanted.unreadable(py, "a buffer", e));
        }
        if object.hasattr("__dlpack__")? {
            let array = py.import("numpy")?.call_method1("from_dlpack", (object,));
            let array = array.map_err(|cause| wanted.unreadable(py, "DLPack", cause))?;
            return Ok(Owner::Array(array.cast_into()?));
        }
        let name = wanted.name;
        Err(PyTypeError::new_err(format!(
            "{name} must be a float32 array (NumPy, or any C-contiguous buffer or DLPack exporter), \
             not {}",
            object.get_type().name()?
        )))
    }
}

impl<'a, 'py> Foreign<'a, 'py> {
    /// Takes two objects at once. Two arrays, the usual case, are looked at without further ado.
    #[inline]
    pub(in crate::python) fn pair(
        objects: [&'a Bound<'py, PyAny>; 2],
        wanted: [Wanted; 2],
    ) -> PyResult<(Self, Self)> {
        let [first, second] = objects;
        if let (Ok(first), Ok(second)) = (first.cast(), second.cast()) {
            return Ok((Self::of_array(first, &wanted[0])?, Self::of_array(second, &wanted[1])?));
        }
        Self::other_pair(objects, wanted)
    }

    #[inline]
    fn of_array(array: &'a Bound<'py, PyUntypedArray>, wanted: &Wanted) -> PyResult<Self> {
        let (data, len) = wanted.in_array(array)?;
        Ok(Self { data, len, _owner: Owner::Caller(array) })
    }

    #[cold]
    fn other_pair(
        [first, second]: [&'a Bound<'py, PyAny>; 2],
        wanted: [Wanted; 2],
    ) -> PyResult<(Self, Self)> {
        let first = Opened::new(first, wanted[0])?;
        let second = Opened::new(second, wanted[1])?;
        Ok((first.look()?, second.look()?))
    }

    pub(in crate::python) fn len(&self) -> usize {
        self.len
    }

    pub(in crate::python) fn nbytes(&self) -> usize {
        self.len * size_of::<f32>()
    }

    /// The memory as something to copy from.
    pub(in crate::python) fn source(&self) -> Source<'_, f32> {
        // SAFETY: the type's invariant.
        unsafe { Source::from_raw(self.data, self.len) }
    }

    /// One token of an array of many.
    pub(in crate::python) fn token(&self, index: usize, width: usize) -> Source<'_, f32> {
        assert!(index < self.len / width, "the token is inside the array");
        // SAFETY: the assertion keeps it inside.
        let data = unsafe { self.data.add(index * width) };
        // SAFETY: likewise, with the type's invariant.
        unsafe { Source::from_raw(data, width) }
    }
}

/// Foreign memory that may be written.
pub(in crate::python) struct Room<'a, 'py>(Foreign<'a, 'py>);

impl<'a, 'py> Room<'a, 'py> {
    /// Takes two objects that offer such memory for writing.
    pub(in crate::python) fn pair(
        objects: [&'a Bound<'py, PyAny>; 2],
        names: [&'static str; 2],
        (heads, dim): (usize, usize),
    ) -> PyResult<(Self, Self)> {
        let wanted = names.map(|name| Wanted { name, tokens: Tokens::Room, heads, dim });
        let (first, second) = Foreign::pair(objects, wanted)?;
        Ok((Self(first), Self(second)))
    }

    /// The memory as something to copy to.
    pub(in crate::python) fn target(&self) -> Target<'_, f32> {
        // SAFETY: `Foreign`'s invariant; it was asked for `Tokens::Room`.
        unsafe { Target::from_raw(self.0.data, self.0.len) }
    }
}

impl Wanted {
    /// Where the elements of an array are, and how many.
    #[inline]
    fn in_array(&self, array: &Bound<'_, PyUntypedArray>) -> PyResult<(NonNull<f32>, usize)> {
        let dtype = array.dtype();
        // Cheaper than to compare with a dtype object.
        if dtype.char() != b'f' || dtype.is_native_byteorder() != Some(true) {
            return Err(self.wrong_dtype(&dtype.to_string()));
        }
        if !array.is_c_contiguous() {
            return Err(self.not_contiguous(array.strides()));
        }
        // SAFETY: `array` is an array object, whose fields may be read while attached.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        self.check(array.shape(), fields.flags & NPY_ARRAY_WRITEABLE != 0)?;
        let len = array.len();
        Ok((self.place(fields.data.cast(), len)?, len))
    }

    fn in_buffer(&self, buffer: &PyUntypedBuffer) -> PyResult<(NonNull<f32>, usize)> {
        // 'f' is a native float, and '<f' is one as well where that is the native order.
        let native = if cfg!(target_endian = "little") { "<f" } else { ">f" };
        let format = buffer.format().to_string_lossy();
        if !["f", "@f", "=f", native].contains(&format.as_ref()) {
            return Err(self.wrong_dtype(&format!("'{format}' (a struct format)")));
        }
        if !buffer.is_c_contiguous() {
            return Err(self.not_contiguous(buffer.strides()));
        }
        self.check(buffer.shape(), !buffer.readonly())?;
        let len = buffer.item_count();
        Ok((self.place(buffer.buf_ptr().cast(), len)?, len))
    }

    #[inline]
    fn check(&self, shape: &[usize], writable: bool) -> PyResult<()> {
        let (heads, dim, width) = (self.heads, self.dim, self.heads * self.dim);
        let one = match *shape {
            [w] => w == width,
            [h, d] => h == heads && d == dim,
            _ => false,
        };
        let many = match *shape {
            [_, h, d] => h == heads && d == dim,
            [_, w] => w == width,
            _ => false,
        };
        let fits = match self.tokens {
            Tokens::One => one,
            Tokens::Many => many,
            Tokens::Any => one || many,
            Tokens::Room => one || many || shape.len() == 1,
        };
        if !fits {
            return Err(self.wrong_shape(shape));
        }
        if self.tokens == Tokens::Room && !writable {
            return Err(invalid(format!("{} are read-only, and can not be written to", self.name)));
        }
        Ok(())
    }

    #[inline]
    fn place(&self, data: *mut f32, len: usize) -> PyResult<NonNull<f32>> {
        match NonNull::new(data) {
            Some(data) if data.is_aligned() => Ok(data),
            // No elements need no place.
            None if len == 0 => Ok(NonNull::dangling()),
            _ => Err(self.misaligned()),
        }
    }

    /// The error for an exporter that failed. Our own errors, and what is no error, such as
    /// `KeyboardInterrupt`, pass as they are.
    #[cold]
    fn unreadable(&self, py: Python<'_>, through: &str, cause: PyErr) -> PyErr {
        let is_error = cause.is_instance_of::<PyException>(py);
        if !is_error || cause.is_instance_of::<KvCacheError>(py) {
            return cause;
        }
        let name = self.name;
        let error = invalid(format!(
            "{name} can not be read as float32 in host memory through {through}: {cause}"
        ));
        error.set_cause(py, Some(cause));
        error
    }

    #[cold]
    fn misaligned(&self) -> PyErr {
        let alignment = align_of::<f32>();
        invalid(format!("{} are not aligned to {alignment} bytes: pass a copy", self.name))
    }

    #[cold]
    fn wrong_dtype(&self, given: &str) -> PyErr {
        invalid(format!(
            "{} have dtype {given}, but float32 is wanted: convert them first, for example with \
             .astype('float32')",
            self.name
        ))
    }

    #[cold]
    fn not_contiguous(&self, strides: &[isize]) -> PyErr {
        invalid(format!(
            "{} are not C-contiguous (strides in bytes {strides:?}): pass np.ascontiguousarray of \
             them",
            self.name
        ))
    }

    #[cold]
    fn wrong_shape(&self, shape: &[usize]) -> PyErr {
        let (name, heads, dim, width) = (self.name, self.heads, self.dim, self.heads * self.dim);
        let one = format!("({heads}, {dim}) or ({width},)");
        let many = format!("(tokens, {heads}, {dim}) or (tokens, {width})");
        let wanted = match self.tokens {
            Tokens::One => one,
            Tokens::Many => many,
            Tokens::Any | Tokens::Room => format!("{many}, or for one token {one}"),
        };
        invalid(format!("{name} have shape {}, but {wanted} is wanted", tuple(shape)))
    }
}

/// A shape as Python writes it.
fn tuple(shape: &[usize]) -> String {
    let axes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("({}{})", axes.join(", "), if axes.len() == 1 { "," } else { "" })
}

fn invalid(message: String) -> PyErr {
    InvalidInputError::new_err((message,))
}
