//! What queries attend to: the keys and values of a sequence, wherever they lie.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::Chunks;

use super::lanes::Lanes;
use super::task::TILE;
use super::{check, reserve};
use crate::dtype::{DType, Element};
use crate::error::{KvError, Result};
use crate::handle::{PagedSpan, TensorLike};
use crate::layer::KVSpan;

/// Tokens that the kernel takes at a time, if they lie in one piece. A divisor of `TILE`.
pub(super) const RUN: usize = 32;
const _: () = assert!(TILE.is_multiple_of(RUN));

/// The keys and values that queries attend to, in one layer of one sequence, where they lie.
///
/// # Examples
///
/// ```
/// use kvspan::{Attention, AttentionPool, Context, KVCacheConfig, LayerKvCache, Query};
///
/// let config = KVCacheConfig { num_heads: 1, hidden_dim_per_head: 2, ..Default::default() };
/// let cache = LayerKvCache::new(config);
/// cache.append(&[1.0, 0.0, 0.0, 1.0], &[5.0, 6.0, 7.0, 8.0])?; // two tokens
///
/// let pinned = cache.pin_range(0, 2)?;
/// let context = Context::of_span(pinned.span())?;
/// let query = Query::new(&[0.0; 4], [1, 2, 2])?; // one token, two heads
/// let mut out = [0.0; 4];
/// Attention::default().attend(query, &context, &AttentionPool::default(), &mut out)?;
/// assert_eq!(out, [6.0, 7.0, 6.0, 7.0]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone)]
pub struct Context<'a> {
    dtype: DType,
    num_heads: usize,
    head_dim: usize,
    segments: Vec<Segment<'a>>,
    len: usize,
}

/// Some tokens whose keys lie in one piece, and whose values do.
#[derive(Clone)]
struct Segment<'a> {
    /// Position of the first token.
    start: usize,
    keys: Plane<'a>,
    values: Plane<'a>,
}

/// Keys or values as they are stored.
#[derive(Clone, Copy)]
struct Plane<'a> {
    bytes: &'a [u8],
    /// What heads are multiplied by; empty if the type needs no scale.
    scales: &'a [f32],
}

impl<'a> Context<'a> {
    /// Makes a context of a span.
    ///
    /// # Errors
    ///
    /// [`KvError::ShapeMismatch`] if the public fields of the span were changed.
    pub fn of_span<T: Element>(span: KVSpan<'a, T>) -> Result<Self> {
        let mut context = Self::new(T::DTYPE, [span.num_heads(), span.head_dim()], 1)?;
        context.push_span(span)?;
        Ok(context)
    }

    /// Makes a context of a sequence's blocks.
    ///
    /// # Errors
    ///
    /// None that can occur today.
    pub fn of_paged<T: Element>(span: &'a PagedSpan<T>) -> Result<Self> {
        let [_, num_heads, head_dim] = span.shape();
        let mut context = Self::new(T::DTYPE, [num_heads, head_dim], span.num_segments())?;
        span.segments().try_for_each(|segment| context.push_span(segment))?;
        Ok(context)
    }

