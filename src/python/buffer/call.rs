//! Calls of Python code that may go on until the interpreter ends.

#![expect(unsafe_code, reason = "the C API, from which a thread may not come back")]

use std::hint::black_box;
use std::mem;
use std::ptr;
use std::thread;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

type Call = unsafe extern "C" fn(
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;
type UnwindingCall = unsafe extern "C-unwind" fn(
    *mut ffi::PyObject,
    *mut ffi::PyObject,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

/// Calls `callable`, for as long as that takes.
///
/// At exit, a daemon thread that wants the interpreter back never gets it. Before version 3.14 Python
/// ends the thread on the spot, by unwinding its stack; but the callers in here would use the
/// interpreter on the way, and crash. So the thread sleeps instead, as it does since 3.14.
pub(in crate::python) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the types differ in that the one may unwind, which is what the function does.
    let function = unsafe { mem::transmute::<Call, UnwindingCall>(ffi::PyObject_Call) };
    // The compiler, which knows the function as one that does not unwind, must not know that it is it.
    let function = black_box(function);
    let options = options.map_or(ptr::null_mut(), Bound::as_ptr);
    let at_exit = SleepForEver;
    // SAFETY: this thread is attached; the objects are held, and of the types that are wanted.
    let result = unsafe { function(callable.as_ptr(), arguments.as_ptr(), options) };
    mem::forget(at_exit);
    // SAFETY: it is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// Dropped only if the stack is unwound.
struct SleepForEver;

impl Drop for SleepForEver {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}
