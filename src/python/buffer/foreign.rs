//! Memory that others own: arrays that keys and values come from, and arrays they go to.

#![expect(unsafe_code, reason = "foreign memory is reached through raw pointers only")]
#![expect(
    clippy::inline_always,
    reason = "where an array is comes in registers, not through memory"
)]

use std::marker::PhantomData;
use std::ptr::NonNull;

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;

use super::array::{bfloat16, known_bfloat16};
use super::dlpack::{Found, Imported};
use super::memoryview::{Shown, native};
use crate::dtype::{DType, Element, bf16, f16};
use crate::error::Result;
use crate::memory::{Run, Source, Target};
use crate::python::convert::with_room;
use crate::python::error::{InvalidInputError, KvCacheError};

/// C-contiguous memory of a NumPy array, a buffer or a DLPack exporter, of the elements of a cache or
/// of `float32`.
///
/// Other threads may write to it while it is copied, so no reference to it is ever made. It can be
/// copied detached, since its owner is held.
///
/// # Invariants
///
/// `memory.first` is aligned and points to `len` elements of a type that the cache takes, as long as
/// `_owner` lives; they may be written if what was asked for is [`Tokens::Room`].
pub(in crate::python) struct Foreign<'a, 'py> {
    memory: Memory,
    _owner: Owner<'a, 'py>,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    first: First,
    len: usize,
}

/// The address of the first element.
#[derive(Clone, Copy, Debug)]
enum First {
    F32(NonNull<f32>),
    F16(NonNull<f16>),
    BF16(NonNull<bf16>),
}

enum Owner<'a, 'py> {
    /// The caller's reference, which outlives the call.
    Caller(&'a Bound<'py, PyUntypedArray>),
    Tensor(Imported),
    Buffer(PyUntypedBuffer),
}

/// The elements of [`Foreign`] memory, to be copied from by whoever is detached.
///
/// # Invariants
///
/// `memory` is as in [`Foreign`] during `'a`.
#[derive(Clone, Copy, Debug)]
pub(in crate::python) struct Values<'a> {
    memory: Memory,
    _owner: PhantomData<&'a [u8]>,
}

/// The same to be copied to.
#[derive(Debug)]
pub(in crate::python) struct ValuesMut<'a> {
    memory: Memory,
    _owner: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a slice, which is `Send`.
unsafe impl Send for Values<'_> {}

// SAFETY: it stands for a slice, which is `Sync`.
unsafe impl Sync for Values<'_> {}

// SAFETY: it stands for a slice, which is `Send`.
unsafe impl Send for ValuesMut<'_> {}

impl<'a> Values<'a> {
    /// For a cache of these elements, whose type the memory was checked for.
    pub(in crate::python) fn source<T: Element>(self) -> Source<'a, T> {
        let Memory { first, len } = self.memory;
        match first {
            // SAFETY: the type's invariant.
            First::F32(first) => unsafe { Source::from_raw(first, len) },
            // SAFETY: likewise.
            First::F16(first) => unsafe { Source::from_raw(first, len) },
            // SAFETY: likewise.
            First::BF16(first) => unsafe { Source::from_raw(first, len) },
        }
    }

    /// A copy of memory that was checked for `float32`.
    pub(in crate::python) fn to_vec(self) -> Result<Vec<f32>> {
        let Memory { first, len } = self.memory;
        let First::F32(first) = first else { unreachable!("it was checked for float32") };
        let mut copy = with_room(len)?;
        copy.resize(len, 0.0);
        // SAFETY: the type's invariant.
        unsafe { Run::from_raw(first, len) }.copy(&mut copy);
        Ok(copy)
    }
}

impl ValuesMut<'_> {
    /// For a cache of these elements, whose type the memory was checked for.
    pub(in crate::python) fn target<T: Element>(&mut self) -> Target<'_, T> {
        let Memory { first, len } = self.memory;
        match first {
            // SAFETY: the type's invariant.
            First::F32(first) => unsafe { Target::from_raw(first, len) },
            // SAFETY: likewise.
            First::F16(first) => unsafe { Target::from_raw(first, len) },
            // SAFETY: likewise.
            First::BF16(first) => unsafe { Target::from_raw(first, len) },
        }
    }
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
    /// Of the cache.
    pub(in crate::python) dtype: DType,
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
            Ok(array) => {
                wanted.meet(array);
                Owner::Caller(array)
            }
            Err(_) => Owner::of_other(object, &wanted)?,
        };
        Ok(Self { owner, wanted })
    }

    pub(in crate::python) fn look(self) -> PyResult<Foreign<'a, 'py>> {
        Ok(Foreign { memory: self.memory()?, _owner: self.owner })
    }

    /// How many elements there are now, of an object that is looked at later.
    pub(in crate::python) fn len(&self) -> PyResult<usize> {
        Ok(self.memory()?.len)
    }

    fn memory(&self) -> PyResult<Memory> {
        match &self.owner {
            Owner::Caller(array) => self.wanted.in_array(array),
            Owner::Tensor(tensor) => self.wanted.in_tensor(tensor),
            Owner::Buffer(buffer) => self.wanted.in_buffer(buffer),
        }
    }
}

