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
                    object.repr()?
                ),)))
            }
            Err(error) => Err(error),
        }
    }
}

/// How long to wait, in seconds: a number that is 0 or more, infinity included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seconds(pub(super) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds = object.extract::<f64>().map_err(|_| {
            PyTypeError::new_err(format!("timeout must be a number of seconds, not {object:?}"))
        })?;
        if seconds.is_nan() || seconds < 0.0 {
            return Err(InvalidInputError::new_err((format!(
                "timeout must be 0 or more seconds, but it is {seconds}"
            ),)));
        }
        Ok(Self(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
    }
}
