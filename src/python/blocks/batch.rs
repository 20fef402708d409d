//! The calls of `KvCacheManager` for many sequences: a step of all of them, or nothing.

#![expect(clippy::needless_pass_by_value, reason = "arguments from Python are extracted by value")]

use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyInt, PyList, PyString};

use super::keys::{GivenPrompt, PyKeyChain};
use super::manager::PyKvCacheManager;
use super::options::{ExtraKeys, Options, cache_salt, lora_id, lora_id_hint};
use super::paged::{GivenMany, PyPagedKvCacheHandle};
use super::report::PyBlockCopy;
use crate::error::KvError;
use crate::handle::check_count;
use crate::manager::RequestOptions;
use crate::python::buffer::{IdRows, TokenIds};
use crate::python::convert::{NumTokens, Numbers, in_entry, push, type_name};
use crate::python::patience::is_long_copy;

#[pymethods]
impl PyKvCacheManager {
    /// Returns `tokens` with the keys of their full blocks, hashed once; see ``KeyChain``.
    ///
    /// Raises InvalidInputError for what is no token.
    #[pyo3(signature = (tokens, *, cache_salt = None, lora_id = None, extra_keys = None))]
    fn block_keys(
        &self,
        py: Python<'_>,
        tokens: TokenIds,
        #[pyo3(from_py_with = cache_salt)] cache_salt: Option<&str>,
        #[pyo3(from_py_with = lora_id)] lora_id: Option<&str>,
        extra_keys: Option<ExtraKeys>,
    ) -> PyResult<PyKeyChain> {
        let options = Options { cache_salt, lora_id, extra_keys, ..Options::default() };
        let manager = self.core()?;
        let chain = py.detach(|| options.with(|all| manager.block_keys(tokens.0, all)))?;
        Ok(PyKeyChain(Arc::new(chain)))
    }

