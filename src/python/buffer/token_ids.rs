//! Token ids and block ids: arrays of integers, and sequences of them.

#![expect(unsafe_code, reason = "foreign memory is reached through raw pointers only")]

use std::ptr::NonNull;

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyException, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PySequence, PyString, PyTuple};

use super::call::call;
use super::memoryview::{Shown, native};
use crate::ids::widen;
use crate::memory::Run;
use crate::python::convert::{number, push, type_name, with_room};
use crate::python::error::{InvalidInputError, KvCacheError};
use crate::python::patience::is_long_copy;

/// The token ids of a sequence, as a copy of what a caller gave: any C-contiguous memory of int32,
/// uint32 or int64, or, at a cost for each, a Python sequence of integers.
#[derive(Debug)]
pub(in crate::python) struct TokenIds(pub(in crate::python) Vec<u32>);

impl<'py> FromPyObject<'_, 'py> for TokenIds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        ids(&object, "token").map(Self)
    }
}

/// As many numbers of `noun`s as a caller gave; see [`TokenIds`].
pub(in crate::python) fn ids(object: &Bound<'_, PyAny>, noun: &'static str) -> PyResult<Vec<u32>> {
    if let Some(ids) = in_memory(object, noun, Axes::One)? {
        return Ok(ids.ids);
    }
    let is_text = object.is_instance_of::<PyString>();
    if is_list(object) || object.is_instance_of::<PySequence>() && !is_text {
        return in_sequence(object, noun);
    }
    Err(PyTypeError::new_err(format!(
        "{noun}s must be an array of int32, uint32 or int64 (NumPy, or any C-contiguous buffer or \
         DLPack exporter), or a sequence of integers, not {}",
        type_name(object)
    )))
}

/// The ids of many sequences, each of which has as many.
#[derive(Debug)]
pub(in crate::python) struct IdRows {
    ids: Vec<u32>,
    num_rows: usize,
    width: usize,
}

impl IdRows {
    /// What lies in memory with an axis for the sequences, and perhaps one for the ids of each; `None`
    /// if `object` is no memory.
    pub(in crate::python) fn of_memory(
        object: &Bound<'_, PyAny>,
        noun: &'static str,
    ) -> PyResult<Option<Self>> {
        in_memory(object, noun, Axes::OneOrTwo)
    }

    pub(in crate::python) fn len(&self) -> usize {
        self.num_rows
    }

    /// The ids of a sequence that there are some for.
    pub(in crate::python) fn row(&self, index: usize) -> &[u32] {
        &self.ids[index * self.width..(index + 1) * self.width]
    }
}

/// How many axes ids may have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Axes {
    One,
    OneOrTwo,
}

fn is_list(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>()
}

fn in_memory(
    object: &Bound<'_, PyAny>,
    noun: &'static str,
    axes: Axes,
) -> PyResult<Option<IdRows>> {
    let py = object.py();
    if let Ok(array) = object.cast::<PyUntypedArray>() {
        return in_array(array, noun, axes).map(Some);
    }
    if is_list(object) {
        return Ok(None);
    }
    match Shown::by(object).map_err(|error| unreadable(py, noun, error))? {
        Shown::Buffer(buffer) => return in_buffer(&buffer, py, noun, axes).map(Some),
        Shown::Scalar => return Err(wrong_axes(&[], noun, axes)),
        Shown::Nothing => {}
    }
    if object.hasattr("__dlpack__")? {
        let from_dlpack = py.import("numpy")?.getattr("from_dlpack")?;
        let array = call(&from_dlpack, &PyTuple::new(py, [object])?, None);
        let array = array.map_err(|error| unreadable(py, noun, error))?;
        return in_array(array.cast()?, noun, axes).map(Some);
    }
    Ok(None)
}

