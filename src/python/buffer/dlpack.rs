//! DLPack: tensors of other libraries, and capsules for them.
//!
//! NumPy knows no bfloat16, so that neither can go through it. The layouts are those of version 1.

#![expect(unsafe_code, reason = "the structures of DLPack")]

use std::ffi::{CStr, c_void};
use std::num::TryFromIntError;
use std::ptr::{self, NonNull};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::call::call;
use super::lease::{Layout, SpanMemory, Tensor};
use crate::dtype::DType;
use crate::memory::Run;
use crate::python::convert::with_room;

/// Device type and number of host memory.
pub(in crate::python) const CPU: (i32, i32) = (1, 0);

/// The version that is spoken.
const VERSION: Version = Version { major: 1, minor: 0 };
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";
const LEGACY: &CStr = c"dltensor";
const USED_LEGACY: &CStr = c"used_dltensor";

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Device {
    kind: i32,
    number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawTensor {
    data: *mut c_void,
    device: Device,
    num_axes: i32,
    data_type: DataType,
    axes: *mut i64,
    /// In elements; null for C order.
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensor`, of before version 1.
#[repr(C)]
#[derive(Debug)]
struct Legacy {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: RawTensor,
}

// Tensors of other libraries

/// A tensor that another library gave up, to be given back when it is dropped.
#[derive(Debug)]
pub(super) struct Imported(Taken);

/// # Invariants
///
/// The structure is valid, and nobody else calls its deleter.
#[derive(Debug)]
enum Taken {
    Legacy(NonNull<Legacy>),
    Versioned(NonNull<Versioned>),
}

/// Where an imported tensor lies, and what its elements are.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) data: *mut u8,
    pub(super) shape: Vec<usize>,
    /// In bytes.
    pub(super) strides: Vec<isize>,
    /// What it is called, if it is no element type of a cache.
    pub(super) dtype: Result<DType, String>,
    pub(super) readonly: bool,
}

impl Imported {
    /// Asks an object for its tensor, which may run Python code.
    pub(super) fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let nothing = PyTuple::empty(py);
        let device = call(&object.getattr("__dlpack_device__")?, &nothing, None)?;
        let device = device.extract::<(i32, i32)>()?;
        if device.0 != CPU.0 {
            return Err(PyBufferError::new_err(format!("it is on device {device:?}, not the CPU")));
        }
        let options = PyDict::new(py);
        options.set_item("max_version", (VERSION.major, VERSION.minor))?;
        let export = object.getattr("__dlpack__")?;
        let capsule = match call(&export, &nothing, Some(&options)) {
            // As from a library that is older than versions.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => call(&export, &nothing, None),
            other => other,
        };
        let capsule = capsule?;
        let capsule = capsule.cast::<PyCapsule>()?;
        if capsule.is_valid_checked(Some(VERSIONED)) {
            let managed = capsule.pointer_checked(Some(VERSIONED))?.cast::<Versioned>();
            // SAFETY: a capsule of this name has such a structure, of which this much is the same in
            // all versions.
            let version = unsafe { managed.as_ref() }.version;
            if version.major != VERSION.major {
                let Version { major, minor } = version;
                let message = format!("its DLPack version is {major}.{minor}, but 1 is wanted");
                return Err(PyBufferError::new_err(message));
            }
            mark_used(capsule, USED_VERSIONED)?;
            return Ok(Self(Taken::Versioned(managed)));
        }
        if capsule.is_valid_checked(Some(LEGACY)) {
            let managed = capsule.pointer_checked(Some(LEGACY))?.cast();
            mark_used(capsule, USED_LEGACY)?;
            return Ok(Self(Taken::Legacy(managed)));
        }
        Err(PyValueError::new_err("its capsule has another name than DLPack says"))
    }

    /// Where the tensor is. Runs no Python code.
    ///
    /// # Errors
    ///
    /// If its numbers are negative or too large.
    pub(super) fn look(&self) -> Result<Found, TryFromIntError> {
        let (tensor, readonly) = match &self.0 {
            // Whether it may be written can not be said before version 1.
            // SAFETY: the type's invariant.
            Taken::Legacy(managed) => (unsafe { managed.as_ref() }.tensor, true),
            Taken::Versioned(managed) => {
                // SAFETY: the type's invariant.
                let managed = unsafe { managed.as_ref() };
                // What is written to a copy nobody sees.
                (managed.tensor, managed.flags & (READ_ONLY | IS_COPIED) != 0)
            }
        };
        let num_axes = usize::try_from(tensor.num_axes)?;
        // SAFETY: there are as many axes, as long as this lives.
        let shape = unsafe { numbers(tensor.axes, num_axes) }.unwrap_or_default();
        let shape =
            shape.iter().map(|&axis| usize::try_from(axis)).collect::<Result<Vec<_>, _>>()?;
        let DataType { code, bits, lanes } = tensor.data_type;
        let itemsize = i64::from(bits.div_ceil(8)).saturating_mul(lanes.into());
        // SAFETY: likewise.
        let strides = unsafe { numbers(tensor.strides, num_axes) };
        let strides = strides.map_or_else(|| c_order(&shape), <[i64]>::to_vec);
        let in_bytes = |stride: i64| isize::try_from(stride.saturating_mul(itemsize));
        let offset = usize::try_from(tensor.byte_offset)?;
        Ok(Found {
            data: tensor.data.cast::<u8>().wrapping_add(offset),
            strides: strides.into_iter().map(in_bytes).collect::<Result<_, _>>()?,
            shape,
            dtype: element_type(code, bits, lanes),
            readonly,
        })
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        match self.0 {
            Taken::Legacy(managed) => {
                // SAFETY: the type's invariant.
                if let Some(delete) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: likewise; this is the one call.
                    unsafe { delete(managed.as_ptr()) };
                }
            }
            Taken::Versioned(managed) => {
                // SAFETY: the type's invariant.
                if let Some(delete) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: likewise; this is the one call.
                    unsafe { delete(managed.as_ptr()) };
                }
            }
        }
    }
}

/// Says to everybody else that the tensor is taken.
fn mark_used(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: it is a capsule, and the name lives for ever.
    let failed = unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) };
    if failed == 0 { Ok(()) } else { Err(PyErr::fetch(capsule.py())) }
}

/// # Safety
///
/// `first` is null, or the first of `len` numbers that stay as they are during `'a`.
unsafe fn numbers<'a>(first: *const i64, len: usize) -> Option<&'a [i64]> {
    if first.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { slice::from_raw_parts(first, len) })
}

/// Strides of elements that lie close together.
fn c_order(shape: &[usize]) -> Vec<i64> {
    let mut stride = 1_i64;
    let mut strides = vec![0; shape.len()];
    for (place, &axis) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        stride = stride.saturating_mul(i64::try_from(axis).unwrap_or(i64::MAX));
    }
    strides
}

