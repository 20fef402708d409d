//! Attention over keys and values where they lie.

mod context;
mod kernel;
mod lanes;
mod pool;
mod task;

pub use context::Context;
use fearless_simd::{Level, dispatch};
pub use pool::{AttentionPool, Instructions};
use task::{Partial, QueryBlock, Task};

use crate::dtype::{DType, Element, bf16, f16};
use crate::error::{KvError, Result};
use crate::handle::{KvCacheHandle, TensorRef, in_batch};
use crate::ids::share;
use crate::layer::LayerKvCache;
use crate::memory::Deadline;

/// Rows of a query that are computed together: their sums stay in the second-level cache.
const ROWS: usize = 256;

/// Tasks that a sequence is divided into, if it is long enough.
const SLICES: usize = 8;

/// How queries attend to keys and values.
///
/// For each query head, `softmax(scale * q . k) * v` over the tokens that the query token sees. Query
/// heads share KV heads in groups, as grouped-query and multi-query models have it: head `h` reads KV
/// head `h * num_kv_heads / num_q_heads`.
///
/// # Shapes
///
/// Queries and outputs are `[q_tokens, num_q_heads, head_dim]` in C order. The last query token is the
/// last token of the sequence: append or write keys and values first, then attend. For a chunk of a
/// prompt whose blocks were all allocated before, a [`Context`] of the [`first`](Context::first) tokens
/// ends with the chunk.
///
/// # What is read
///
/// Keys and values are read where they lie, once for all query heads of a group, and converted in
/// registers; products and sums are `f32`. What a query token does not see is not read, so that NaN
/// there does no harm. NaN and infinities in what it sees go where arithmetic takes them, and so does what
/// an `f32` can not hold: scores, and the sum of values times weights, whose largest weight is 1.
///
/// Results do not depend on where tokens lie, nor on the number of threads, to the bit. They do depend
/// on the instructions of the processor, within rounding.
///
/// # Errors
///
/// All methods fail in the same ways, and all but the last one before anything is written:
///
/// * [`KvError::ShapeMismatch`] if shapes do not fit; [`KvError::HeadsNotGrouped`] if the query heads
///   are no multiple of the KV heads.
/// * [`KvError::NothingToAttend`] if there are no tokens; [`KvError::QueryTooLong`] if there are less
///   than query tokens, and attention is causal.
/// * [`KvError::InvalidOption`] for a field that makes no sense.
/// * [`KvError::OutOfMemory`] if there is none to compute in: two megabytes for each thread, if tokens are
///   not larger than usual.
///
/// What is wrong with one of several sequences is a [`KvError::BatchEntry`], which says with which.
///
/// # Examples
///
/// ```
/// use kvspan::{Attention, AttentionPool, KVCacheConfig, LayerKvCache, Query};
///
/// let config = KVCacheConfig { num_heads: 1, hidden_dim_per_head: 2, ..Default::default() };
/// let cache = LayerKvCache::new(config);
/// cache.append(&[1.0, 0.0, 0.0, 1.0], &[5.0, 6.0, 7.0, 8.0])?; // two tokens
///
/// // Two query tokens of one head. The first sees only the first token.
/// let query = Query::new(&[0.0; 4], [2, 1, 2])?;
/// let mut out = [0.0; 4];
/// Attention::default().attend_layer(query, &cache, &AttentionPool::default(), &mut out)?;
/// assert_eq!(out, [5.0, 6.0, 6.0, 7.0]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// What products of queries and keys are multiplied by: `1 / sqrt(head_dim)` if `None`.
    pub scale: Option<f32>,
    /// Whether a query token sees only the tokens up to itself. If not, all see all.
    pub causal: bool,
    /// How many tokens a query token sees at most, itself among them. Needs `causal`.
    pub window: Option<usize>,
    /// The bound `c` of the scores `s`, which become `c * tanh(s / c)`.
    pub softcap: Option<f32>,
}

impl Default for Attention {
    fn default() -> Self {
        Self { scale: None, causal: true, window: None, softcap: None }
    }
}

/// The queries of some tokens of one sequence, in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    elements: &'a [f32],
    shape: [usize; 3],
}

