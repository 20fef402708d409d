//! `attention` and `AttentionPool`.

use std::fmt;
use std::time::Instant;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::blocks::{PyCacheTensor, PyContiguousKvCacheHandle, PyPagedKvCacheHandle, PyPagedSpan};
use super::buffer::{Opened, Room, SpanMemory, Tokens, Wanted, call};
use super::cache::PyLayerKvCache;
use super::convert::{Layer, NumTokens, Numbers, in_entry, in_range, positions_of, type_name};
use super::error::{InvalidConfigError, InvalidInputError};
use super::fork::{self, ProcessLocal};
use super::patience::SIGNAL_INTERVAL;
use super::span::PyKVSpan;
use super::typed::{AnyPinnedSpan, each};
use crate::attention::{Attention, AttentionPool, Context, Instructions, Query, zeros};
use crate::dtype::DType;
use crate::error::KvError;
use crate::handle::{Device, TensorLike, TensorRef};
use crate::memory::Stored;

/// Threads that compute attention, and that belong to whoever made it.
///
/// The thread that calls ``attention`` is one of them, so that a pool of one has no thread of its own.
/// They end when the pool is dropped. Many calls may use a pool at the same time, and none waits for
/// another: one that finds the threads at work computes on its own thread alone. A pool can not be used in
/// a child that was forked after it was made.
///
/// Parameters
/// ----------
/// num_threads : int
///     How many threads compute, the caller's among them.
///
/// Raises
/// ------
/// InvalidConfigError
///     (a ValueError) If there are to be none.
/// NoThreadsError
///     (a RuntimeError) If the system does not give them, or for more than 4096.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> pool = kvspan.AttentionPool(2)
/// >>> pool.num_threads
/// 2
#[pyclass(name = "AttentionPool", module = "kvspan", frozen, weakref)]
#[derive(Debug)]
pub(super) struct PyAttentionPool(ProcessLocal<AttentionPool>);

#[pymethods]
impl PyAttentionPool {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = num_threads)] num_threads: usize,
    ) -> PyResult<Self> {
        fork::check_process()?;
        let pool = py.detach(|| AttentionPool::new(num_threads))?;
        Ok(Self(ProcessLocal::with_long_drop(pool)))
    }

    /// How many threads compute, the caller's among them.
    #[getter]
    fn num_threads(&self) -> PyResult<usize> {
        Ok(self.0.get()?.num_threads())
    }

    /// What the processor offers and is used: ``"avx512"``, ``"avx2"`` or ``"portable"``.
    #[getter]
    fn instructions(&self) -> PyResult<&'static str> {
        Ok(match self.0.get()?.instructions() {
            Instructions::Avx512 => "avx512",
            Instructions::Avx2 => "avx2",
            Instructions::Portable => "portable",
        })
    }

    fn __repr__(&self) -> PyResult<String> {
        let (num_threads, instructions) = (self.num_threads()?, self.instructions()?);
        Ok(format!("AttentionPool({num_threads}, instructions='{instructions}')"))
    }
}

fn num_threads(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    in_range(object.as_borrowed(), |given| {
        let message = format!("num_threads must be from 1 to 4096, but it is {given}");
        InvalidConfigError::new_err((message,))
    })
}

