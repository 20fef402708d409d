//! What a sequence is besides its tokens.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyMapping, PySequence, PyString};

use crate::manager::RequestOptions;
use crate::python::convert::{in_range, push, type_name};
use crate::python::error::InvalidInputError;

/// Text or bytes, as bytes.
#[derive(Debug)]
pub(super) struct TextOrBytes(pub(super) Vec<u8>);

impl<'py> FromPyObject<'_, 'py> for TextOrBytes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self(text.to_str()?.as_bytes().to_vec()));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self(bytes.as_bytes().to_vec()));
        }
        let given = type_name(&object);
        Err(PyTypeError::new_err(format!("a str or bytes is wanted, not {given}")))
    }
}

/// The name of a request is text, if there is one.
pub(super) fn request_id<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
    object.extract().map_err(|error| no_text("request_id", object, error, ""))
}

/// A salt is text, if there is one.
pub(super) fn cache_salt<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
    object.extract().map_err(|error| no_text("cache_salt", object, error, ""))
}

/// An adapter is named by text, if there is one.
pub(super) fn lora_id<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
    object.extract().map_err(|error| no_text("lora_id", object, error, lora_id_hint(object)))
}

/// What to do with the number of an adapter.
pub(super) fn lora_id_hint(object: &Bound<'_, PyAny>) -> &'static str {
    if object.is_instance_of::<PyInt>() { ": pass str(id)" } else { "" }
}

fn no_text(name: &str, object: &Bound<'_, PyAny>, error: PyErr, hint: &str) -> PyErr {
    if !error.is_instance_of::<PyTypeError>(object.py()) {
        return error;
    }
    PyTypeError::new_err(format!("{name} must be str or None, not {}{hint}", type_name(object)))
}

/// The index of a block and its keys, for some blocks in ascending order.
#[derive(Debug, Default)]
pub(super) struct ExtraKeys(Vec<(usize, Vec<Vec<u8>>)>);

impl<'py> FromPyObject<'_, 'py> for ExtraKeys {
    type Error = PyErr;

    /// Takes a mapping, in any order, or an iterable of pairs, in ascending order.
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let is_mapping = object.is_instance_of::<PyDict>() || object.is_instance_of::<PyMapping>();
        let entries = if is_mapping { object.call_method0("items")? } else { object.to_owned() };
        let mut all: Vec<(usize, Vec<Vec<u8>>)> = Vec::new();
        for entry in entries.try_iter()? {
            let entry = entry?;
            let (index, keys) = pair(&entry)?;
            let index = block_index(&index)?;
            let last = all.last().map(|&(last, _)| last).filter(|_| !is_mapping);
            if let Some(last) = last.filter(|&last| last >= index) {
                let fault = if last == index { "twice" } else { "out of order" };
                return Err(InvalidInputError::new_err((format!(
                    "the extra keys of block {index} are given {fault}: after those of block \
                     {last}, but they must come in ascending order"
                ),)));
            }
            push(py, &mut all, (index, keys_of(&keys, index)?))?;
        }
        all.sort_unstable_by_key(|&(index, _)| index);
        Ok(Self(all))
    }
}

fn pair<'py>(entry: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    match entry.cast::<PySequence>() {
        Ok(pair) if pair.len()? == 2 => Ok((pair.get_item(0)?, pair.get_item(1)?)),
        _ => Err(PyTypeError::new_err(format!(
            "extra keys are pairs of a block index and a list of its keys, not {}",
            type_name(entry)
        ))),
    }
}

fn block_index(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    in_range(object.as_borrowed(), |given| {
        InvalidInputError::new_err((format!(
            "the block index of extra keys is {given}, but it must be 0 or more, and fit 64 bits"
        ),))
    })
}

fn keys_of(object: &Bound<'_, PyAny>, index: usize) -> PyResult<Vec<Vec<u8>>> {
    let mut keys = Vec::new();
    // Which are sequences as well, of what is no key.
    if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
        let given = type_name(object);
        return Err(PyTypeError::new_err(format!(
            "the extra keys of block {index} must be a list of str or bytes, not one {given}"
        )));
    }
    for key in object.try_iter()? {
        let key = key?;
        let TextOrBytes(key) = key.extract().map_err(|error: PyErr| {
            if !error.is_instance_of::<PyTypeError>(key.py()) {
                return error;
            }
            let given = type_name(&key);
            PyTypeError::new_err(format!(
                "the extra keys of block {index} must be str or bytes, not {given}"
            ))
        })?;
        push(object.py(), &mut keys, key)?;
    }
    Ok(keys)
}

/// [`RequestOptions`] with a share of their own in everything but the texts.
#[derive(Debug, Default)]
pub(super) struct Options<'a> {
    pub(super) request_id: Option<&'a str>,
    pub(super) cache_salt: Option<&'a str>,
    pub(super) lora_id: Option<&'a str>,
    pub(super) extra_keys: Option<ExtraKeys>,
    pub(super) lookahead: usize,
}

impl Options<'_> {
    /// Calls `call` with what the core wants.
    pub(super) fn with<R>(&self, call: impl FnOnce(&RequestOptions<'_>) -> R) -> R {
        let entries = self.extra_keys.as_ref().map_or(&[][..], |extra_keys| &extra_keys.0);
        let keys = entries.iter().map(|(_, keys)| keys.iter().map(Vec::as_slice).collect());
        let keys = keys.collect::<Vec<Vec<_>>>();
        let extra_keys = entries.iter().zip(&keys).map(|((index, _), keys)| (*index, &keys[..]));
        let extra_keys = extra_keys.collect::<Vec<_>>();
        call(&RequestOptions {
            request_id: self.request_id,
            cache_salt: self.cache_salt.map(str::as_bytes),
            lora_id: self.lora_id.map(str::as_bytes),
            extra_keys: &extra_keys,
            lookahead: self.lookahead,
        })
    }
}
