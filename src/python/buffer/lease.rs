//! A span's memory, and all who have a share of it.

#![expect(unsafe_code, reason = "the number of references to an object")]

use std::ptr::NonNull;

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::attention::Context;
use crate::dtype::{DType, Element};
use crate::handle::{PagedSpan, TensorLike, TensorRef};
use crate::layer::{KVSpan, ReservedSpan};
use crate::python::error::{ReleasedError, ViewsAliveError};
use crate::python::fork::ProcessLocal;
use crate::python::typed::{AnyPagedSpan, AnyPinnedSpan, AnyReservedSpan, each};

/// What holds the memory: the object that arrays and views refer to. When the last of them is gone
/// the tokens are unpinned, or the rows given up.
#[pyclass(name = "_SpanMemory", module = "kvspan._kvspan", frozen, freelist = 64)]
#[derive(Debug)]
pub(in crate::python) struct SpanMemory(ProcessLocal<Owner>);

/// Who owns the rows.
#[derive(Debug)]
enum Owner {
    /// A pin on published rows, which nobody writes.
    Pinned(AnyPinnedSpan),
    /// A reservation, whose rows whoever has a view of them may write; `None` once it is ended,
    /// which needs the last reference to the memory.
    Reserved(Mutex<Option<AnyReservedSpan>>),
    /// A pin on blocks, which each have a segment of the rows.
    Paged(AnyPagedSpan),
    /// Keys alone, or values alone, in segments.
    Tensor(TensorRef),
    /// One segment of what `whole` owns.
    Segment { whole: Py<SpanMemory>, index: usize },
}

/// Where the rows of a span are.
struct Place {
    dtype: DType,
    /// `[tokens, num_heads, head_dim]`.
    shape: [usize; 3],
    /// Keys and values.
    data: [NonNull<u8>; 2],
    /// What they are multiplied by, if anything.
    scales: [NonNull<u8>; 2],
    readonly: bool,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::python) enum Side {
    Keys,
    Values,
}

/// What there is of each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// `[tokens, num_heads, head_dim]`.
    Data,
    /// `[tokens, num_heads]`.
    Scales,
}

/// The share of the object that a caller got the span from, until it ends.
///
/// The lock is held for a few instructions, none of them Python's.
#[derive(Debug)]
pub(in crate::python) struct Lease(Mutex<Option<Py<SpanMemory>>>);

/// The keys or the values of a span, or their scales, as a C-ordered tensor with a share of its
/// memory.
#[derive(Debug)]
pub(in crate::python) struct Tensor<'py> {
    pub(super) memory: Bound<'py, SpanMemory>,
    pub(super) data: NonNull<u8>,
    pub(super) layout: Layout,
}

/// How a tensor lies in its memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::python) struct Layout {
    side: Side,
    part: Part,
    pub(super) dtype: DType,
    pub(super) readonly: bool,
    axes: [isize; 3],
    /// How many of them count.
    num_axes: usize,
}

impl Lease {
    pub(in crate::python) fn pinned(py: Python<'_>, pinned: AnyPinnedSpan) -> PyResult<Self> {
        Self::new(py, Owner::Pinned(pinned))
    }

    pub(in crate::python) fn reserved(py: Python<'_>, reserved: AnyReservedSpan) -> PyResult<Self> {
        Self::new(py, Owner::Reserved(Mutex::new(Some(reserved))))
    }

    pub(in crate::python) fn paged(py: Python<'_>, span: AnyPagedSpan) -> PyResult<Self> {
        Self::of_memory(py, ProcessLocal::with_long_drop(Owner::Paged(span)))
    }

    pub(in crate::python) fn one_side(py: Python<'_>, tensor: TensorRef) -> PyResult<Self> {
        Self::of_memory(py, ProcessLocal::with_long_drop(Owner::Tensor(tensor)))
    }

    fn new(py: Python<'_>, owner: Owner) -> PyResult<Self> {
        Self::of_memory(py, ProcessLocal::new(owner))
    }

    fn of_memory(py: Python<'_>, owner: ProcessLocal<Owner>) -> PyResult<Self> {
        let memory = Py::new(py, SpanMemory(owner))?;
        Ok(Self(Mutex::new(Some(memory))))
    }

    /// A lease of one segment. It counts as one share of this one, however many it has itself.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over, `ForkedError` in a child.
    pub(in crate::python) fn segment(&self, py: Python<'_>, index: usize) -> PyResult<Self> {
        let whole = self.memory(py)?;
        whole.get().0.get()?;
        Self::new(py, Owner::Segment { whole, index })
    }

