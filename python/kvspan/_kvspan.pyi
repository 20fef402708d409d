"""Types of the extension module. The documentation is in the module itself: see ``help()``."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import (
    Any,
    Protocol,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    final,
    overload,
    type_check_only,
)

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, CapsuleType

__all__ = [
    "KVCacheConfig",
    "KVSpan",
    "LayerKvCache",
    "ReservedSpan",
    "TensorView",
    "__version__",
    "_after_fork_in_child",
]

__version__: str

@type_check_only
class _SupportsDLPack(Protocol):
    """Any object that exports its memory through DLPack, such as a PyTorch tensor."""

    def __dlpack__(self, *, stream: None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

@type_check_only
class _ExportsBuffer:
    """The buffer protocol, which is no method at run time before Python 3.12."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

_R = TypeVar("_R")
_Float32Array: TypeAlias = npt.NDArray[np.float32]
# What holds float32 elements in C order. Element type, shape and order are checked at run time.
_Float32Memory: TypeAlias = _Float32Array | Buffer | _SupportsDLPack
# Seconds.
_Timeout: TypeAlias = SupportsFloat | SupportsIndex | None
_Indices: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[SupportsIndex]

@final
class KVCacheConfig:
    """The shape of a cache: one layer's keys and values of one sequence."""

    def __new__(
        cls,
        max_tokens_per_seq: SupportsIndex = 8192,
        num_heads: SupportsIndex = 4,
        hidden_dim_per_head: SupportsIndex = 64,
        dtype: str | np.dtype[np.float32] | type[np.float32] = "float32",
    ) -> Self: ...
    @property
    def max_tokens_per_seq(self) -> int:
        """The capacity, in tokens."""
    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
    @property
    def hidden_dim_per_head(self) -> int:
        """Elements of one head."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def token_width(self) -> int:
        """Elements of one token's keys."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[Self], tuple[int, int, int, str]]: ...

@final
class LayerKvCache:
    """The keys and values of one sequence in one transformer layer."""

    def __new__(cls, config: KVCacheConfig | None = None) -> Self: ...
    @property
    def config(self) -> KVCacheConfig:
        """The configuration the cache was made with."""
    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements of one head."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; 0 before it is allocated."""
    def initialize(self, seq_len: SupportsIndex) -> None:
        """Makes the first tokens readable."""
    def write_kv(
        self,
        token_idx: SupportsIndex,
        keys: _Float32Memory,
        values: _Float32Memory,
        *,
        timeout: _Timeout = None,
    ) -> None:
        """Writes one token."""
    @overload
    def write_kv_batch(
        self,
        token_idxs: Iterable[tuple[SupportsIndex, _Float32Memory, _Float32Memory]],
        keys: None = None,
        values: None = None,
        *,
        timeout: _Timeout = None,
    ) -> None:
        """Writes many tokens, all or none."""
    @overload
    def write_kv_batch(
        self,
        token_idxs: _Indices,
        keys: _Float32Memory,
        values: _Float32Memory,
        *,
        timeout: _Timeout = None,
    ) -> None: ...
    def append(self, keys: _Float32Memory, values: _Float32Memory) -> range:
        """Adds tokens at the end."""
    def reserve(self, num_tokens: SupportsIndex) -> ReservedSpan:
        """Takes the next rows to compute into."""
    def truncate(self, new_len: SupportsIndex, *, timeout: _Timeout = None) -> None:
        """Makes `new_len` the length."""
    def reset(self, *, timeout: _Timeout = None) -> None:
        """Makes the cache empty."""
    def view(self, start: SupportsIndex = 0, end: SupportsIndex | None = None) -> KVSpan:
        """Returns a view of the tokens."""
    def with_read_kv(
        self, token_idx: SupportsIndex, f: Callable[[_Float32Array, _Float32Array], _R]
    ) -> _R:
        """Calls ``f(keys, values)`` with one token."""
    def with_read_range(
        self, start_token: SupportsIndex, end_token: SupportsIndex, f: Callable[[KVSpan], _R]
    ) -> _R:
        """Calls ``f(span)`` with a range of tokens."""
    def read_range_into(
        self,
        start_token: SupportsIndex,
        end_token: SupportsIndex,
        keys_out: _Float32Memory,
        values_out: _Float32Memory,
    ) -> None:
        """Copies tokens to the start of two arrays."""
    def read_kv(self, token_idx: SupportsIndex) -> tuple[_Float32Array, _Float32Array]:
        """Returns copies of one token's keys and values."""
    def read_range(
        self, start: SupportsIndex, end: SupportsIndex
    ) -> tuple[_Float32Array, _Float32Array]:
        """Returns copies of the tokens' keys and values."""
    def is_empty(self) -> bool:
        """Returns true if no tokens are stored."""
    def prefault(self) -> None:
        """Has the system provide the whole buffer now."""
    def __len__(self) -> int: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, _memo: object, /) -> Self: ...

@final
class KVSpan:
    """A view of tokens, which do not change while it lives."""

    @property
    def keys(self) -> _Float32Array:
        """The keys: a read-only array [tokens, num_heads, head_dim]."""
    @property
    def values(self) -> _Float32Array:
        """The values: a read-only array [tokens, num_heads, head_dim]."""
    @property
    def key_view(self) -> TensorView:
        """The keys as an exporter for other libraries."""
    @property
    def value_view(self) -> TensorView:
        """The values as an exporter for other libraries."""
    @property
    def start(self) -> int:
        """Position of the first token in the cache."""
    @property
    def end(self) -> int:
        """Position one past the last token."""
    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements of one head."""
    @property
    def released(self) -> bool:
        """Whether the span is over."""
    def release(self) -> None:
        """Ends the pin now."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __len__(self) -> int: ...

@final
class ReservedSpan:
    """Rows past the length of a cache, to compute keys and values into."""

    @property
    def keys(self) -> _Float32Array:
        """The keys to write: an array [tokens, num_heads, head_dim]."""
    @property
    def values(self) -> _Float32Array:
        """The values to write: an array [tokens, num_heads, head_dim]."""
    @property
    def key_view(self) -> TensorView:
        """The keys as an exporter for other libraries."""
    @property
    def value_view(self) -> TensorView:
        """The values as an exporter for other libraries."""
    @property
    def start(self) -> int:
        """Position that the first row will have."""
    @property
    def end(self) -> int:
        """Position one past the last row."""
    @property
    def ended(self) -> bool:
        """Whether the rows were committed or discarded, or the ``with`` block is over."""
    def commit(self) -> range:
        """Publishes the rows."""
    def discard(self) -> None:
        """Gives the rows up."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        _exception: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...
    def __len__(self) -> int: ...

@final
class TensorView(_ExportsBuffer):
    """The keys or the values of a span, as memory that other libraries read in place."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
    @property
    def readonly(self) -> bool:
        """Whether the memory is only to be read."""
    def __len__(self) -> int: ...
    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def _after_fork_in_child(had_threads: bool) -> None:
    """Marks all existing objects as the parent's."""