impl<'a> Query<'a> {
    /// Makes a query of `[q_tokens, num_q_heads, head_dim]` elements in C order.
    ///
    /// # Errors
    ///
    /// [`KvError::ShapeMismatch`] if there are more or less elements than that.
    pub fn new(elements: &'a [f32], shape: [usize; 3]) -> Result<Self> {
        let wanted = shape.into_iter().fold(1_usize, usize::saturating_mul);
        check("elements of the query", elements.len(), wanted)?;
        Ok(Self { elements, shape })
    }

    /// Returns `[q_tokens, num_q_heads, head_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }
}

impl Attention {
    /// Attends to a context.
    ///
    /// # Errors
    ///
    /// See the type.
    pub fn attend(
        &self,
        query: Query<'_>,
        context: &Context<'_>,
        pool: &AttentionPool,
        out: &mut [f32],
    ) -> Result<()> {
        self.attend_many(&[(query, context)], pool, out)
    }

    /// Attends to a context for each of several queries; their outputs follow each other in `out`.
    ///
    /// # Errors
    ///
    /// See the type.
    pub fn attend_many(
        &self,
        sequences: &[(Query<'_>, &Context<'_>)],
        pool: &AttentionPool,
        out: &mut [f32],
    ) -> Result<()> {
        self.attend_pausing(sequences, pool, out, || Ok(()))
    }

    /// Attends to all tokens of a cache, which are pinned meanwhile.
    ///
    /// # Errors
    ///
    /// See the type, and [`LayerKvCache::pin_range`].
    pub fn attend_layer<T: Element>(
        &self,
        query: Query<'_>,
        cache: &LayerKvCache<T>,
        pool: &AttentionPool,
        out: &mut [f32],
    ) -> Result<()> {
        let pinned = cache.pin_until(0, None, Deadline::Never)?;
        self.attend(query, &Context::of_span(pinned.span())?, pool, out)
    }

    /// Attends to one layer of a sequence.
    ///
    /// # Errors
    ///
    /// See the type, and [`KvCacheHandle::kv_cache`]; [`KvError::NoStorage`] if the layer is not held
    /// as tensors, and what [`Context::of_tensors`] says of tensors that do not belong together.
    pub fn attend_handle(
        &self,
        query: Query<'_>,
        handle: &dyn KvCacheHandle,
        layer: usize,
        pool: &AttentionPool,
        out: &mut [f32],
    ) -> Result<()> {
        self.attend_handles(&[(query, handle)], layer, pool, out)
    }