/// Returns softmax(query @ keys * scale) @ values, with keys and values read where they lie.
///
/// Each byte of them is read once for all query heads that share a KV head. They stay pinned
/// meanwhile, and no lock is held. The results do not depend on how the tokens are spread over blocks.
///
/// Parameters
/// ----------
/// query : array of float32, [q_tokens, num_q_heads, head_dim] or [num_q_heads, head_dim]
///     C-contiguous. ``num_q_heads`` is a multiple of the number of KV heads.
/// cache : LayerKvCache, KVSpan, PagedSpan or KvCacheHandle, or a list or tuple of them
///     What to attend to. With a list there is a sequence for each of its items, of
///     any lengths, and ``query`` has the tokens of the first, then those of the second, and so on.
/// layer : int, optional
///     Which layer of a handle; for a handle only.
/// scale : float, optional
///     By default ``1 / sqrt(head_dim)``.
/// causal : bool, default True
///     The last token of the query is the last of the sequence, and each sees itself and what is before
///     it. Otherwise each sees all tokens.
/// window : int, optional
///     How many tokens each sees, itself included, if not all; only if ``causal``.
/// softcap : float, optional
///     Makes scores ``softcap * tanh(score / softcap)``.
/// query_lens : sequence of int, optional
///     Tokens of the query for each sequence of a list; by default one each.
/// kv_lens : int or sequence of int, optional
///     How many of its first tokens each sequence has, as far as this call goes; by default all. A
///     prompt whose blocks were all allocated, but which is written and attended to in chunks, ends
///     with the chunk: ``kv_lens=start + len(chunk)``.
/// out : array of float32, optional
///     Where to write the result, of the shape of ``query``; by default a new array.
/// pool : AttentionPool, optional
///     Threads to compute with; by default the caller's alone.
///
/// Returns
/// -------
/// numpy.ndarray
///     The result, in the shape of ``query``; or ``out``.
///
/// Raises
/// ------
/// InvalidInputError
///     (a ValueError) If shapes or options do not fit, or if no tokens are stored.
/// OutOfRangeError
///     (an IndexError) If a sequence has less tokens than ``kv_lens`` says.
/// OutOfMemoryError
///     (a MemoryError) If there is none to compute in.
/// NoStorageError, StaleHandleError, LayerOutOfRangeError, ReleasedError
///     If a handle or a span has nothing to read.
///
/// After any of them ``out`` is as it was.
///
/// Examples
/// --------
/// >>> import numpy as np, kvspan
/// >>> cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(num_heads=2, hidden_dim_per_head=4))
/// >>> prompt = np.ones((3, 2, 4), dtype=np.float32)
/// >>> cache.append(prompt, 5 * prompt)
/// range(0, 3)
/// >>> query = np.ones((1, 8, 4), dtype=np.float32)  # four query heads share a KV head
/// >>> kvspan.attention(query, cache)[0, 0]
/// array([5., 5., 5., 5.], dtype=float32)
#[pyfunction]
#[pyo3(signature = (
    query, cache, layer = None, *, scale = None, causal = true, window = None, softcap = None,
    query_lens = None, kv_lens = None, out = None, pool = None
))]
#[expect(clippy::too_many_arguments, reason = "Python's are named")]
#[expect(clippy::needless_pass_by_value, reason = "arguments from Python are extracted by value")]
pub(super) fn attention<'py>(
    query: &Bound<'py, PyAny>,
    cache: &Bound<'py, PyAny>,
    layer: Option<Layer>,
    scale: Option<f32>,
    causal: bool,
    window: Option<NumTokens>,
    softcap: Option<f32>,
    query_lens: Option<&Bound<'py, PyAny>>,
    kv_lens: Option<Numbers>,
    out: Option<&Bound<'py, PyAny>>,
    pool: Option<&Bound<'py, PyAttentionPool>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = query.py();
    let options = Attention { scale, causal, window: window.map(|window| window.0), softcap };
    let alone = AttentionPool::default();
    let pool = pool.map_or(Ok(&alone), |pool| pool.get().0.get())?;

    // What may run Python code is all done before the first look at an array.
    let axes = axes_of(query)?;
    let [q_tokens, heads, dim] = axes.shape();
    let wanted = |name, tokens| Wanted { name, dtype: DType::F32, tokens, heads, dim };
    let opened = Opened::new(query, wanted("elements of query", Tokens::Any))?;
    let opened_out =
        out.map(|out| Opened::new(out, wanted("elements of out", Tokens::Room))).transpose()?;
    let (held, lens) = sequences(cache, layer, q_tokens, query_lens)?;
    kv_lens.as_ref().map_or(Ok(()), |lens| lens.check_count("kv_lens", held.0.len()))?;

    let elements = opened.look()?;
    // Some objects do not have the shape that they say.
    axes.check_len("the memory of query", elements.len())?;
    opened_out.as_ref().map_or(Ok(()), |out| axes.check_len("out", out.len()?))?;
    let elements = elements.values();
    let mut guilty = None;
    let computed = py.detach(|| {
        // Others may change theirs meanwhile.
        let elements = elements.to_vec()?;
        let mut result = zeros(elements.len())?;
        let contexts = held.contexts(kv_lens.as_ref()).map_err(|(index, error)| {
            guilty = Some(index);
            error
        })?;
        let (mut sequences, mut rest) = (Vec::with_capacity(contexts.len()), &*elements);
        for (context, &len) in contexts.iter().zip(&lens) {
            // The lengths add up to that of the query.
            let (own, others) = rest.split_at(len * heads * dim);
            rest = others;
            sequences.push((Query::new(own, [len, heads, dim])?, context));
        }
        let mut looked = Instant::now();
        options.attend_pausing(&sequences, pool, &mut result, || {
            if looked.elapsed() < SIGNAL_INTERVAL {
                return Ok(());
            }
            let signals = Python::try_attach(|py| {
                looked = Instant::now();
                py.check_signals()
            });
            // At exit there is no interpreter to ask.
            signals.unwrap_or(Ok(()))
        })?;
        Ok::<_, PyErr>(result)
    });
    let computed = computed.map_err(|error| match guilty {
        Some(index) if held.0.len() > 1 => in_entry(py, index, error),
        _ => error,
    })?;
    let (Some(out), Some(opened)) = (out, opened_out) else {
        return Ok(PyArray1::from_vec(py, computed).reshape(axes.0)?.into_any());
    };
    // Handlers of signals ran meanwhile, which may have taken the memory away.
    let room = Room::of(opened)?;
    axes.check_len("out", room.len())?;
    let mut room = room.values();
    py.detach(|| Stored::<f32> { data: &computed, scales: &[] }.copy_to(&mut room.target()));
    Ok(out.clone())
}

