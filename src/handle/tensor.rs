//! A layer's keys, or its values, without a copy.

use std::fmt;
use std::sync::Arc;

use super::{Device, PagedSpan};
use crate::dtype::{DType, Element};
use crate::layer::{KVSpan, PinnedSpan};

/// A tensor of shape `[tokens, num_kv_heads, head_dim]` that does not change while it lives.
///
/// Its elements lie in one or more contiguous *segments*, one after the other along the first axis.
/// Nothing is gathered unless asked.
///
/// # Examples
///
/// ```
/// use kvspan::{KvCacheHandle, KvCacheManager, KvCacheManagerConfig, RequestOptions};
///
/// let manager = KvCacheManager::new(KvCacheManagerConfig {
///     num_blocks: 8,
///     block_size: 2,
///     num_kv_heads: 1,
///     head_dim: 4,
///     ..KvCacheManagerConfig::default()
/// })?;
/// let mut handle = manager.allocate(&[1, 2, 3], &RequestOptions::default())?;
/// manager.write(&mut handle, 0, 0, &[1.0; 12], &[2.0; 12])?;
///
/// let keys = handle.key_cache(0)?.expect("the manager has storage");
/// assert_eq!((keys.shape(), keys.num_segments()), ([3, 1, 4], 2));
/// assert_eq!(keys.segment_as::<f32>(1), Some([1.0; 4].as_slice()));
/// # Ok::<(), kvspan::KvError>(())
/// ```
pub trait TensorLike: Send + Sync + fmt::Debug {
    /// Returns `[tokens, num_kv_heads, head_dim]`.
    fn shape(&self) -> [usize; 3];

    /// Returns the type of the elements.
    fn dtype(&self) -> DType;

    /// Returns where the elements are.
    fn device(&self) -> Device;

    /// Returns the number of segments; none without tokens.
    fn num_segments(&self) -> usize;

    /// Returns the bytes of a segment: some whole tokens, in C order. `None` past the last one.
    ///
    /// They must begin at a multiple of the alignment of the [element type](Self::dtype), which is its
    /// [size](DType::itemsize): from elsewhere, `segment_as` has no elements,
    /// and attention fails with [`KvError::ShapeMismatch`](crate::KvError::ShapeMismatch).
    fn segment(&self, index: usize) -> Option<&[u8]>;

    /// Returns what the heads of a segment are multiplied by, `[tokens, num_kv_heads]`; `None` past
    /// the last one, and for types that need no scale.
    fn scales(&self, _index: usize) -> Option<&[f32]> {
        None
    }
}

/// A shared tensor.
pub type TensorRef = Arc<dyn TensorLike>;

impl dyn TensorLike {
    /// Returns the elements of a segment; `None` past the last one, or if they are of another type.
    pub fn segment_as<T: Element>(&self, index: usize) -> Option<&[T]> {
        let bytes = self.segment(index).filter(|_| self.dtype() == T::DTYPE)?;
        bytemuck::try_cast_slice(bytes).ok()
    }

    /// Returns a copy of all elements in one piece; `None` if they are of another type.
    pub fn to_vec<T: Element>(&self) -> Option<Vec<T>> {
        let segments = (0..self.num_segments()).map(|index| self.segment_as(index));
        Some(segments.collect::<Option<Vec<_>>>()?.concat())
    }
}

/// Returns the keys and the values of a span that stays as it is, until both are gone.
pub(super) fn planes<S: Segments + 'static>(span: S) -> [TensorRef; 2] {
    let span = Arc::new(span);
    [Plane::Keys, Plane::Values]
        .map(|plane| -> TensorRef { Arc::new(PlaneOf { span: Arc::clone(&span), plane }) })
}

/// Which half of keys and values.
#[derive(Clone, Copy, Debug)]
enum Plane {
    Keys,
    Values,
}

#[derive(Debug)]
struct PlaneOf<S> {
    span: Arc<S>,
    plane: Plane,
}

/// An owned span, in one or more segments.
pub(super) trait Segments: Send + Sync + fmt::Debug {
    type Element: Element;

    fn num_segments(&self) -> usize;

    fn segment(&self, index: usize) -> Option<KVSpan<'_, Self::Element>>;

    /// Of the whole.
    fn shape(&self) -> [usize; 3];
}

impl<S: Segments> TensorLike for PlaneOf<S> {
    fn shape(&self) -> [usize; 3] {
        self.span.shape()
    }

    fn dtype(&self) -> DType {
        S::Element::DTYPE
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn num_segments(&self) -> usize {
        self.span.num_segments()
    }

    fn segment(&self, index: usize) -> Option<&[u8]> {
        let span = self.span.segment(index)?;
        Some(bytemuck::cast_slice(match self.plane {
            Plane::Keys => span.keys,
            Plane::Values => span.values,
        }))
    }

    fn scales(&self, index: usize) -> Option<&[f32]> {
        let span = self.span.segment(index)?;
        let scales = match self.plane {
            Plane::Keys => span.key_scales,
            Plane::Values => span.value_scales,
        };
        bytemuck::try_cast_slice(scales).ok().filter(|_| S::Element::DTYPE.has_scales())
    }
}

impl<T: Element> Segments for PinnedSpan<T> {
    type Element = T;

    fn num_segments(&self) -> usize {
        usize::from(!self.is_empty())
    }

    fn segment(&self, index: usize) -> Option<KVSpan<'_, T>> {
        (index < self.num_segments()).then(|| self.span())
    }

    fn shape(&self) -> [usize; 3] {
        let span = self.span();
        [span.len(), span.num_heads(), span.head_dim()]
    }
}

impl<T: Element> Segments for PagedSpan<T> {
    type Element = T;

    fn num_segments(&self) -> usize {
        self.num_segments()
    }

    fn segment(&self, index: usize) -> Option<KVSpan<'_, T>> {
        self.segment(index)
    }

    fn shape(&self) -> [usize; 3] {
        PagedSpan::shape(self)
    }
}