fn element_type(code: u8, bits: u8, lanes: u16) -> Result<DType, String> {
    if let Some(dtype) =
        ELEMENT_TYPES.into_iter().find(|&dtype| data_type(dtype) == DataType { code, bits, lanes })
    {
        return Ok(dtype);
    }
    let kind = match code {
        0 => "int",
        1 => "uint",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => return Err("bool".to_owned()),
        _ => return Err(format!("(DLPack type {code} of {bits} bits)")),
    };
    let lanes = if lanes == 1 { String::new() } else { format!(" x {lanes}") };
    Err(format!("{kind}{bits}{lanes}"))
}

const ELEMENT_TYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I8];

fn data_type(dtype: DType) -> DataType {
    let (code, bits) = match dtype {
        DType::F32 => (2, 32),
        DType::F16 => (2, 16),
        DType::BF16 => (4, 16),
        DType::I8 => (0, 8),
    };
    DataType { code, bits, lanes: 1 }
}

// Capsules for other libraries

/// What a consumer gets: a managed tensor, and behind it all that it points to.
#[repr(C)]
struct Export<M> {
    /// First, so that a pointer to it is one to the whole.
    managed: M,
    axes: [i64; 3],
    strides: [i64; 3],
    keeper: Keeper,
}

/// What keeps the memory of an export.
#[expect(dead_code, reason = "it is held and dropped, and never looked at")]
enum Keeper {
    Memory(Py<SpanMemory>),
    Copy(Vec<u64>),
}

/// How a consumer wants its capsule.
#[derive(Clone, Copy, Debug)]
pub(in crate::python) struct Request {
    is_versioned: bool,
    pub(in crate::python) wants_copy: bool,
}

impl Request {
    /// Of what DLPack passes to an exporter of host memory.
    ///
    /// # Errors
    ///
    /// `BufferError` for a stream and for another device.
    pub(in crate::python) fn new(
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Self> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream must be None for memory of the CPU"));
        }
        if let Some(device) = dl_device.filter(|&device| device != CPU) {
            return Err(PyBufferError::new_err(format!(
                "the memory is on device {CPU:?}, the CPU, and can not be exported to {device:?}"
            )));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= VERSION.major);
        Ok(Self { is_versioned, wants_copy: copy == Some(true) })
    }

    /// A capsule of a tensor, or of a copy of it.
    ///
    /// # Errors
    ///
    /// `BufferError` for read-only memory to a consumer who could not know.
    pub(in crate::python) fn export(self, tensor: Tensor<'_>) -> PyResult<Bound<'_, PyAny>> {
        let (py, layout) = (tensor.memory.py(), tensor.layout);
        if self.wants_copy {
            return self.export_copy(py, layout, &[tensor]);
        }
        if layout.readonly && !self.is_versioned {
            return Err(PyBufferError::new_err(
                "the memory is read-only, which DLPack can not say before version 1.0: pass \
                 max_version=(1, 0), or copy=True for a copy of your own",
            ));
        }
        let flags = if layout.readonly { READ_ONLY } else { 0 };
        let keeper = Keeper::Memory(tensor.memory.unbind());
        self.capsule(py, tensor.data, &layout, keeper, flags)
    }

    /// A capsule of a copy of tensors, one after the other; `layout` is that of the whole.
    pub(in crate::python) fn export_copy<'py>(
        self,
        py: Python<'py>,
        layout: Layout,
        segments: &[Tensor<'py>],
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut words = copied(py, &layout, segments)?;
        let data = NonNull::from(words.as_mut_slice()).cast();
        self.capsule(py, data, &layout, Keeper::Copy(words), IS_COPIED)
    }

    fn capsule<'py>(
        self,
        py: Python<'py>,
        data: NonNull<u8>,
        layout: &Layout,
        keeper: Keeper,
        flags: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tensor = RawTensor {
            data: data.as_ptr().cast(),
            device: Device { kind: CPU.0, number: CPU.1 },
            num_axes: i32::try_from(layout.axes().len())?,
            data_type: data_type(layout.dtype),
            axes: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let context = ptr::null_mut();
        if self.is_versioned {
            let deleter = Some(Versioned::DELETER);
            let managed = Versioned { version: VERSION, context, deleter, flags, tensor };
            Export::new(managed, layout, keeper)?.into_capsule(py)
        } else {
            let managed = Legacy { tensor, context, deleter: Some(Legacy::DELETER) };
            Export::new(managed, layout, keeper)?.into_capsule(py)
        }
    }
}