fn in_array(array: &Bound<'_, PyUntypedArray>, noun: &'static str, axes: Axes) -> PyResult<IdRows> {
    let dtype = array.dtype();
    let kind = Kind::of(dtype.kind(), dtype.itemsize())
        .filter(|_| dtype.is_native_byteorder() == Some(true))
        .ok_or_else(|| wrong_dtype(noun, &dtype.to_string()))?;
    let [num_rows, width] = check_shape(array.shape(), array.is_c_contiguous(), noun, axes)?;
    // SAFETY: `array` is an array object, whose fields may be read while attached.
    let fields = unsafe { &(*array.as_array_ptr()).fields };
    // SAFETY: the array has as many elements of that kind, and is held.
    let ids = unsafe { read(array.py(), fields.data.cast(), array.len(), kind, noun) }?;
    Ok(IdRows { ids, num_rows, width })
}

fn in_buffer(
    buffer: &PyUntypedBuffer,
    py: Python<'_>,
    noun: &'static str,
    axes: Axes,
) -> PyResult<IdRows> {
    let format = buffer.format().to_string_lossy();
    let kind = match native(&format) {
        "i" | "l" | "q" => Kind::of(b'i', buffer.item_size()),
        "I" | "L" => Kind::of(b'u', buffer.item_size()),
        _ => None,
    };
    let kind = kind.ok_or_else(|| wrong_dtype(noun, &format!("'{format}' (a struct format)")))?;
    let [num_rows, width] = check_shape(buffer.shape(), buffer.is_c_contiguous(), noun, axes)?;
    // SAFETY: the buffer has as many elements of that kind, and is held.
    let ids = unsafe { read(py, buffer.buf_ptr().cast(), buffer.item_count(), kind, noun) }?;
    Ok(IdRows { ids, num_rows, width })
}

fn in_sequence(object: &Bound<'_, PyAny>, noun: &'static str) -> PyResult<Vec<u32>> {
    match object.cast_exact::<PyList>() {
        // Without an iterator of Python's, which is an object to make and to drop.
        Ok(list) => in_items(object.py(), list.iter().map(Ok), noun),
        Err(_) => in_items(object.py(), object.try_iter()?, noun),
    }
}

fn in_items<'py>(
    py: Python<'py>,
    items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
    noun: &'static str,
) -> PyResult<Vec<u32>> {
    let mut ids = Vec::new();
    for (position, item) in items.enumerate() {
        let item = item?;
        let id = item.extract::<u32>().map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(py) {
                out_of_range(noun, position, &number(&item))
            } else if error.is_instance_of::<PyTypeError>(py) {
                let given = type_name(&item);
                PyTypeError::new_err(format!("{noun} {position} must be an integer, not {given}"))
            } else {
                error
            }
        });
        push(py, &mut ids, id?)?;
    }
    Ok(ids)
}

/// The kinds of integers that ids come as.
#[derive(Clone, Copy)]
enum Kind {
    I32,
    U32,
    I64,
}

impl Kind {
    /// By what NumPy calls the kind, and the bytes of an element.
    fn of(kind: u8, itemsize: usize) -> Option<Self> {
        match (kind, itemsize) {
            (b'i', 4) => Some(Self::I32),
            (b'u', 4) => Some(Self::U32),
            (b'i', 8) => Some(Self::I64),
            _ => None,
        }
    }
}

/// An i64 as its two halves.
type Halves = [u32; 2];
const LOW: usize = if cfg!(target_endian = "little") { 0 } else { 1 };
const HIGH: usize = 1 - LOW;
/// How many are looked at together.
const CHUNK: usize = 128;

/// Copies the ids, and checks the copy.
///
/// # Safety
///
/// `data` is null, or readable for `len` elements of that kind during the call.
unsafe fn read(
    py: Python<'_>,
    data: *mut u32,
    len: usize,
    kind: Kind,
    noun: &'static str,
) -> PyResult<Vec<u32>> {
    let Some(data) = NonNull::new(data).filter(|_| len > 0) else { return Ok(Vec::new()) };
    if !data.is_aligned() {
        return Err(invalid(format!("{noun}s are not aligned: pass a copy")));
    }
    let mut ids = with_room(len)?;
    let copied = match kind {
        Kind::I32 | Kind::U32 => {
            // SAFETY: the caller's promise.
            let run = unsafe { Run::from_raw(data, len) };
            let largest = if let Kind::I32 = kind { i32::MAX.cast_unsigned() } else { u32::MAX };
            attached_if_short(py, len, || narrow(run, largest, &mut ids))
        }
        Kind::I64 => {
            // SAFETY: the caller's promise; halves are aligned as their elements are.
            let run = unsafe { Run::from_raw(data.cast::<Halves>(), len) };
            attached_if_short(py, len, || wide(run, &mut ids))
        }
    };
    copied.map_err(|(position, value)| out_of_range(noun, position, &value.to_string()))?;
    Ok(ids)
}