    /// Starts many sequences, all or none; see ``allocate``.
    ///
    /// `tokens` is a list with what ``allocate`` takes; the other lists have an entry for each of them,
    /// which can be None. What is cached of any of them is held before blocks for the rest are taken.
    ///
    /// Raises what ``allocate`` raises.
    #[pyo3(signature = (
        tokens, request_ids = None, *, cache_salts = None, lora_ids = None, lookahead = NumTokens(0)
    ), text_signature = "($self, tokens, request_ids=None, *, cache_salts=None, lora_ids=None, lookahead=0)")]
    fn allocate_many<'py>(
        slf: &Bound<'py, Self>,
        tokens: &Bound<'py, PyAny>,
        request_ids: Option<&Bound<'py, PyAny>>,
        cache_salts: Option<&Bound<'py, PyAny>>,
        lora_ids: Option<&Bound<'py, PyAny>>,
        lookahead: NumTokens,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = slf.py();
        let mut given = Vec::new();
        for (index, prompt) in tokens.try_iter()?.enumerate() {
            let prompt: PyResult<GivenPrompt> = prompt?.extract();
            push(py, &mut given, prompt.map_err(|error| in_entry(py, index, error))?)?;
        }
        let texts = |name, texts: Option<&Bound<'py, PyAny>>| Texts::new(name, texts, given.len());
        let request_ids = texts("request_ids", request_ids)?;
        let (salts, adapters) = (texts("cache_salts", cache_salts)?, texts("lora_ids", lora_ids)?);
        let mut prompts = Vec::with_capacity(given.len());
        for (index, prompt) in given.into_iter().enumerate() {
            let (cache_salt, lora_id) = (salts.get(index), adapters.get(index));
            let options = Options { cache_salt, lora_id, ..Options::default() };
            let prompt = prompt.with(&options).map_err(|error| in_entry(py, index, error))?;
            let options = RequestOptions {
                request_id: request_ids.get(index),
                cache_salt: cache_salt.map(str::as_bytes),
                lora_id: lora_id.map(str::as_bytes),
                lookahead: lookahead.0,
                ..RequestOptions::default()
            };
            prompts.push((prompt, options));
        }
        let manager = slf.get().core()?;
        let handles = py.detach(|| manager.allocate_many(prompts.into_iter()))?;
        let handles = handles
            .into_iter()
            .map(|handle| Bound::new(py, PyPagedKvCacheHandle::new(slf.clone().unbind(), handle)));
        PyList::new(py, handles.collect::<PyResult<Vec<_>>>()?)
    }

    /// Makes room for more tokens at the end of each sequence, for all or none; see ``extend``.
    ///
    /// `num_tokens` is one number for all, or one for each. Returns the slots of the new tokens, one
    /// after the other: a new array of int64. What was copied is appended to the list `copies`, as
    /// pairs of an index in `handles` and a ``BlockCopy``. Without storage that has to be acted on, so
    /// that a call without the list is refused if it would copy.
    ///
    /// Raises OutOfBlocksError if there are too few blocks for all, InvalidInputError if a handle is
    /// given twice, and NoStorageError if copies would go unreported.
    #[pyo3(
        signature = (handles, num_tokens = Numbers::All(1), *, copies = None),
        text_signature = "($self, handles, num_tokens=1, *, copies=None)"
    )]
    fn extend_many<'py>(
        &self,
        py: Python<'py>,
        handles: GivenMany<'py>,
        num_tokens: Numbers,
        copies: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyArray1<isize>>> {
        let manager = self.core()?;
        num_tokens.check_count("numbers of tokens", handles.len())?;
        let is_reported = copies.is_some();
        let extended = handles.change(py, |handles| {
            manager.extend_many(handles, is_reported, |index| num_tokens.get(index))
        })?;
        if let Some(copies) = copies {
            for (index, copy) in extended.copies {
                copies.append((index, PyBlockCopy::from(copy)))?;
            }
        }
        Ok(array(py, extended.slots))
    }

    /// Says which tokens follow the committed ones of each sequence, for all or none; see ``commit``.
    ///
    /// `tokens` is a list with what ``commit`` takes for each, or an array of integers: [sequences],
    /// one token each, or [sequences, tokens].
    ///
    /// Raises what ``commit`` raises, and InvalidInputError if a handle is given twice or there are not
    /// as many tokens as sequences.
    fn commit_many(
        &self,
        py: Python<'_>,
        handles: GivenMany<'_>,
        tokens: TokenLists,
    ) -> PyResult<()> {
        let manager = self.core()?;
        check_count("lists of tokens", tokens.len(), handles.len())?;
        handles.change(py, |handles| manager.commit_many(handles, |index| tokens.get(index)))
    }

    /// Gives the blocks of many sequences back, of all or of none; see ``free``.
    ///
    /// Raises StaleHandleError if that was done before with one of them, and InvalidInputError if a
    /// handle is given twice.
    fn free_many(&self, py: Python<'_>, handles: GivenMany<'_>) -> PyResult<()> {
        let manager = self.core()?;
        handles.check_distinct()?;
        handles.read(py, |handles| manager.free_many(handles))
    }

    /// Returns which blocks each sequence has: a new array of int32 [sequences, blocks of the one that
    /// has most], with 0, the null block, where a sequence has no more.
    ///
    /// Ask again after a commit: a full block may then have been given back for an equal one, so that
    /// a row changes (never with ``merge_duplicates=False``), and also after a write or
    /// ``prepare_write``, which may copy a block.
    fn block_tables<'py>(
        &self,
        py: Python<'py>,
        handles: GivenMany<'py>,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let (manager, num_sequences) = (self.core()?, handles.len());
        let num_blocks = self.config().num_blocks;
        if i32::try_from(num_blocks).is_err() {
            let (what, max) = ("a block id of an array of int32", i32::MAX.cast_unsigned());
            let max = usize::try_from(max)?;
            return Err(KvError::TooLarge { what, given: num_blocks, max }.into());
        }
        let tables = handles.read(py, |handles| manager.block_tables(handles))?;
        let blocks = tables.blocks.into_iter().map(u32::cast_signed).collect();
        PyArray1::from_vec(py, blocks).reshape([num_sequences, tables.width])
    }

    /// Returns the slots of tokens of each sequence, one after the other: a new array of int64.
    ///
    /// The tokens are those from `starts` to `ends`, by default the lengths; each is one number for
    /// all, or one for each.
    ///
    /// Raises OutOfRangeError past the length of a sequence.
    #[pyo3(signature = (handles, starts, ends = None))]
    fn slot_mappings<'py>(
        &self,
        py: Python<'py>,
        handles: GivenMany<'py>,
        starts: Numbers,
        ends: Option<Numbers>,
    ) -> PyResult<Bound<'py, PyArray1<isize>>> {
        let manager = self.core()?;
        starts.check_count("starts", handles.len())?;
        ends.as_ref().map_or(Ok(()), |ends| ends.check_count("ends", handles.len()))?;
        let end = |index| ends.as_ref().map(|ends| ends.get(index));
        let slots = handles
            .read(py, |handles| manager.slot_mappings(handles, |index| starts.get(index), end))?;
        Ok(array(py, slots))
    }

    /// Returns how many of the first tokens of each sequence were there already when it was allocated:
    /// a new array of int64.
    fn num_cached_tokens<'py>(
        &self,
        py: Python<'py>,
        handles: GivenMany<'py>,
    ) -> PyResult<Bound<'py, PyArray1<isize>>> {
        let manager = self.core()?;
        Ok(array(py, handles.read(py, |handles| manager.num_cached_tokens(handles))?))
    }
}