    /// Makes a context of a layer's keys and values.
    ///
    /// # Errors
    ///
    /// [`KvError::ShapeMismatch`] and [`KvError::DTypeMismatch`] if the two do not belong together,
    /// or if their segments are not what their shapes say; [`KvError::OutOfMemory`] if they say that
    /// there are too many.
    pub fn of_tensors(keys: &'a dyn TensorLike, values: &'a dyn TensorLike) -> Result<Self> {
        let [num_tokens, num_heads, head_dim] = keys.shape();
        if values.dtype() != keys.dtype() {
            let (given, wanted) = (values.dtype().name(), keys.dtype().name());
            return Err(KvError::DTypeMismatch { given, wanted });
        }
        let names = ["tokens of the values", "heads of the values", "head_dim of the values"];
        for ((what, given), wanted) in names.into_iter().zip(values.shape()).zip(keys.shape()) {
            check(what, given, wanted)?;
        }
        check("segments of the values", values.num_segments(), keys.num_segments())?;
        let mut context = Self::new(keys.dtype(), [num_heads, head_dim], keys.num_segments())?;
        for index in 0..keys.num_segments() {
            let plane = |tensor: &'a dyn TensorLike| Plane {
                bytes: tensor.segment(index).unwrap_or_default(),
                scales: tensor.scales(index).unwrap_or_default(),
            };
            context.push(plane(keys), plane(values))?;
        }
        check("tokens in the segments", context.len, num_tokens)?;
        Ok(context)
    }

    /// Returns the first `len` tokens of the context, as if there were no more.
    ///
    /// That is what the tokens of a chunk of a prompt see whose later blocks are there but not filled
    /// yet.
    ///
    /// # Errors
    ///
    /// [`KvError::RangeOutOfBounds`] if there are less.
    pub fn first(mut self, len: usize) -> Result<Self> {
        if len > self.len {
            return Err(KvError::RangeOutOfBounds { start: 0, end: len, len: self.len });
        }
        self.segments.truncate(self.segments.partition_point(|segment| segment.start < len));
        self.len = len;
        Ok(self)
    }

    fn new(dtype: DType, [num_heads, head_dim]: [usize; 2], num_segments: usize) -> Result<Self> {
        for (field, value) in [("num_heads", num_heads), ("head_dim", head_dim)] {
            if value == 0 {
                return Err(KvError::InvalidConfig { field });
            }
        }
        // Some tensors may say that they have more than there can be.
        let mut segments = Vec::new();
        reserve(&mut segments, num_segments)?;
        Ok(Self { dtype, num_heads, head_dim, segments, len: 0 })
    }

    fn push_span<T: Element>(&mut self, span: KVSpan<'a, T>) -> Result<()> {
        let plane = |elements, scales| Plane {
            bytes: bytemuck::cast_slice::<T, u8>(elements),
            scales: bytemuck::try_cast_slice::<T::Scale, f32>(scales).unwrap_or_default(),
        };
        self.push(plane(span.keys, span.key_scales), plane(span.values, span.value_scales))
    }

    /// Adds tokens, having checked that both planes have as many whole ones.
    fn push(&mut self, keys: Plane<'a>, values: Plane<'a>) -> Result<()> {
        let (num_heads, head_dim) = (self.num_heads, self.head_dim);
        let itemsize = self.dtype.itemsize();
        let row = num_heads.checked_mul(head_dim).and_then(|width| width.checked_mul(itemsize));
        let overflow = KvError::SizeOverflow { capacity: 1, num_heads, head_dim, itemsize };
        let row = row.ok_or(overflow)?;
        let num_tokens = keys.bytes.len() / row;
        let num_scales = if self.dtype.has_scales() { num_tokens * num_heads } else { 0 };
        for plane in [keys, values] {
            check("bytes of a segment", plane.bytes.len(), num_tokens * row)?;
            check("scales of a segment", plane.scales.len(), num_scales)?;
            let misaligned = plane.bytes.as_ptr().addr() % itemsize;
            if num_tokens > 0 {
                check("bytes that a segment is out of alignment", misaligned, 0)?;
            }
        }
        if num_tokens > 0 {
            self.segments.push(Segment { start: self.len, keys, values });
            self.len += num_tokens;
        }
        Ok(())
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of KV heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Returns the number of elements in one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// These tokens in runs, which do not end where the tokens do. `T` is what the elements are.
    pub(super) fn runs<T: Lanes>(&self, tokens: Range<usize>) -> Runs<'_, T> {
        let after = self.segments.partition_point(|segment| segment.start <= tokens.start);
        Runs { context: self, segment: after.saturating_sub(1), tokens, elements: PhantomData }
    }
}

/// Tokens in runs: from each position as far as they lie in one piece, but no further than to the next
/// multiple of `RUN`.
pub(super) struct Runs<'a, T> {
    context: &'a Context<'a>,
    /// Index of the segment of the first token.
    segment: usize,
    /// Those that are left.
    tokens: Range<usize>,
    elements: PhantomData<T>,
}