    /// Attends to one layer of several sequences; their outputs follow each other in `out`.
    ///
    /// # Errors
    ///
    /// Those of [`attend_handle`](Self::attend_handle).
    pub fn attend_handles(
        &self,
        sequences: &[(Query<'_>, &dyn KvCacheHandle)],
        layer: usize,
        pool: &AttentionPool,
        out: &mut [f32],
    ) -> Result<()> {
        let handles = sequences.iter().map(|&(_, handle)| handle).enumerate();
        let tensors = handles.map(|(index, handle)| {
            tensors_of(handle, layer).map_err(about(index, sequences.len()))
        });
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let contexts = tensors.iter().enumerate().map(|(index, (keys, values))| {
            Context::of_tensors(&**keys, &**values).map_err(about(index, sequences.len()))
        });
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        let queries = sequences.iter().map(|&(query, _)| query);
        self.attend_many(&queries.zip(&contexts).collect::<Vec<_>>(), pool, out)
    }

    /// Does [`attend_many`](Self::attend_many), and calls `pause` now and then, whose error ends the
    /// call.
    pub(crate) fn attend_pausing<E: From<KvError>>(
        &self,
        sequences: &[(Query<'_>, &Context<'_>)],
        pool: &AttentionPool,
        out: &mut [f32],
        pause: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let queries = sequences.iter().enumerate().map(|(index, (query, context))| {
            self.query_blocks(query, context).map_err(about(index, sequences.len()))
        });
        let queries = queries.collect::<Result<Vec<_>>>()?;
        let wanted = sequences.iter().map(|(query, _)| query.elements.len()).sum();
        check("elements of the output", out.len(), wanted)?;

        let (mut tasks, mut blocks, mut rest) = (Vec::new(), Vec::new(), out);
        for queries in queries {
            let at_most = SLICES.div_ceil(queries.len().max(1));
            reserve(&mut blocks, queries.len())?;
            reserve(&mut tasks, queries.len().saturating_mul(at_most))?;
            for query in queries {
                let (own, others) = rest.split_at_mut(query.query.len());
                rest = others;
                let first = tasks.len();
                tasks.extend(query.slices(at_most).map(|slice| (blocks.len(), slice)));
                blocks.push(QueryBlock::new(tasks.len() - first, own));
            }
        }
        let level = pool.level();
        let compute_one = |index: usize| {
            let (block, task): &(usize, Task<'_>) = &tasks[index];
            blocks[*block].finish(task, compute(level, task)?);
            Ok(())
        };
        pool.run(tasks.len(), compute_one, pause)
    }

    /// Checks one sequence, and divides its query into blocks of tokens that are computed together.
    fn query_blocks<'a>(
        &self,
        query: &Query<'a>,
        context: &'a Context<'a>,
    ) -> Result<impl ExactSizeIterator<Item = Task<'a>>> {
        let [q_tokens, num_q_heads, head_dim] = query.shape;
        let (len, num_kv_heads) = (context.len(), context.num_heads());
        check("head_dim of the query", head_dim, context.head_dim())?;
        if num_q_heads == 0 || !num_q_heads.is_multiple_of(num_kv_heads) {
            return Err(KvError::HeadsNotGrouped { num_q_heads, num_kv_heads });
        }
        if len == 0 {
            return Err(KvError::NothingToAttend);
        }
        if self.causal && q_tokens > len {
            return Err(KvError::QueryTooLong { q_tokens, len });
        }
        self.check_options()?;
        let Self { causal, window, softcap, .. } = *self;
        let scale = self.scale.unwrap_or_else(|| share(1, head_dim).sqrt());
        let block = (ROWS / num_q_heads).max(1);
        // Of no tokens there may be more heads than a number can say.
        let width = num_q_heads.saturating_mul(head_dim);
        let queries = query.elements.chunks(block.saturating_mul(width));
        Ok(queries.enumerate().map(move |(index, query)| Task {
            context,
            query,
            num_q_heads,
            position: causal.then(|| len - q_tokens + index * block),
            window: window.unwrap_or(usize::MAX),
            scale,
            softcap,
            tokens: 0..len,
        }))
    }

    fn check_options(&self) -> Result<()> {
        let invalid = |option, wanted| Err(KvError::InvalidOption { option, wanted });
        if self.scale.is_some_and(|scale| !scale.is_finite()) {
            return invalid("scale", "finite");
        }
        if self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return invalid("softcap", "finite and above 0");
        }
        match self.window {
            Some(0) => invalid("window", "at least 1"),
            Some(_) if !self.causal => invalid("window", "left out, since attention is not causal"),
            _ => Ok(()),
        }
    }
}

/// The keys and the values of a layer.
fn tensors_of(handle: &dyn KvCacheHandle, layer: usize) -> Result<(TensorRef, TensorRef)> {
    match handle.kv_cache(layer)? {
        (Some(keys), Some(values)) => Ok((keys, values)),
        _ => Err(KvError::NoStorage),
    }
}

/// Computes a task with these instructions.
fn compute(level: Level, task: &Task<'_>) -> Result<Partial> {
    match task.context.dtype() {
        DType::F32 => dispatch!(level, simd => kernel::attend::<_, f32>(simd, task)),
        DType::F16 => dispatch!(level, simd => kernel::attend::<_, f16>(simd, task)),
        DType::BF16 => dispatch!(level, simd => kernel::attend::<_, bf16>(simd, task)),
        DType::I8 => dispatch!(level, simd => kernel::attend::<_, i8>(simd, task)),
    }
}

fn check(what: &'static str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted { Ok(()) } else { Err(KvError::ShapeMismatch { what, given, wanted }) }
}

/// Says which of several sequences an error is about.
fn about(index: usize, num_sequences: usize) -> impl Fn(KvError) -> KvError {
    move |error| if num_sequences > 1 { in_batch(index, error) } else { error }
}

/// Zeros to compute in.
///
/// # Errors
///
/// `OutOfMemory`
pub(crate) fn zeros(len: usize) -> Result<Vec<f32>> {
    let mut zeros = Vec::new();
    reserve(&mut zeros, len)?;
    zeros.resize(len, 0.0);
    Ok(zeros)
}

/// Makes room for so many more.
///
/// # Errors
///
/// `OutOfMemory`
fn reserve<T>(items: &mut Vec<T>, additional: usize) -> Result<()> {
    let bytes = additional.saturating_mul(size_of::<T>());
    items.try_reserve(additional).map_err(|_| KvError::OutOfMemory { bytes })
}