fn attached_if_short<R: Send>(py: Python<'_>, len: usize, call: impl FnOnce() -> R + Send) -> R {
    if is_long_copy(len.saturating_mul(size_of::<Halves>())) { py.detach(call) } else { call() }
}

/// Fails with the position and the value of what is no id.
type Copied = Result<(), (usize, i64)>;

/// Appends copies of numbers of 32 bits, which must be no larger than `largest`.
fn narrow(run: Run<'_, u32>, largest: u32, ids: &mut Vec<u32>) -> Copied {
    let mut scratch = [0; CHUNK];
    for chunk in run.chunks(CHUNK) {
        let some = chunk.copy(&mut scratch);
        // All of them together, since the usual case has none to stop at.
        if some.iter().fold(0, |so_far, &id| id.max(so_far)) > largest {
            let place = some.iter().take_while(|&&id| id <= largest).count();
            return Err((ids.len() + place, some[place].cast_signed().into()));
        }
        ids.extend_from_slice(some);
    }
    Ok(())
}

/// Appends copies of numbers of 64 bits, whose upper halves must be 0.
fn wide(run: Run<'_, Halves>, ids: &mut Vec<u32>) -> Copied {
    let mut scratch = [Halves::default(); CHUNK];
    for chunk in run.chunks(CHUNK) {
        let halves = chunk.copy(&mut scratch);
        if halves.iter().fold(0, |so_far, half| half[HIGH] | so_far) != 0 {
            let place = halves.iter().take_while(|half| half[HIGH] == 0).count();
            return Err((ids.len() + place, bytemuck::cast(halves[place])));
        }
        ids.extend(halves.iter().map(|half| half[LOW]));
    }
    Ok(())
}

/// Returns the number of rows, and that of the ids of a row.
fn check_shape(
    shape: &[usize],
    is_contiguous: bool,
    noun: &'static str,
    axes: Axes,
) -> PyResult<[usize; 2]> {
    let rows = match *shape {
        [len] => [len, 1],
        [num_rows, width] if axes == Axes::OneOrTwo => [num_rows, width],
        _ => return Err(wrong_axes(shape, noun, axes)),
    };
    if !is_contiguous {
        return Err(invalid(format!(
            "{noun}s are not C-contiguous: pass np.ascontiguousarray of them"
        )));
    }
    Ok(rows)
}

fn wrong_axes(shape: &[usize], noun: &'static str, axes: Axes) -> PyErr {
    let wanted = match axes {
        Axes::One => "one is wanted: those of one sequence",
        Axes::OneOrTwo => "[sequences] or [sequences, tokens] is wanted",
    };
    let axes = shape.len();
    invalid(format!("{noun}s have {axes} axes ({shape:?}), but {wanted}"))
}

fn out_of_range(noun: &'static str, position: usize, value: &str) -> PyErr {
    let largest = widen(u32::MAX);
    invalid(format!("{noun} {position} is {value}, but it must be 0 to {largest}"))
}

fn wrong_dtype(noun: &'static str, given: &str) -> PyErr {
    invalid(format!(
        "{noun}s have dtype {given}, but int32, uint32 or int64 is wanted: convert them first, for \
         example with .astype('int64')"
    ))
}

/// The error for an exporter that failed. Our own errors, and what is no error, such as
/// `KeyboardInterrupt`, pass as they are.
fn unreadable(py: Python<'_>, noun: &'static str, cause: PyErr) -> PyErr {
    if !cause.is_instance_of::<PyException>(py) || cause.is_instance_of::<KvCacheError>(py) {
        return cause;
    }
    let error = invalid(format!("{noun}s can not be read as integers in host memory: {cause}"));
    error.set_cause(py, Some(cause));
    error
}

fn invalid(message: String) -> PyErr {
    InvalidInputError::new_err((message,))
}