/// The axes of a query.
struct Axes(Vec<usize>);

fn axes_of(query: &Bound<'_, PyAny>) -> PyResult<Axes> {
    let Some(shape) = query.getattr_opt("shape")? else {
        return Err(PyTypeError::new_err(format!(
            "query must be a float32 array (NumPy, or any C-contiguous buffer or DLPack exporter \
             with a shape), not {}",
            type_name(query)
        )));
    };
    // One more than there may be, of a shape that may have no end.
    let axes = shape.try_iter()?.take(4).map(|axis| axis?.extract());
    let axes = axes.collect::<PyResult<Vec<_>>>()?;
    if let [_, _] | [_, _, _] = *axes {
        return Ok(Axes(axes));
    }
    Err(InvalidInputError::new_err((format!(
        "query has shape {shape}, but (q_tokens, num_q_heads, head_dim), or for one token \
         (num_q_heads, head_dim), is wanted"
    ),)))
}

impl Axes {
    /// With an axis of tokens.
    fn shape(&self) -> [usize; 3] {
        match *self.0 {
            [heads, dim] => [1, heads, dim],
            [tokens, heads, dim] => [tokens, heads, dim],
            _ => [0; 3],
        }
    }

    /// Checks how many elements `what` has.
    fn check_len(&self, what: &str, given: usize) -> PyResult<()> {
        let product = self.0.iter().try_fold(1_usize, |product, &axis| product.checked_mul(axis));
        if product == Some(given) {
            return Ok(());
        }
        Err(InvalidInputError::new_err((format!(
            "{what} has {given} elements, but the shape of the query is {:?}",
            self.0
        ),)))
    }
}

/// What keeps the keys and values of a sequence as they are.
enum Held {
    Pinned(AnyPinnedSpan),
    Memory(Py<SpanMemory>),
    Tensors(TensorRef, TensorRef),
}

impl Held {
    fn context(&self) -> PyResult<Context<'_>> {
        match self {
            Self::Pinned(pinned) => Ok(each!(pinned, pinned => Context::of_span(pinned.span()))?),
            Self::Memory(memory) => memory.get().context(),
            Self::Tensors(keys, values) => Ok(Context::of_tensors(&**keys, &**values)?),
        }
    }
}

/// All that is held. It is let go detached, since that waits for locks.
struct AllHeld(Vec<Held>);

impl AllHeld {
    /// An error has the index of what it is about.
    fn contexts(&self, kv_lens: Option<&Numbers>) -> Result<Vec<Context<'_>>, (usize, PyErr)> {
        let contexts = self.0.iter().enumerate().map(|(index, held)| {
            let context = held.context().and_then(|context| match kv_lens {
                Some(lens) => Ok(context.first(lens.get(index))?),
                None => Ok(context),
            });
            context.map_err(|error| (index, error))
        });
        contexts.collect()
    }
}

impl Drop for AllHeld {
    fn drop(&mut self) {
        let is_free = |held: &mut Held| !matches!(held, Held::Memory(_));
        let mut pins = Some(self.0.extract_if(.., is_free).collect::<Vec<_>>());
        // If that can not be, as at exit, they are dropped below.
        Python::try_attach(|py| py.detach(|| drop(pins.take())));
    }
}

/// The sequences to attend to, and how many tokens of the query each has.
fn sequences(
    cache: &Bound<'_, PyAny>,
    layer: Option<Layer>,
    q_tokens: usize,
    query_lens: Option<&Bound<'_, PyAny>>,
) -> PyResult<(AllHeld, Vec<usize>)> {
    if !cache.is_instance_of::<PyList>() && !cache.is_instance_of::<PyTuple>() {
        if query_lens.is_some() {
            let message = "query_lens is for a list of sequences";
            return Err(PyTypeError::new_err(message));
        }
        return Ok((AllHeld(vec![hold(cache, layer)?]), vec![q_tokens]));
    }
    let mut all = AllHeld(Vec::new());
    let held = &mut all.0;
    for (index, item) in cache.try_iter()?.enumerate() {
        let item = item.and_then(|item| hold(&item, layer));
        held.push(item.map_err(|error| in_entry(cache.py(), index, error))?);
    }
    let lens = match query_lens {
        Some(lens) => positions_of(lens)?,
        None => vec![1; held.len()],
    };
    let total = lens.iter().try_fold(0_usize, |total, &len| total.checked_add(len));
    if lens.len() != held.len() || total != Some(q_tokens) {
        return Err(InvalidInputError::new_err((format!(
            "the query has {q_tokens} tokens, but there are {} sequences and query_lens of {lens:?}: \
             there must be one for each, and they must add up",
            held.len()
        ),)));
    }
    Ok((all, lens))
}

