//! Python values that become plain Rust ones.

use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyIterator};

use super::error::{InvalidInputError, LayerOutOfRangeError, OutOfRangeError};
use crate::error::{KvError, Result};
use crate::handle::check_count;

/// A position or a number of tokens: any object with `__index__`, zero or more.
#[derive(Clone, Copy, Debug)]
pub(super) struct NumTokens(pub(super) usize);

impl<'py> FromPyObject<'_, 'py> for NumTokens {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let tokens = in_range(object, |given| {
            OutOfRangeError::new_err((format!(
                "{given} is no position or number of tokens: it must be 0 or more, and fit 64 bits"
            ),))
        });
        tokens.map(Self)
    }
}

/// The number of a layer: any object with `__index__`, zero or more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer(pub(super) usize);

impl<'py> FromPyObject<'_, 'py> for Layer {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let layer = in_range(object, |given| {
            LayerOutOfRangeError::new_err((format!(
                "{given} is no layer: the first is 0, and there are fewer than 2**64"
            ),))
        });
        layer.map(Self)
    }
}

/// How an error calls the type of an object.
pub(super) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "another object".to_owned(), |name| name.to_string())
}

/// Any object with `__index__`, as a number; `error` is that of one that is negative or too large.
pub(super) fn in_range<'a, 'py, N: FromPyObject<'a, 'py, Error = PyErr>>(
    object: Borrowed<'a, 'py, PyAny>,
    error: impl FnOnce(String) -> PyErr,
) -> PyResult<N> {
    object.extract::<N>().map_err(|cause| {
        let is_outside = cause.is_instance_of::<PyOverflowError>(object.py());
        if is_outside { error(number(&object)) } else { cause }
    })
}

/// How an error writes a number of any size. (Python refuses to write a very long one.)
pub(super) fn number(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| "a number of thousands of digits".to_owned(), |r| r.to_string())
}

/// How long to wait, in seconds: a number that is 0 or more, infinity included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seconds(pub(super) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds =
            match object.extract::<f64>() {
                Ok(seconds) => seconds,
                Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
                    let given = object.get_type().name()?;
                    let message = format!("timeout must be a number of seconds, not {given}");
                    return Err(PyTypeError::new_err(message));
                }
                // More than a float can hold.
                Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                    if object.lt(0)? { f64::NEG_INFINITY } else { f64::INFINITY }
                }
                Err(error) => return Err(error),
            };
        if seconds.is_nan() || seconds < 0.0 {
            return Err(InvalidInputError::new_err((format!(
                "timeout must be 0 or more seconds, but it is {seconds}"
            ),)));
        }
        Ok(Self(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
    }
}

/// The elements of an array or any other iterable of integers.
pub(super) fn positions_of(positions: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    positions_in(&positions.try_iter()?)
}

fn positions_in(positions: &Bound<'_, PyIterator>) -> PyResult<Vec<usize>> {
    let py = positions.py();
    let mut numbers = Vec::new();
    for (index, token) in positions.try_iter()?.enumerate() {
        let token: PyResult<NumTokens> = token?.extract();
        push(py, &mut numbers, token.map_err(|error| in_entry(py, index, error))?.0)?;
    }
    Ok(numbers)
}

/// Appends what comes out of an iterator that may never end.
pub(super) fn push<T>(py: Python<'_>, items: &mut Vec<T>, item: T) -> PyResult<()> {
    // Seldom enough to look for Ctrl-C, and often enough for it. Not when there is no room for more:
    // that comes later each time.
    if items.len().is_multiple_of(1 << 16) {
        py.check_signals()?;
    }
    if items.len() == items.capacity() {
        let bytes = size_of_val(items.as_slice()).saturating_mul(2);
        items.try_reserve(16).map_err(|_| KvError::OutOfMemory { bytes })?;
    }
    items.push(item);
    Ok(())
}

/// An empty list with room for so many items.
pub(super) fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let (mut items, bytes) = (Vec::new(), len.saturating_mul(size_of::<T>()));
    items.try_reserve_exact(len).map_err(|_| KvError::OutOfMemory { bytes })?;
    Ok(items)
}

/// Says in `error` which entry of a batch it is about.
pub(super) fn in_entry(py: Python<'_>, index: usize, error: PyErr) -> PyErr {
    // If that fails, nothing but the note is lost.
    let _ = error.add_note(py, format!("in entry {index} of the batch"));
    error
}

/// One number for all sequences, or one for each.
#[derive(Debug)]
pub(super) enum Numbers {
    All(usize),
    Each(Vec<usize>),
}

impl<'py> FromPyObject<'_, 'py> for Numbers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let all = || object.extract().map(|NumTokens(number)| Self::All(number));
        if object.is_instance_of::<PyInt>() {
            return all();
        }
        match object.try_iter() {
            Ok(positions) => positions_in(&positions).map(Self::Each),
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => all(),
            Err(error) => Err(error),
        }
    }
}

impl Numbers {
    pub(super) fn check_count(
        &self,
        what: &'static str,
        num_sequences: usize,
    ) -> Result<(), KvError> {
        match self {
            Self::All(_) => Ok(()),
            Self::Each(numbers) => check_count(what, numbers.len(), num_sequences),
        }
    }

    /// Of a sequence that there is one for.
    pub(super) fn get(&self, index: usize) -> usize {
        match self {
            Self::All(number) => *number,
            Self::Each(numbers) => numbers[index],
        }
    }
}