impl<'py> Owner<'_, 'py> {
    #[cold]
    fn of_other(object: &Bound<'py, PyAny>, wanted: &Wanted) -> PyResult<Self> {
        let py = object.py();
        let is_wanted = |buffer: &PyUntypedBuffer| {
            wanted.element_type(of_format(&buffer.format().to_string_lossy())).is_some()
        };
        let shown = match Shown::by(object) {
            Ok(Shown::Buffer(buffer)) if is_wanted(&buffer) => return Ok(Self::Buffer(buffer)),
            Ok(Shown::Scalar) => return Err(wanted.wrong_shape(&[])),
            Err(interrupt) if !interrupt.is_instance_of::<PyException>(py) => {
                return Err(interrupt);
            }
            shown => shown,
        };
        // Which has more element types.
        if object.hasattr("__dlpack__")? {
            let tensor = Imported::take(object).map(Self::Tensor);
            return tensor.map_err(|cause| wanted.unreadable(py, "DLPack", cause));
        }
        if let Shown::Buffer(buffer) = shown.map_err(|e| wanted.unreadable(py, "a buffer", e))? {
            return Ok(Self::Buffer(buffer));
        }
        let (name, types) = (wanted.name, wanted.types());
        Err(PyTypeError::new_err(format!(
            "{name} must be a {types} array (NumPy, or any C-contiguous buffer or DLPack exporter), \
             not {}",
            object.get_type().name()?
        )))
    }
}

impl<'a, 'py> Foreign<'a, 'py> {
    /// Takes two objects at once. Two arrays, the usual case, are looked at without further ado.
    #[inline(always)]
    pub(in crate::python) fn pair(
        objects: [&'a Bound<'py, PyAny>; 2],
        wanted: [Wanted; 2],
    ) -> PyResult<(Self, Self)> {
        let [first, second] = objects;
        if let (Ok(first), Ok(second)) = (first.cast(), second.cast()) {
            wanted[0].meet(first);
            wanted[1].meet(second);
            return Ok((Self::of_array(first, &wanted[0])?, Self::of_array(second, &wanted[1])?));
        }
        Self::other_pair(objects, wanted)
    }

    #[inline(always)]
    fn of_array(array: &'a Bound<'py, PyUntypedArray>, wanted: &Wanted) -> PyResult<Self> {
        Ok(Self { memory: wanted.in_array(array)?, _owner: Owner::Caller(array) })
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
        self.memory.len
    }

    pub(in crate::python) fn nbytes(&self) -> usize {
        let itemsize = match self.memory.first {
            First::F32(_) => size_of::<f32>(),
            First::F16(_) => size_of::<f16>(),
            First::BF16(_) => size_of::<bf16>(),
        };
        self.memory.len * itemsize
    }

    /// The memory as something to copy from.
    pub(in crate::python) fn values(&self) -> Values<'_> {
        Values { memory: self.memory, _owner: PhantomData }
    }

    /// One token of an array of many.
    pub(in crate::python) fn token(&self, index: usize, width: usize) -> Values<'_> {
        let Memory { first, len } = self.memory;
        assert!(index < len / width, "the token is inside the array");
        let first = match first {
            // SAFETY: the assertion keeps it inside.
            First::F32(first) => First::F32(unsafe { first.add(index * width) }),
            // SAFETY: likewise.
            First::F16(first) => First::F16(unsafe { first.add(index * width) }),
            // SAFETY: likewise.
            First::BF16(first) => First::BF16(unsafe { first.add(index * width) }),
        };
        Values { memory: Memory { first, len: width }, _owner: PhantomData }
    }
}

/// Foreign memory that may be written.
pub(in crate::python) struct Room<'a, 'py>(Foreign<'a, 'py>);