fn hold(cache: &Bound<'_, PyAny>, layer: Option<Layer>) -> PyResult<Held> {
    let py = cache.py();
    if let Ok(handle) = cache.cast::<PyPagedKvCacheHandle>() {
        return tensors(handle.get().tensors(py, wanted_layer(layer)?)?);
    }
    if let Ok(handle) = cache.cast::<PyContiguousKvCacheHandle>() {
        return tensors(handle.get().tensors(py, wanted_layer(layer)?)?);
    }
    let one_layer = || match layer {
        Some(_) => Err(PyTypeError::new_err(format!(
            "a {} is of one layer already: pass a layer with handles only",
            type_name(cache)
        ))),
        None => Ok(()),
    };
    if let Ok(cache) = cache.cast::<PyLayerKvCache>() {
        one_layer()?;
        return cache.get().pin_all(py).map(Held::Pinned);
    }
    if let Ok(span) = cache.cast::<PyKVSpan>() {
        one_layer()?;
        return span.get().memory(py).map(Held::Memory);
    }
    if let Ok(span) = cache.cast::<PyPagedSpan>() {
        one_layer()?;
        return span.get().memory(py).map(Held::Memory);
    }
    if cache.is_instance(&py.import("kvspan")?.getattr("KvCacheHandle")?)? {
        let arguments = PyTuple::new(py, [wanted_layer(layer)?.0])?;
        let pair = call(&cache.getattr("kv_cache")?, &arguments, None)?;
        let Ok((keys, values)) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
            return Err(PyTypeError::new_err(format!(
                "kv_cache of a {} must return a tuple of keys and values, not {}",
                type_name(cache),
                pair.repr()?
            )));
        };
        return tensors((tensor_of("keys", &keys)?, tensor_of("values", &values)?));
    }
    Err(PyTypeError::new_err(format!(
        "a LayerKvCache, KVSpan, PagedSpan or KvCacheHandle is wanted, not {}",
        type_name(cache)
    )))
}

fn wanted_layer(layer: Option<Layer>) -> PyResult<Layer> {
    let missing = || PyTypeError::new_err("which layer of the handle? Pass its number");
    layer.ok_or_else(missing)
}

fn tensors((keys, values): (Option<TensorRef>, Option<TensorRef>)) -> PyResult<Held> {
    match (keys, values) {
        (Some(keys), Some(values)) => Ok(Held::Tensors(keys, values)),
        _ => Err(KvError::NoStorage.into()),
    }
}

/// What a handle that was written in Python answered.
fn tensor_of(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<Option<TensorRef>> {
    if tensor.is_none() {
        return Ok(None);
    }
    if let Ok(tensor) = tensor.cast::<PyCacheTensor>() {
        return tensor.get().tensor(tensor.py()).map(Some);
    }
    let Some(given) = tensor.getattr_opt("shape")? else {
        return Err(PyTypeError::new_err(format!(
            "{name} must be a CacheTensor or a float32 array, not {}",
            type_name(tensor)
        )));
    };
    let shape = given.extract::<[usize; 3]>().map_err(|error| {
        if !error.is_instance_of::<PyException>(tensor.py()) {
            return error;
        }
        InvalidInputError::new_err((format!(
            "{name} have shape {given}, but (tokens, num_kv_heads, head_dim) is wanted"
        ),))
    })?;
    let [_, heads, dim] = shape;
    // Others may change their arrays while we compute.
    let wanted = Wanted { name, dtype: DType::F32, tokens: Tokens::Many, heads, dim };
    let opened = Opened::new(tensor, wanted)?;
    let elements = opened.look()?;
    let elements = elements.values();
    let elements = tensor.py().detach(|| elements.to_vec())?;
    Ok(Some(std::sync::Arc::new(Copied { shape, elements })))
}

/// A tensor that somebody else owned.
struct Copied {
    shape: [usize; 3],
    elements: Vec<f32>,
}

impl fmt::Debug for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl TensorLike for Copied {
    fn shape(&self) -> [usize; 3] {
        self.shape
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_segments(&self) -> usize {
        1
    }

    fn segment(&self, index: usize) -> Option<&[u8]> {
        (index == 0).then(|| bytemuck::cast_slice(&self.elements))
    }
}
