//! `KeyChain`, and what sequences are started with.

#![expect(clippy::needless_pass_by_value, reason = "arguments from Python are extracted by value")]

use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::options::Options;
use crate::hash::KeyChain;
use crate::manager::Prompt;
use crate::python::buffer::TokenIds;
use crate::python::error::InvalidInputError;

/// The tokens of a sequence and the keys of its full blocks.
///
/// Made by ``KvCacheManager.block_keys``, for calls that would otherwise hash the tokens each time:
/// ``probe``, ``allocate`` and ``allocate_many`` take it in place of tokens. Equal beginnings have equal
/// keys, if they have the same namespace, epoch, salt, adapter and extra keys. It never changes, and
/// belongs to the epoch in which it was made.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> manager = kvspan.KvCacheManager(8, block_size=4)
/// >>> chain = manager.block_keys([1, 2, 3, 4, 5, 6], cache_salt="tenant-7")
/// >>> chain
/// KeyChain(num_tokens=6, num_keys=1, block_size=4)
/// >>> chain.extended([7, 8]).block_keys[0] == chain.block_keys[0]
/// True
/// >>> if manager.probe(chain) < 4:
/// ...     handle = manager.allocate(chain)
/// >>> handle.num_tokens
/// 6
#[pyclass(name = "KeyChain", module = "kvspan", frozen, eq)]
#[derive(Debug, PartialEq)]
pub(in crate::python) struct PyKeyChain(pub(super) Arc<KeyChain>);

#[pymethods]
impl PyKeyChain {
    /// The tokens: a new array of uint32.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_slice(py, self.0.tokens())
    }

    /// The keys of the full blocks, of 32 bytes each: a new list.
    #[getter]
    fn block_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.block_keys().iter().map(|key| PyBytes::new(py, key.as_bytes())))
    }

    /// Tokens of a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    /// Returns the chain of these tokens and more, of whose blocks only the new ones are hashed.
    ///
    /// Raises InvalidInputError for what is no token.
    fn extended(&self, py: Python<'_>, tokens: TokenIds) -> Self {
        Self(Arc::new(py.detach(|| {
            let mut chain = KeyChain::clone(&self.0);
            chain.extend(&tokens.0);
            chain
        })))
    }

    /// The number of keys, which is that of the full blocks.
    fn __len__(&self) -> usize {
        self.0.block_keys().len()
    }

    fn __repr__(&self) -> String {
        let (num_tokens, num_keys) = (self.0.tokens().len(), self.0.block_keys().len());
        let block_size = self.0.block_size();
        format!("KeyChain(num_tokens={num_tokens}, num_keys={num_keys}, block_size={block_size})")
    }
}

/// Tokens, or a `KeyChain` of them.
#[derive(Debug)]
pub(super) struct GivenPrompt(Prompt);

impl<'py> FromPyObject<'_, 'py> for GivenPrompt {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(chain) = object.cast::<PyKeyChain>() {
            return Ok(Self(Prompt::Keyed(Arc::clone(&chain.get().0))));
        }
        object.extract().map(|TokenIds(tokens)| Self(Prompt::Tokens(tokens)))
    }
}

impl GivenPrompt {
    /// The tokens, of a sequence with these options.
    ///
    /// # Errors
    ///
    /// `InvalidInputError` if the options belong into the keys, and these are there already.
    pub(super) fn with(self, options: &Options<'_>) -> PyResult<Prompt> {
        let Options { cache_salt, lora_id, extra_keys, .. } = options;
        let others = [
            ("cache_salt", cache_salt.is_some()),
            ("lora_id", lora_id.is_some()),
            ("extra_keys", extra_keys.is_some()),
        ];
        let other = others.into_iter().find(|(_, is_given)| *is_given);
        if let (Prompt::Keyed(_), Some((name, _))) = (&self.0, other) {
            return Err(InvalidInputError::new_err((format!(
                "{name} is given beside a KeyChain, whose keys are made already: pass it to block_keys()"
            ),)));
        }
        Ok(self.0)
    }
}