impl<'a, 'py> Room<'a, 'py> {
    /// Takes two objects that offer such memory for writing.
    pub(in crate::python) fn pair(
        objects: [&'a Bound<'py, PyAny>; 2],
        names: [&'static str; 2],
        dtype: DType,
        [heads, dim]: [usize; 2],
    ) -> PyResult<(Self, Self)> {
        let tokens = Tokens::Room;
        let wanted = names.map(|name| Wanted { name, dtype, tokens, heads, dim });
        let (first, second) = Foreign::pair(objects, wanted)?;
        Ok((Self(first), Self(second)))
    }

    /// Takes what was opened for [`Tokens::Room`].
    pub(in crate::python) fn of(opened: Opened<'a, 'py>) -> PyResult<Self> {
        assert!(opened.wanted.tokens == Tokens::Room, "it was asked for memory to write to");
        opened.look().map(Self)
    }

    pub(in crate::python) fn len(&self) -> usize {
        self.0.len()
    }

    /// The memory as something to copy to.
    pub(in crate::python) fn values(&self) -> ValuesMut<'_> {
        ValuesMut { memory: self.0.memory, _owner: PhantomData }
    }
}

impl Wanted {
    /// `dtype`, if such elements go into the cache.
    #[inline]
    fn element_type(&self, dtype: Option<DType>) -> Option<DType> {
        dtype.filter(|&dtype| dtype == DType::F32 || dtype == self.dtype && !dtype.has_scales())
    }

    /// Does what an array could need before it is looked at, since it may run Python code.
    #[inline(always)]
    fn meet(&self, array: &Bound<'_, PyUntypedArray>) {
        if self.dtype == DType::BF16 && known_bfloat16(array.py()).is_none() {
            Self::meet_bfloat16(array);
        }
    }

    #[cold]
    fn meet_bfloat16(array: &Bound<'_, PyUntypedArray>) {
        if array.dtype().char() == BFLOAT16_LETTER {
            // If there is none, then the array is of another type with that letter.
            let _ = bfloat16(array.py());
        }
    }

    /// Where the elements of an array are, and how many. Runs no Python code.
    #[inline(always)]
    fn in_array(&self, array: &Bound<'_, PyUntypedArray>) -> PyResult<Memory> {
        // SAFETY: `array` is an array object, whose fields may be read while attached.
        let fields = unsafe { &(*array.as_array_ptr()).fields };
        // SAFETY: every array has a dtype object, and keeps it up to the last use here, before which no
        // Python code runs. Without a reference of its own, for with the stable ABI each is two calls.
        let descr = unsafe { Borrowed::from_ptr(array.py(), fields.descr.cast()) };
        // SAFETY: likewise.
        let descr = unsafe { descr.cast_unchecked::<PyArrayDescr>() };
        let Some(dtype) = self.element_type(of_descr(&descr)) else {
            return Err(self.wrong_dtype_object(&descr.to_owned()));
        };
        if !array.is_c_contiguous() {
            return Err(self.not_contiguous(array.strides()));
        }
        self.check(array.shape(), fields.flags & NPY_ARRAY_WRITEABLE != 0)?;
        self.place(fields.data.cast(), dtype, array.len())
    }

    fn in_buffer(&self, buffer: &PyUntypedBuffer) -> PyResult<Memory> {
        let format = buffer.format().to_string_lossy();
        let Some(dtype) = self.element_type(of_format(&format)) else {
            return Err(self.wrong_dtype(&format!("'{format}' (a struct format)")));
        };
        if !buffer.is_c_contiguous() {
            return Err(self.not_contiguous(buffer.strides()));
        }
        self.check(buffer.shape(), !buffer.readonly())?;
        self.place(buffer.buf_ptr().cast(), dtype, buffer.item_count())
    }

    fn in_tensor(&self, tensor: &Imported) -> PyResult<Memory> {
        let impossible = || {
            invalid(format!("{} have axes or strides that are negative or too large", self.name))
        };
        let found = tensor.look().map_err(|_| impossible())?;
        let Found { data, shape, strides, dtype, readonly } = found;
        let named = dtype.as_ref().map_or_else(Clone::clone, |dtype| dtype.name().to_owned());
        let Some(dtype) = self.element_type(dtype.ok()) else {
            return Err(self.wrong_dtype(&named));
        };
        let mut close = dtype.itemsize();
        for (&axis, &stride) in shape.iter().zip(&strides).rev() {
            // What is one long, or empty, is never stepped along.
            if axis > 1 && Ok(close) != usize::try_from(stride) && !shape.contains(&0) {
                return Err(self.not_contiguous(&strides));
            }
            close = close.saturating_mul(axis);
        }
        self.check(&shape, !readonly)?;
        let len = shape.iter().try_fold(1_usize, |len, &axis| len.checked_mul(axis));
        self.place(data, dtype, len.ok_or_else(impossible)?)
    }