    /// Checks that the memory can be used.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over, `ForkedError` in a child.
    pub(in crate::python) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.memory(py)?.get().0.get().map(|_| ())
    }

    /// What holds the memory, with a share of its own.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over.
    pub(in crate::python) fn memory(&self, py: Python<'_>) -> PyResult<Py<SpanMemory>> {
        self.0.lock().as_ref().map(|memory| memory.clone_ref(py)).ok_or_else(over)
    }

    /// The keys or the values, with a share of their own.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over, `ForkedError` in a child.
    pub(in crate::python) fn tensor<'py>(
        &self,
        py: Python<'py>,
        side: Side,
    ) -> PyResult<Tensor<'py>> {
        SpanMemory::tensor(self.memory(py)?.into_bound(py), side, Part::Data)
    }

    /// What the heads of the keys or of the values are multiplied by, with a share of its own; `None`
    /// if the element type needs no scale.
    ///
    /// # Errors
    ///
    /// Those of [`tensor`](Self::tensor).
    pub(in crate::python) fn scales<'py>(
        &self,
        py: Python<'py>,
        side: Side,
    ) -> PyResult<Option<Tensor<'py>>> {
        let memory = self.memory(py)?.into_bound(py);
        if !memory.get().place()?.dtype.has_scales() {
            return Ok(None);
        }
        SpanMemory::tensor(memory, side, Part::Scales).map(Some)
    }

    /// Ends the lease, if it is not over.
    ///
    /// # Errors
    ///
    /// `ViewsAliveError` if others have a share, `ForkedError` in a child; the lease goes on.
    pub(in crate::python) fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py).map(drop)
    }

    /// Ends the lease and publishes the reserved rows.
    ///
    /// # Errors
    ///
    /// As for [`release`](Self::release), and `ReleasedError` if the lease was over before.
    pub(in crate::python) fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.take(py)?.ok_or_else(over)?;
        if let Owner::Reserved(reserved) = memory.get().0.get()?
            && let Some(reserved) = reserved.lock().take()
        {
            each!(reserved, reserved => reserved.commit());
        }
        Ok(())
    }

    /// Ends the lease; others keep their shares.
    pub(in crate::python) fn give_up(&self) {
        let memory = self.0.lock().take();
        drop(memory);
    }

    pub(in crate::python) fn is_over(&self) -> bool {
        self.0.lock().is_none()
    }

    fn take(&self, _py: Python<'_>) -> PyResult<Option<Py<SpanMemory>>> {
        let mut lease = self.0.lock();
        let kept = match lease.as_ref().map(|memory| memory.get().0.get()).transpose()? {
            Some(Owner::Reserved(_)) => "reserved",
            _ => "pinned",
        };
        // Whoever leads to the memory refers to this object, and new references come from here or
        // from old ones: if there is only one, nobody else can make another.
        let views = lease.as_ref().map_or(0, |memory| {
            // SAFETY: the object is alive, and this thread is attached.
            unsafe { ffi::Py_REFCNT(memory.as_ptr()) - 1 }
        });
        if views == 0 {
            return Ok(lease.take());
        }
        drop(lease);
        Err(ViewsAliveError::new_err((
            format!(
                "{views} view(s) over the rows are alive, so that they are still {kept}: first \
                 delete the arrays, memoryviews and tensors over them, then try again"
            ),
            views,
        )))
    }
}

impl SpanMemory {
    fn tensor(memory: Bound<'_, Self>, side: Side, part: Part) -> PyResult<Tensor<'_>> {
        let Place { mut dtype, shape, data, scales, readonly } = memory.get().place()?;
        let [keys, values] = match part {
            Part::Data => data,
            Part::Scales => scales,
        };
        let data = match side {
            Side::Keys => keys,
            Side::Values => values,
        };
        let [tokens, heads, dim] = shape.map(isize::try_from);
        let mut axes = [tokens?, heads?, dim?];
        let mut num_axes = axes.len();
        if part == Part::Scales {
            (dtype, num_axes, axes[2]) = (DType::F32, 2, 1);
        }
        Ok(Tensor { memory, data, layout: Layout { side, part, dtype, readonly, axes, num_axes } })
    }

    /// The keys and values of pinned rows, to be attended to.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if it holds none, `ForkedError` in a child.
    pub(in crate::python) fn context(&self) -> PyResult<Context<'_>> {
        let context = match self.0.get()? {
            Owner::Pinned(pinned) => each!(pinned, pinned => Context::of_span(pinned.span())),
            Owner::Paged(span) => each!(span, span => Context::of_paged(span)),
            Owner::Segment { whole, index } => return whole.get().context_of_segment(*index),
            Owner::Reserved(_) | Owner::Tensor(_) => return Err(over()),
        };
        Ok(context?)
    }