/// A structure that a capsule can hold.
trait Managed: Sized {
    /// Of the capsule, until it is taken.
    const NAME: &'static CStr;

    const DELETER: unsafe extern "C" fn(*mut Self) = delete::<Self>;

    fn tensor(&mut self) -> &mut RawTensor;
}

impl Managed for Legacy {
    const NAME: &'static CStr = LEGACY;

    fn tensor(&mut self) -> &mut RawTensor {
        &mut self.tensor
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = VERSIONED;

    fn tensor(&mut self) -> &mut RawTensor {
        &mut self.tensor
    }
}

impl<M: Managed> Export<M> {
    fn new(managed: M, layout: &Layout, keeper: Keeper) -> PyResult<Box<Self>> {
        let shape = layout.axes().iter().map(|&axis| usize::try_from(axis));
        let shape = shape.collect::<Result<Vec<_>, _>>()?;
        let (mut axes, mut strides) = ([0; 3], [0; 3]);
        for (place, &axis) in axes.iter_mut().zip(&shape) {
            *place = i64::try_from(axis)?;
        }
        strides[..shape.len()].copy_from_slice(&c_order(&shape));
        Ok(Box::new(Self { managed, axes, strides, keeper }))
    }

    /// From here on the memory is the capsule's, or that of the consumer who takes it.
    fn into_capsule(self: Box<Self>, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let export = Box::into_raw(self);
        // SAFETY: it is nobody else's yet.
        let whole = unsafe { &mut *export };
        let (axes, strides) = (whole.axes.as_mut_ptr(), whole.strides.as_mut_ptr());
        let tensor = whole.managed.tensor();
        (tensor.axes, tensor.strides) = (axes, strides);
        // SAFETY: the pointer is not null, and the name lives for ever.
        let capsule =
            unsafe { ffi::PyCapsule_New(export.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
        // SAFETY: it is a new reference, or null with an exception set.
        let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
        if capsule.is_err() {
            // SAFETY: there is no capsule that does it.
            unsafe { delete(export.cast::<M>()) };
        }
        capsule
    }
}

/// What consumers call, from any thread, attached or not.
///
/// # Safety
///
/// `managed` is the first part of an [`Export`] that is not deleted.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the caller's promise. The export was a box.
    let mut export = Some(unsafe { Box::from_raw(managed.cast::<Export<M>>()) });
    // At exit nobody can attach. Then the memory stays, which is about to end anyway.
    Python::try_attach(|_| drop(export.take()));
    std::mem::forget(export);
}

/// What the interpreter calls when a capsule goes, whether or not a consumer took what is in it.
///
/// # Safety
///
/// `capsule` is one of an [`Export`], and the thread is attached.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // Under another name the consumer has it.
    // SAFETY: it is a capsule. The check raises nothing.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: the capsule has this name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: nobody took it, so that nobody else deletes it.
    unsafe { delete(managed.cast::<M>()) };
}

/// The elements of all segments, which together have this layout, in as many words as it takes.
fn copied(py: Python<'_>, layout: &Layout, segments: &[Tensor<'_>]) -> PyResult<Vec<u64>> {
    let num_bytes = usize::try_from(layout.nbytes())?;
    let num_words = num_bytes.div_ceil(size_of::<u64>());
    let mut words = with_room(num_words)?;
    let runs = segments.iter().map(|segment| {
        let num_bytes = usize::try_from(segment.layout.nbytes())?;
        // SAFETY: the tensor is readable as long as its memory is held, which the caller does.
        Ok(unsafe { Run::from_raw(segment.data, num_bytes) })
    });
    let runs = runs.collect::<PyResult<Vec<_>>>()?;
    py.detach(|| {
        words.resize(num_words, 0);
        let mut rest = bytemuck::cast_slice_mut(&mut words);
        for run in runs {
            let done = run.copy(rest).len();
            rest = &mut rest[done..];
        }
    });
    Ok(words)
}
