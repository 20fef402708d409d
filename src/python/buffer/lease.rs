//! A span's memory, and all who have a share of it.

#![expect(unsafe_code, reason = "the number of references to an object")]

use std::ptr::NonNull;

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::handle::{PagedSpan, TensorRef};
use crate::layer::{KVSpan, PinnedSpan, ReservedSpan};
use crate::python::error::{ReleasedError, ViewsAliveError};
use crate::python::fork::ProcessLocal;

/// Bytes of an element.
pub(super) const ITEMSIZE: isize = 4;

/// What holds the memory: the object that arrays and views refer to. When the last of them is gone
/// the tokens are unpinned, or the rows given up.
#[pyclass(name = "_SpanMemory", module = "kvspan._kvspan", frozen, freelist = 64)]
#[derive(Debug)]
pub(in crate::python) struct SpanMemory(ProcessLocal<Owner>);

/// Who owns the rows.
#[derive(Debug)]
enum Owner {
    /// A pin on published rows, which nobody writes.
    Pinned(PinnedSpan),
    /// A reservation, whose rows whoever has a view of them may write; `None` once it is ended,
    /// which needs the last reference to the memory.
    Reserved(Mutex<Option<ReservedSpan>>),
    /// A pin on blocks, which each have a piece of the rows.
    Paged(PagedSpan),
    /// Keys alone, or values alone, in pieces.
    Tensor(TensorRef),
    /// One piece of what `whole` owns.
    Piece { whole: Py<SpanMemory>, index: usize },
}

/// Keys and values, and `[tokens, num_heads, head_dim]`.
type Place = ([NonNull<f32>; 2], [usize; 3]);

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::python) enum Side {
    Keys,
    Values,
}

/// The share of the object that a caller got the span from, until it ends.
///
/// The lock is held for a few instructions, none of them Python's.
#[derive(Debug)]
pub(in crate::python) struct Lease(Mutex<Option<Py<SpanMemory>>>);

/// The keys or the values of a span, as a C-ordered tensor of `f32` with a share of its memory.
#[derive(Debug)]
pub(in crate::python) struct Tensor<'py> {
    pub(super) memory: Bound<'py, SpanMemory>,
    pub(super) data: NonNull<f32>,
    pub(super) layout: Layout,
}

/// How a tensor lies in its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) side: Side,
    pub(super) readonly: bool,
    /// `[tokens, num_heads, head_dim]`; the first does not count if `one_token`.
    axes: [isize; 3],
    one_token: bool,
}

impl Lease {
    pub(in crate::python) fn pinned(py: Python<'_>, pinned: PinnedSpan) -> PyResult<Self> {
        Self::new(py, Owner::Pinned(pinned))
    }

    pub(in crate::python) fn reserved(py: Python<'_>, reserved: ReservedSpan) -> PyResult<Self> {
        Self::new(py, Owner::Reserved(Mutex::new(Some(reserved))))
    }

    pub(in crate::python) fn paged(py: Python<'_>, span: PagedSpan) -> PyResult<Self> {
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

    /// A lease of one piece. It counts as one share of this one, however many there are of its own.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over, `ForkedError` in a child.
    pub(in crate::python) fn piece(&self, py: Python<'_>, index: usize) -> PyResult<Self> {
        let whole = self.memory(py)?;
        whole.get().0.get()?;
        Self::new(py, Owner::Piece { whole, index })
    }

    /// Checks that the memory can be used.
    ///
    /// # Errors
    ///
    /// `ReleasedError` if the lease is over, `ForkedError` in a child.
    pub(in crate::python) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.memory(py)?.get().0.get().map(|_| ())
    }

    fn memory(&self, py: Python<'_>) -> PyResult<Py<SpanMemory>> {
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
        let memory = self.memory(py)?.into_bound(py);
        let (data, layout) = memory.get().locate(side)?;
        Ok(Tensor { memory, data, layout })
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
            reserved.commit();
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
    /// Where one side is, as long as this lives, and how it lies there.
    pub(super) fn locate(&self, side: Side) -> PyResult<(NonNull<f32>, Layout)> {
        let owner = self.0.get()?;
        let ([keys, values], axes) = match owner {
            Owner::Pinned(pinned) => place(&pinned.span()),
            // Of reserved rows, which others may be writing, no slice is made.
            Owner::Reserved(lock) => {
                let reserved = lock.lock();
                let reserved = reserved.as_ref().ok_or_else(over)?;
                let axes = [reserved.len(), reserved.num_heads(), reserved.head_dim()];
                (reserved.pointers(), axes)
            }
            Owner::Paged(_) | Owner::Tensor(_) => self.locate_piece(0)?,
            Owner::Piece { whole, index } => whole.get().locate_piece(*index)?,
        };
        let data = match side {
            Side::Keys => keys,
            Side::Values => values,
        };
        let readonly = !matches!(owner, Owner::Reserved(_));
        let [tokens, heads, dim] = axes.map(isize::try_from);
        let axes = [tokens?, heads?, dim?];
        Ok((data, Layout { side, readonly, axes, one_token: false }))
    }

    /// Where a piece is; past the last one there are no rows.
    fn locate_piece(&self, index: usize) -> PyResult<Place> {
        let (found, [_, heads, dim]) = match self.0.get()? {
            Owner::Paged(span) => (span.segment(index).as_ref().map(place), span.shape()),
            Owner::Tensor(tensor) => {
                let shape @ [_, heads, dim] = tensor.shape();
                let elements = tensor.segment_as::<f32>(index);
                let found = elements.map(|elements| {
                    let axes = [elements.len() / (heads * dim), heads, dim];
                    ([NonNull::from(elements).cast(); 2], axes)
                });
                (found, shape)
            }
            _ => return Err(over()),
        };
        Ok(found.unwrap_or(([NonNull::dangling(); 2], [0, heads, dim])))
    }
}

fn place(span: &KVSpan<'_>) -> Place {
    let planes = [span.keys, span.values].map(|plane| NonNull::from(plane).cast());
    (planes, [span.len(), span.num_heads(), span.head_dim()])
}

impl Tensor<'_> {
    /// The same memory without the axis of tokens, of which there is one.
    pub(in crate::python) fn of_one_token(mut self) -> Self {
        self.layout.one_token = true;
        self
    }
}

impl Layout {
    pub(super) fn axes(&self) -> &[isize] {
        &self.axes[usize::from(self.one_token)..]
    }

    pub(super) fn axes_mut(&mut self) -> &mut [isize] {
        &mut self.axes[usize::from(self.one_token)..]
    }

    /// From one element to the next along each axis, in bytes.
    pub(super) fn strides_bytes(mut self) -> Self {
        // The largest of these is at most the size of the buffer.
        let [_, heads, dim] = self.axes;
        self.axes = [heads * dim * ITEMSIZE, dim * ITEMSIZE, ITEMSIZE];
        self
    }

    pub(super) fn nbytes(&self) -> isize {
        self.axes.iter().product::<isize>() * ITEMSIZE
    }
}

fn over() -> PyErr {
    ReleasedError::new_err(("the span is over: it was released, committed or discarded",))
}
