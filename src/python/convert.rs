//! Python values that become plain Rust ones.

use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use super::error::{InvalidInputError, OutOfRangeError};

/// A position or a number of tokens: any object with `__index__`, zero or more.
#[derive(Clone, Copy, Debug)]
pub(super) struct NumTokens(pub(super) usize);

impl<'py> FromPyObject<'_, 'py> for NumTokens {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<usize>() {
            Ok(tokens) => Ok(Self(tokens)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Err(OutOfRangeError::new_err((format!(
                    "{} is no position or number of tokens: it must be 0 or more, and fit 64 bits",
                    number(&object)
                ),)))
            }
            Err(error) => Err(error),
        }
    }
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