    fn context_of_segment(&self, index: usize) -> PyResult<Context<'_>> {
        let Owner::Paged(span) = self.0.get()? else { return Err(over()) };
        Ok(each!(span, span => Context::of_span(span.segment(index).ok_or_else(over)?))?)
    }

    /// The tensor that it holds.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if it holds none, `ForkedError` in a child.
    pub(in crate::python) fn whole_tensor(&self) -> PyResult<TensorRef> {
        match self.0.get()? {
            Owner::Tensor(tensor) => Ok(TensorRef::clone(tensor)),
            _ => Err(over()),
        }
    }

    /// Where the rows are, as long as this lives.
    fn place(&self) -> PyResult<Place> {
        match self.0.get()? {
            Owner::Pinned(pinned) => Ok(each!(pinned, pinned => Place::of_span(&pinned.span()))),
            Owner::Reserved(lock) => {
                let reserved = lock.lock();
                let reserved = reserved.as_ref().ok_or_else(over)?;
                Ok(each!(reserved, reserved => Place::of_reserved(reserved)))
            }
            Owner::Paged(_) | Owner::Tensor(_) => self.place_of_segment(0),
            Owner::Segment { whole, index } => whole.get().place_of_segment(*index),
        }
    }

    /// Where a segment is; past the last one there are no rows.
    fn place_of_segment(&self, index: usize) -> PyResult<Place> {
        match self.0.get()? {
            Owner::Paged(span) => Ok(each!(span, span => Place::of_paged(span, index))),
            Owner::Tensor(tensor) => Ok(Place::of_tensor(&**tensor, index)),
            _ => Err(over()),
        }
    }
}

impl Place {
    fn of_span<T: Element>(span: &KVSpan<'_, T>) -> Self {
        Self {
            dtype: T::DTYPE,
            shape: [span.len(), span.num_heads(), span.head_dim()],
            data: [span.keys, span.values].map(|part| NonNull::from(part).cast()),
            scales: [span.key_scales, span.value_scales].map(|part| NonNull::from(part).cast()),
            readonly: true,
        }
    }

    /// Of rows which others may be writing no slice is made.
    fn of_reserved<T: Element>(reserved: &ReservedSpan<T>) -> Self {
        let [keys, values] = reserved.pointers();
        Self {
            dtype: T::DTYPE,
            shape: [reserved.len(), reserved.num_heads(), reserved.head_dim()],
            data: [keys.0, values.0].map(NonNull::cast),
            scales: [keys.1, values.1].map(NonNull::cast),
            readonly: false,
        }
    }

    fn of_paged<T: Element>(span: &PagedSpan<T>, index: usize) -> Self {
        let segment = span.segment(index);
        segment.as_ref().map_or_else(|| Self::nowhere(T::DTYPE, span.shape()), Self::of_span)
    }

    /// Of a tensor, which is both sides.
    fn of_tensor(tensor: &dyn TensorLike, index: usize) -> Self {
        let (dtype, shape @ [_, heads, dim]) = (tensor.dtype(), tensor.shape());
        let Some(data) = tensor.segment(index) else { return Self::nowhere(dtype, shape) };
        let scales = tensor.scales(index).unwrap_or_default();
        Self {
            dtype,
            shape: [data.len() / (heads * dim * dtype.itemsize()), heads, dim],
            data: [NonNull::from(data).cast(); 2],
            scales: [NonNull::from(scales).cast(); 2],
            readonly: true,
        }
    }

    /// Of no rows.
    fn nowhere(dtype: DType, [_, heads, dim]: [usize; 3]) -> Self {
        // Aligned for all element types, and for scales.
        let nothing = [NonNull::<f32>::dangling().cast(); 2];
        Self { dtype, shape: [0, heads, dim], data: nothing, scales: nothing, readonly: true }
    }
}

impl<'py> Tensor<'py> {
    /// The same memory without the axis of tokens, of which there is one.
    pub(in crate::python) fn of_one_token(mut self) -> Self {
        self.layout.axes.rotate_left(1);
        self.layout.num_axes -= 1;
        self
    }

    /// What the layout says of the memory, looked up again.
    pub(super) fn again(
        py: Python<'py>,
        memory: &Py<SpanMemory>,
        layout: &Layout,
    ) -> PyResult<Self> {
        SpanMemory::tensor(memory.bind(py).clone(), layout.side, layout.part)
    }
}

impl Layout {
    /// Of data in C order that one side of a span could have, and that can be written.
    pub(in crate::python) fn of_copy(dtype: DType, shape: [usize; 3]) -> PyResult<Self> {
        let [tokens, heads, dim] = shape.map(isize::try_from);
        let (side, part, axes) = (Side::Keys, Part::Data, [tokens?, heads?, dim?]);
        Ok(Self { side, part, dtype, readonly: false, axes, num_axes: axes.len() })
    }

    pub(super) fn axes(&self) -> &[isize] {
        &self.axes[..self.num_axes]
    }

    pub(super) fn axes_mut(&mut self) -> &mut [isize] {
        &mut self.axes[..self.num_axes]
    }

    /// Bytes of an element.
    pub(super) fn itemsize(&self) -> isize {
        // At most four.
        self.dtype.itemsize().cast_signed()
    }

    /// From one element to the next along each axis, in bytes.
    pub(super) fn strides_bytes(mut self) -> Self {
        // The largest of these is at most the size of the buffer.
        let mut stride = self.itemsize();
        for axis in self.axes_mut().iter_mut().rev() {
            stride *= std::mem::replace(axis, stride);
        }
        self
    }

    pub(super) fn nbytes(&self) -> isize {
        self.axes().iter().product::<isize>() * self.itemsize()
    }
}

fn over() -> PyErr {
    ReleasedError::new_err(("the span is over: it was released, committed or discarded",))
}