impl<'a, T: Lanes> Runs<'a, T> {
    /// The run that comes next, even beyond these tokens; empty if there is none.
    pub(super) fn upcoming(&self) -> Run<'a, T> {
        let Self { context, segment, .. } = *self;
        let tokens = self.tokens.start..context.len;
        let next = Runs { context, segment, tokens, elements: PhantomData }.next();
        next.unwrap_or(Run { tokens: 0..0, keys: Rows::NONE, values: Rows::NONE })
    }
}

impl<'a, T: Lanes> Iterator for Runs<'a, T> {
    type Item = Run<'a, T>;

    fn next(&mut self) -> Option<Run<'a, T>> {
        if self.tokens.is_empty() {
            return None;
        }
        let (start, context) = (self.tokens.start, self.context);
        let segment = context.segments.get(self.segment)?;
        let segment_end =
            context.segments.get(self.segment + 1).map_or(context.len, |next| next.start);
        let end = segment_end.min((start / RUN + 1) * RUN);
        self.segment += usize::from(end == segment_end);
        self.tokens.start = end;
        let tokens = start - segment.start..end - segment.start;
        let rows = |plane| Rows::new(plane, &tokens, [context.num_heads, context.head_dim]);
        Some(Run { tokens: start..end, keys: rows(segment.keys), values: rows(segment.values) })
    }
}

/// Says what there is, never the data.
impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("shape", &[self.len, self.num_heads, self.head_dim])
            .field("dtype", &self.dtype)
            .field("num_segments", &self.segments.len())
            .finish()
    }
}

/// Some tokens that lie in one piece.
pub(super) struct Run<'a, T> {
    pub(super) tokens: Range<usize>,
    pub(super) keys: Rows<'a, T>,
    pub(super) values: Rows<'a, T>,
}

/// The keys or the values of a run.
pub(super) struct Rows<'a, T> {
    pub(super) elements: &'a [T],
    scales: &'a [f32],
    num_heads: usize,
    head_dim: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    const NONE: Self = Self { elements: &[], scales: &[], num_heads: 0, head_dim: 0 };

    fn new(plane: Plane<'a>, tokens: &Range<usize>, [num_heads, head_dim]: [usize; 2]) -> Self {
        let width = num_heads * head_dim;
        let elements = bytemuck::cast_slice(plane.bytes);
        let scales = plane.scales.get(tokens.start * num_heads..tokens.end * num_heads);
        Self {
            elements: &elements[tokens.start * width..tokens.end * width],
            scales: scales.unwrap_or_default(),
            num_heads,
            head_dim,
        }
    }

    /// All of it, in pieces of so many rows of a head.
    pub(super) fn chunks(&self, num_rows: usize) -> Chunks<'a, T> {
        self.elements.chunks((num_rows * self.head_dim).max(1))
    }

    /// One head of some of the tokens, at least one.
    pub(super) fn head(&self, head: usize, tokens: &Range<usize>) -> HeadRows<'a, T> {
        let first = tokens.start * self.num_heads + head;
        HeadRows {
            elements: &self.elements[first * self.head_dim..],
            scales: self.scales.get(first..).unwrap_or_default(),
            len: tokens.len(),
            num_heads: self.num_heads,
            head_dim: self.head_dim,
        }
    }
}

/// One head of some tokens, whose rows are as far apart as tokens are wide.
pub(super) struct HeadRows<'a, T> {
    elements: &'a [T],
    scales: &'a [f32],
    pub(super) len: usize,
    num_heads: usize,
    pub(super) head_dim: usize,
}

impl<'a, T> HeadRows<'a, T> {
    #[inline]
    pub(super) fn row(&self, token: usize) -> &'a [T] {
        &self.elements[token * self.num_heads * self.head_dim..][..self.head_dim]
    }

    /// What the row is to be multiplied by.
    #[inline]
    pub(super) fn scale(&self, token: usize) -> f32 {
        self.scales[token * self.num_heads]
    }
}