    #[inline(always)]
    fn check(&self, shape: &[usize], writable: bool) -> PyResult<()> {
        let (heads, dim, width) = (self.heads, self.dim, self.width());
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
            return Err(self.readonly());
        }
        Ok(())
    }

    #[inline(always)]
    fn place(&self, data: *mut u8, dtype: DType, len: usize) -> PyResult<Memory> {
        // No elements need no place.
        let nowhere = NonNull::<f32>::dangling().as_ptr().cast();
        let data = if len == 0 && data.is_null() { nowhere } else { data };
        let first = match dtype {
            DType::F32 => aligned(data).map(First::F32),
            DType::F16 => aligned(data).map(First::F16),
            DType::BF16 => aligned(data).map(First::BF16),
            // Which is nothing without its scale.
            DType::I8 => None,
        };
        first.map(|first| Memory { first, len }).ok_or_else(|| self.misaligned(dtype))
    }

    /// Elements of one token. Without storage there may be more than a number can say, and then more
    /// than any array has.
    #[inline]
    fn width(&self) -> usize {
        self.heads.saturating_mul(self.dim)
    }

    /// The types that are taken.
    fn types(&self) -> String {
        match self.dtype {
            DType::F32 | DType::I8 => DType::F32.name().to_owned(),
            dtype => format!("{} or {}", dtype.name(), DType::F32.name()),
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
        let (name, types) = (self.name, self.types());
        let error = invalid(format!(
            "{name} can not be read as {types} in host memory through {through}: {cause}"
        ));
        error.set_cause(py, Some(cause));
        error
    }

    #[cold]
    fn misaligned(&self, dtype: DType) -> PyErr {
        let alignment = dtype.itemsize();
        invalid(format!("{} are not aligned to {alignment} bytes: pass a copy", self.name))
    }

    #[cold]
    fn wrong_dtype(&self, given: &str) -> PyErr {
        let (name, types) = (self.name, self.types());
        let advice = match self.dtype {
            DType::BF16 if given.contains("uint16") || given.contains("'H'") => {
                "if these are the bits of bfloat16, say so with .view(ml_dtypes.bfloat16)"
            }
            DType::I8 => {
                "an int8 cache finds the scales itself; convert them first, for example with \
                 .astype('float32')"
            }
            _ => "convert them first, for example with .astype('float32')",
        };
        invalid(format!("{name} have dtype {given}, but {types} is wanted: {advice}"))
    }

    #[cold]
    fn wrong_dtype_object(&self, given: &Bound<'_, PyArrayDescr>) -> PyErr {
        self.wrong_dtype(&given.to_string())
    }

    #[cold]
    fn readonly(&self) -> PyErr {
        invalid(format!("{} are read-only, and can not be written to", self.name))
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
        let (name, heads, dim, width) = (self.name, self.heads, self.dim, self.width());
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

/// What NumPy calls the type of `ml_dtypes.bfloat16`.
const BFLOAT16_LETTER: u8 = b'E';

/// The element type that a dtype of NumPy is, if it is one of a cache.
#[inline]
fn of_descr(descr: &Bound<'_, PyArrayDescr>) -> Option<DType> {
    // Cheaper than to compare with a dtype object.
    let dtype = match descr.char() {
        b'f' => DType::F32,
        b'e' => DType::F16,
        // Of `ml_dtypes`, or of somebody else who has taken the letter.
        BFLOAT16_LETTER
            if known_bfloat16(descr.py()).is_some_and(|bf16| bf16.num() == descr.num()) =>
        {
            DType::BF16
        }
        _ => return None,
    };
    (descr.is_native_byteorder() == Some(true)).then_some(dtype)
}

/// The element type that a format of the buffer protocol is. There is none for bfloat16.
fn of_format(format: &str) -> Option<DType> {
    match native(format) {
        "f" => Some(DType::F32),
        "e" => Some(DType::F16),
        _ => None,
    }
}

#[inline]
fn aligned<T>(data: *mut u8) -> Option<NonNull<T>> {
    NonNull::new(data.cast::<T>()).filter(|data| data.is_aligned())
}

/// A shape as Python writes it.
fn tuple(shape: &[usize]) -> String {
    let axes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("({}{})", axes.join(", "), if axes.len() == 1 { "," } else { "" })
}

fn invalid(message: String) -> PyErr {
    InvalidInputError::new_err((message,))
}