/// Numbers that fit an `isize`, as the manager sees to with slots and the memory with tokens.
fn array(py: Python<'_>, numbers: Vec<usize>) -> Bound<'_, PyArray1<isize>> {
    // In the memory in which they are.
    let numbers = numbers.into_iter().map(usize::cast_signed).collect::<Vec<_>>();
    if is_long_copy(size_of_val(numbers.as_slice())) {
        PyArray1::from_vec(py, numbers)
    } else {
        PyArray1::from_slice(py, &numbers)
    }
}

/// The tokens of many sequences.
#[derive(Debug)]
enum TokenLists {
    /// As many of each.
    Rows(IdRows),
    Lists(Vec<TokenIds>),
}

impl<'py> FromPyObject<'_, 'py> for TokenLists {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Some(rows) = IdRows::of_memory(&object, "token")? {
            return Ok(Self::Rows(rows));
        }
        let py = object.py();
        let mut lists = Vec::new();
        for (index, tokens) in object.try_iter()?.enumerate() {
            let tokens = tokens?;
            let one = tokens.is_instance_of::<PyInt>();
            let tokens = if one { PyList::new(py, [tokens])?.into_any() } else { tokens };
            let tokens: PyResult<TokenIds> = tokens.extract();
            push(py, &mut lists, tokens.map_err(|error| in_entry(py, index, error))?)?;
        }
        Ok(Self::Lists(lists))
    }
}

impl TokenLists {
    fn len(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.len(),
            Self::Lists(lists) => lists.len(),
        }
    }

    /// Of a sequence that there are some for.
    fn get(&self, index: usize) -> &[u32] {
        match self {
            Self::Rows(rows) => rows.row(index),
            Self::Lists(lists) => &lists[index].0,
        }
    }
}

/// A text or none for each of many sequences; none at all if no list is given.
#[derive(Debug)]
struct Texts(Vec<Option<PyBackedStr>>);

impl Texts {
    fn new(
        name: &'static str,
        texts: Option<&Bound<'_, PyAny>>,
        num_sequences: usize,
    ) -> PyResult<Self> {
        let Some(texts) = texts else { return Ok(Self(Vec::new())) };
        if texts.is_instance_of::<PyString>() {
            let message = format!("{name} must be a list with a str or None for each sequence");
            return Err(PyTypeError::new_err(message));
        }
        let mut all = Vec::new();
        for (index, text) in texts.try_iter()?.enumerate() {
            let text = text?;
            let extracted = text.extract::<Option<PyBackedStr>>().map_err(|error| {
                if !error.is_instance_of::<PyTypeError>(text.py()) {
                    return error;
                }
                let (given, hint) =
                    (type_name(&text), if name == "lora_ids" { lora_id_hint(&text) } else { "" });
                PyTypeError::new_err(format!(
                    "{name} must be str or None, but entry {index} is {given}{hint}"
                ))
            });
            push(texts.py(), &mut all, extracted?)?;
        }
        check_count(name, all.len(), num_sequences)?;
        Ok(Self(all))
    }

    fn get(&self, index: usize) -> Option<&str> {
        self.0.get(index)?.as_deref()
    }
}
