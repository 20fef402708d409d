"""Types of the extension module. The documentation is in the module itself: see ``help()``."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import (
    Any,
    Literal,
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
from matplotlib.axes import Axes as _Axes
from typing_extensions import Buffer, CapsuleType

from kvspan.handle import KvCacheHandle

__all__ = [
    "AttentionPool",
    "BlockCopy",
    "BlockPicture",
    "BlockTable",
    "CacheHandleStats",
    "CacheTensor",
    "ContiguousKvCacheHandle",
    "Inspection",
    "KVCacheConfig",
    "KVSpan",
    "KeyChain",
    "KvCacheManager",
    "LayerKvCache",
    "LeakReport",
    "ManagerStats",
    "PagedKvCacheHandle",
    "PagedSpan",
    "ReservedSpan",
    "SequenceReport",
    "TensorView",
    "__version__",
    "_after_fork_in_child",
    "attention",
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
# Of the element type that the cache was made for.
_Array: TypeAlias = npt.NDArray[Any]
_Float32Array: TypeAlias = npt.NDArray[np.float32]
# What holds elements in C order. Element type, shape and order are checked at run time.
_Memory: TypeAlias = _Array | Buffer | _SupportsDLPack
# "float32", "float16", "bfloat16" or "int8", or what NumPy or ml_dtypes calls it.
_DType: TypeAlias = str | np.dtype[Any] | type[np.generic]
# Seconds.
_Timeout: TypeAlias = SupportsFloat | SupportsIndex | None
_Indices: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[SupportsIndex]
# Ids of tokens or blocks. The element type of an array is checked at run time.
_Ids: TypeAlias = npt.NDArray[np.integer[Any]] | Buffer | _SupportsDLPack | Sequence[SupportsIndex]
_ExtraKeys: TypeAlias = (
    Mapping[int, Iterable[str | bytes]] | Iterable[tuple[SupportsIndex, Iterable[str | bytes]]]
)

@final
class KVCacheConfig:
    """The shape of a cache: one layer's keys and values of one sequence."""

    def __new__(
        cls,
        max_tokens_per_seq: SupportsIndex = 8192,
        num_heads: SupportsIndex = 4,
        hidden_dim_per_head: SupportsIndex = 64,
        dtype: _DType = "float32",
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
        keys: _Memory,
        values: _Memory,
        *,
        timeout: _Timeout = None,
    ) -> None:
        """Writes one token."""
    @overload
    def write_kv_batch(
        self,
        token_idxs: Iterable[tuple[SupportsIndex, _Memory, _Memory]],
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
        keys: _Memory,
        values: _Memory,
        *,
        timeout: _Timeout = None,
    ) -> None: ...
    def append(self, keys: _Memory, values: _Memory) -> range:
        """Adds tokens at the end."""
    def reserve(self, num_tokens: SupportsIndex) -> ReservedSpan:
        """Takes the next rows to compute into."""
    def truncate(self, new_len: SupportsIndex, *, timeout: _Timeout = None) -> None:
        """Makes `new_len` the length."""
    def reset(self, *, timeout: _Timeout = None) -> None:
        """Makes the cache empty."""
    def view(self, start: SupportsIndex = 0, end: SupportsIndex | None = None) -> KVSpan:
        """Returns a view of the tokens."""
    def with_read_kv(self, token_idx: SupportsIndex, f: Callable[[_Array, _Array], _R]) -> _R:
        """Calls ``f(keys, values)`` with one token."""
    def with_read_range(
        self, start_token: SupportsIndex, end_token: SupportsIndex, f: Callable[[KVSpan], _R]
    ) -> _R:
        """Calls ``f(span)`` with a range of tokens."""
    def read_range_into(
        self,
        start_token: SupportsIndex,
        end_token: SupportsIndex,
        keys_out: _Memory,
        values_out: _Memory,
    ) -> None:
        """Copies tokens to the start of two arrays."""
    def read_kv(self, token_idx: SupportsIndex) -> tuple[_Array, _Array]:
        """Returns copies of one token's keys and values."""
    def read_range(self, start: SupportsIndex, end: SupportsIndex) -> tuple[_Array, _Array]:
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
    def keys(self) -> _Array:
        """The keys: a read-only array [tokens, num_heads, head_dim]."""
    @property
    def values(self) -> _Array:
        """The values: a read-only array [tokens, num_heads, head_dim]."""
    @property
    def key_scales(self) -> _Float32Array | None:
        """What the heads of int8 keys are multiplied by: a read-only array [tokens, num_heads]."""
    @property
    def value_scales(self) -> _Float32Array | None:
        """What the heads of int8 values are multiplied by."""
    @property
    def key_view(self) -> TensorView:
        """The keys as an exporter for other libraries."""
    @property
    def value_view(self) -> TensorView:
        """The values as an exporter for other libraries."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
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
    def keys(self) -> _Array:
        """The keys to write: an array [tokens, num_heads, head_dim]."""
    @property
    def values(self) -> _Array:
        """The values to write: an array [tokens, num_heads, head_dim]."""
    @property
    def key_scales(self) -> _Float32Array | None:
        """What the heads of int8 keys are multiplied by: a array [tokens, num_heads]."""
    @property
    def value_scales(self) -> _Float32Array | None:
        """What the heads of int8 values are multiplied by."""
    @property
    def key_view(self) -> TensorView:
        """The keys as an exporter for other libraries."""
    @property
    def value_view(self) -> TensorView:
        """The values as an exporter for other libraries."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
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

@final
class KvCacheManager:
    """Blocks of keys and values, which sequences with equal beginnings share."""

    def __new__(
        cls,
        num_blocks: SupportsIndex,
        *,
        block_size: SupportsIndex = 16,
        num_layers: SupportsIndex = 1,
        num_kv_heads: SupportsIndex = 4,
        head_dim: SupportsIndex = 64,
        dtype: _DType = "float32",
        storage: bool = True,
        prefix_caching: bool = True,
        merge_duplicates: bool = True,
        namespace: str | bytes | None = None,
        epoch: SupportsIndex = 0,
    ) -> Self: ...
    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can have."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    @property
    def num_layers(self) -> int:
        """Number of layers."""
    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements of one head."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def has_storage(self) -> bool:
        """Whether there is memory for keys and values."""
    @property
    def prefix_caching(self) -> bool:
        """Whether sequences share what they have in common."""
    @property
    def namespace(self) -> bytes | None:
        """What keys and values depend on besides the tokens."""
    @property
    def epoch(self) -> int:
        """The epoch of the sequences that are started now."""
    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
    def allocate(
        self,
        tokens: _Ids | KeyChain,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: str | None = None,
        extra_keys: _ExtraKeys | None = None,
        lookahead: SupportsIndex = 0,
    ) -> PagedKvCacheHandle:
        """Starts a sequence."""
    def probe(
        self,
        tokens: _Ids | KeyChain,
        *,
        cache_salt: str | None = None,
        lora_id: str | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> int:
        """Returns how many tokens would be cached."""
    def extend(self, handle: PagedKvCacheHandle, num_tokens: SupportsIndex = 1) -> BlockCopy | None:
        """Makes room for more tokens."""
    def truncate(self, handle: PagedKvCacheHandle, new_len: SupportsIndex) -> BlockCopy | None:
        """Makes `new_len` the length."""
    def fork(self, handle: PagedKvCacheHandle, request_id: str | None = None) -> PagedKvCacheHandle:
        """Starts a sequence that shares all tokens of another one."""
    def free(self, handle: PagedKvCacheHandle) -> None:
        """Gives the blocks of a sequence back."""
    def free_request(self, request_id: str) -> None:
        """Gives the blocks of the sequence of this name back."""
    def write(
        self,
        handle: PagedKvCacheHandle,
        layer: SupportsIndex,
        position: SupportsIndex,
        keys: _Memory,
        values: _Memory,
    ) -> None:
        """Writes tokens of a sequence in one layer."""
    def write_many(
        self,
        layer: SupportsIndex,
        handles: Iterable[PagedKvCacheHandle],
        positions: _Indices,
        keys: _Memory,
        values: _Memory,
    ) -> None:
        """Writes one token of each of many sequences in one layer."""
    def prepare_write(
        self, handle: PagedKvCacheHandle, start: SupportsIndex, end: SupportsIndex
    ) -> list[BlockCopy]:
        """Makes the blocks of tokens the sequence's own."""
    def view(
        self,
        handle: PagedKvCacheHandle,
        layer: SupportsIndex,
        start: SupportsIndex = 0,
        end: SupportsIndex | None = None,
    ) -> PagedSpan:
        """Returns a view of tokens of one layer."""
    def read_range(
        self,
        handle: PagedKvCacheHandle,
        layer: SupportsIndex,
        start: SupportsIndex = 0,
        end: SupportsIndex | None = None,
    ) -> tuple[_Array, _Array]:
        """Returns copies of the tokens' keys and values."""
    def read_range_into(
        self,
        handle: PagedKvCacheHandle,
        layer: SupportsIndex,
        start: SupportsIndex,
        end: SupportsIndex,
        keys_out: _Memory,
        values_out: _Memory,
    ) -> None:
        """Copies tokens to the start of two arrays."""
    def commit(self, handle: PagedKvCacheHandle, tokens: _Ids) -> None:
        """Says which tokens were written."""
    def block_keys(
        self,
        tokens: _Ids,
        *,
        cache_salt: str | None = None,
        lora_id: str | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> KeyChain:
        """Returns tokens with the keys of their blocks."""
    def allocate_many(
        self,
        tokens: Iterable[_Ids | KeyChain],
        request_ids: Iterable[str | None] | None = None,
        *,
        cache_salts: Iterable[str | None] | None = None,
        lora_ids: Iterable[str | None] | None = None,
        lookahead: SupportsIndex = 0,
    ) -> list[PagedKvCacheHandle]:
        """Starts many sequences."""
    def extend_many(
        self,
        handles: Iterable[PagedKvCacheHandle],
        num_tokens: SupportsIndex | _Indices = 1,
        *,
        copies: list[tuple[int, BlockCopy]] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Makes room for more tokens of each sequence."""
    def commit_many(
        self,
        handles: Iterable[PagedKvCacheHandle],
        tokens: _Ids | Iterable[_Ids],
    ) -> None:
        """Says which tokens of each sequence were written."""
    def free_many(self, handles: Iterable[PagedKvCacheHandle]) -> None:
        """Gives the blocks of many sequences back."""
    def block_tables(self, handles: Iterable[PagedKvCacheHandle]) -> npt.NDArray[np.int32]:
        """Returns which blocks each sequence has."""
    def slot_mappings(
        self,
        handles: Iterable[PagedKvCacheHandle],
        starts: SupportsIndex | _Indices,
        ends: SupportsIndex | _Indices | None = None,
    ) -> npt.NDArray[np.int64]:
        """Returns the slots of tokens of each sequence."""
    def num_cached_tokens(self, handles: Iterable[PagedKvCacheHandle]) -> npt.NDArray[np.int64]:
        """Returns how much of each sequence was cached."""
    def advance_epoch(self) -> int:
        """Raises the epoch, so that nothing older is found."""
    def reset_prefix_cache(self) -> None:
        """Makes everything that is cached impossible to find."""
    def stats(self) -> ManagerStats:
        """Returns the numbers."""
    def inspect(self) -> Inspection:
        """Returns a picture of all blocks."""
    def leak_report(self) -> LeakReport:
        """Returns who holds blocks."""
    def check_integrity(self) -> None:
        """Counts everything again that is kept count of."""
    def plot(self, ax: _Axes | None = None) -> _Axes:
        """Draws the pool with matplotlib."""
    def _repr_html_(self) -> str: ...

@final
class KeyChain:
    """The tokens of a sequence and the keys of its full blocks."""

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The tokens."""
    @property
    def block_keys(self) -> list[bytes]:
        """The keys of the full blocks."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    def extended(self, tokens: _Ids) -> KeyChain:
        """Returns the chain of these tokens and more."""
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class PagedKvCacheHandle(KvCacheHandle):  # it is registered with it
    """One sequence of a manager, and its hold on its blocks."""

    @property
    def manager(self) -> KvCacheManager:
        """The manager that made it."""
    @property
    def cache_id(self) -> str:
        """The name of the handle."""
    @property
    def is_valid(self) -> bool:
        """Whether the handle can be used."""
    @property
    def block_table(self) -> BlockTable:
        """Which blocks the sequence has."""
    @block_table.setter
    def block_table(self, table: BlockTable, /) -> None: ...
    @property
    def device(self) -> str:
        """Where the memory is."""
    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence."""
    @property
    def num_cached_tokens(self) -> int:
        """How many of the first tokens were there already."""
    @property
    def num_committed_tokens(self) -> int:
        """How many of the first tokens were committed."""
    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The tokens that are known."""
    @property
    def num_layers(self) -> int:
        """Number of layers."""
    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements of one head."""
    def key_cache(self, layer: SupportsIndex) -> CacheTensor | None:
        """Returns the keys of a layer."""
    def value_cache(self, layer: SupportsIndex) -> CacheTensor | None:
        """Returns the values of a layer."""
    def kv_cache(self, layer: SupportsIndex) -> tuple[CacheTensor | None, CacheTensor | None]:
        """Returns the keys and the values of a layer."""
    def clone_handle(self) -> PagedKvCacheHandle:
        """Returns a handle of its own with the same tokens."""
    def stats(self) -> CacheHandleStats:
        """Returns how much the sequence has."""
    def close(self) -> None:
        """Frees the sequence, unless that was done before."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class ContiguousKvCacheHandle(KvCacheHandle):  # it is registered with it
    """One sequence in one layer cache a layer."""

    def __new__(cls, layers: Iterable[LayerKvCache]) -> Self: ...
    def append(self, layer: SupportsIndex, keys: _Memory, values: _Memory) -> range:
        """Adds tokens to one layer."""
    def layer(self, layer: SupportsIndex) -> LayerKvCache:
        """Returns the cache of a layer."""
    @property
    def block_table(self) -> BlockTable:
        """Which blocks the sequence has."""
    @property
    def cache_id(self) -> str:
        """The name of the handle."""
    @property
    def is_valid(self) -> bool:
        """Whether the handle can be used."""
    @property
    def device(self) -> str:
        """Where the memory is."""
    @property
    def num_tokens(self) -> int:
        """Number of tokens that all layers have."""
    @property
    def num_layers(self) -> int:
        """Number of layers."""
    @property
    def num_heads(self) -> int:
        """Number of KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements of one head."""
    def key_cache(self, layer: SupportsIndex) -> CacheTensor | None:
        """Returns the keys of a layer."""
    def value_cache(self, layer: SupportsIndex) -> CacheTensor | None:
        """Returns the values of a layer."""
    def kv_cache(self, layer: SupportsIndex) -> tuple[CacheTensor | None, CacheTensor | None]:
        """Returns the keys and the values of a layer."""
    def clone_handle(self) -> ContiguousKvCacheHandle:
        """Returns a handle of its own on the same layers."""
    def stats(self) -> CacheHandleStats:
        """Returns how much the sequence has."""
    def close(self) -> None:
        """Gives the layers up, unless that was done before."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class CacheTensor:
    """A layer's keys, or its values, where they lie."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape."""
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def device(self) -> str:
        """Where the elements are."""
    @property
    def num_segments(self) -> int:
        """Number of segments."""
    @property
    def segments(self) -> list[_Array]:
        """The segments in order."""
    @property
    def scales(self) -> list[_Float32Array] | None:
        """What the heads of int8 segments are multiplied by."""
    @property
    def released(self) -> bool:
        """Whether the tensor is over."""
    def numpy(self) -> _Array:
        """Returns one array."""
    def release(self) -> None:
        """Ends the tensor now."""
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
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __len__(self) -> int: ...

@final
class PagedSpan:
    """A view of tokens of one layer of a sequence."""

    @property
    def segments(self) -> list[KVSpan]:
        """The segments in order."""
    @property
    def num_segments(self) -> int:
        """Number of segments."""
    @property
    def start(self) -> int:
        """Position of the first token in the sequence."""
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
        """Whether the view is over."""
    def release(self) -> None:
        """Ends the view now."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __iter__(self) -> Iterator[KVSpan]: ...
    def __len__(self) -> int: ...

@final
class BlockTable:
    """Which blocks a sequence has."""

    def __new__(
        cls,
        block_size: SupportsIndex,
        physical_blocks: _Ids = (),
        sequence_length: SupportsIndex = 0,
    ) -> Self: ...
    @property
    def physical_blocks(self) -> list[int]:
        """Ids of the sequence's blocks."""
    @property
    def logical_to_physical(self) -> list[int]:
        """Ids by index."""
    @property
    def sequence_length(self) -> int:
        """Tokens of the sequence."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
    @property
    def free_tokens(self) -> int:
        """How many more tokens there is room for."""
    @property
    def has_free_space(self) -> bool:
        """Whether there is room for one more token."""
    @staticmethod
    def blocks_needed_for_length(length: SupportsIndex, block_size: SupportsIndex) -> int:
        """Returns the number of blocks that tokens need."""
    def add_blocks(self, blocks: _Ids) -> None:
        """Appends blocks."""
    def replace_block(self, block_index: SupportsIndex, block: SupportsIndex) -> int:
        """Puts a block in the place of another."""
    def extend_sequence(self, additional: SupportsIndex) -> None:
        """Makes the sequence longer."""
    def truncate(self, new_len: SupportsIndex) -> list[int]:
        """Shortens the sequence."""
    def slot(self, position: SupportsIndex) -> int:
        """Returns the slot of a token."""
    def slot_mapping(self, start: SupportsIndex, end: SupportsIndex) -> npt.NDArray[np.int64]:
        """Returns the slots of tokens."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]
    def __reduce__(self) -> tuple[type[Self], tuple[int, list[int], int]]: ...

@final
class BlockCopy:
    """A block that was replaced by a copy."""

    @property
    def block_index(self) -> int:
        """Position of the block in its sequence."""
    @property
    def source(self) -> int:
        """Id of the block that the sequence had."""
    @property
    def target(self) -> int:
        """Id of the block that it has instead."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class ManagerStats:
    """The numbers of a manager."""

    @property
    def num_blocks(self) -> int:
        """All blocks."""
    @property
    def num_free(self) -> int:
        """Blocks that nobody has, and that hold nothing."""
    @property
    def num_cached(self) -> int:
        """Blocks that nobody has, but whose content can be found."""
    @property
    def num_in_use(self) -> int:
        """Blocks that a sequence or a view has."""
    @property
    def num_pinned(self) -> int:
        """Blocks in use that only a view has."""
    @property
    def num_committed(self) -> int:
        """Blocks whose content can be found."""
    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
    @property
    def num_sequences(self) -> int:
        """Sequences alive."""
    @property
    def query_tokens(self) -> int:
        """Tokens that were asked for."""
    @property
    def hit_tokens(self) -> int:
        """Those of them that were cached."""
    @property
    def miss_tokens(self) -> int:
        """Those of them that were not."""
    @property
    def hit_rate(self) -> float:
        """The share of the tokens that were cached."""
    @property
    def num_allocations(self) -> int:
        """Allocations that succeeded."""
    @property
    def num_failures(self) -> int:
        """Allocations that were refused."""
    @property
    def num_evictions(self) -> int:
        """Cached blocks that were reused."""
    @property
    def num_copies(self) -> int:
        """Blocks that were copied."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Inspection:
    """A plain picture of all blocks."""

    @property
    def free_queue(self) -> list[int]:
        """Ids of the blocks that nobody has."""
    @property
    def blocks(self) -> list[BlockPicture]:
        """Every block."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class BlockPicture:
    """One block in an inspection."""

    @property
    def block(self) -> int:
        """Id of the block."""
    @property
    def state(self) -> Literal["free", "cached", "in_use", "pinned"]:
        """Who has it."""
    @property
    def reference_count(self) -> int:
        """Sequences that hold it."""
    @property
    def pin_count(self) -> int:
        """Views that pin it."""
    @property
    def key(self) -> bytes | None:
        """The name of its content."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class LeakReport:
    """Who holds blocks."""

    @property
    def sequences(self) -> list[SequenceReport]:
        """The sequences alive."""
    @property
    def pinned_blocks(self) -> list[tuple[int, int]]:
        """Blocks with views, and how many."""
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class SequenceReport:
    """One sequence in a leak report."""

    @property
    def cache_id(self) -> str:
        """The name of its handle."""
    @property
    def request_id(self) -> str | None:
        """The name it was allocated under."""
    @property
    def blocks(self) -> list[int]:
        """Ids of its blocks."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class CacheHandleStats:
    """What a handle has."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the sequence's memory."""
    @property
    def blocks_allocated(self) -> int:
        """Blocks of the sequence."""
    @property
    def tokens_stored(self) -> int:
        """Tokens of the sequence."""
    @property
    def utilization(self) -> float:
        """The share of the slots that have a token."""
    @property
    def last_access(self) -> float:
        """When the handle was last used."""

@final
class AttentionPool:
    """Threads that compute attention."""

    def __new__(cls, num_threads: SupportsIndex) -> Self: ...
    @property
    def num_threads(self) -> int:
        """How many threads compute, the caller's among them."""
    @property
    def instructions(self) -> Literal["avx512", "avx2", "portable"]:
        """What the processor offers and is used."""

_Attended: TypeAlias = LayerKvCache | KVSpan | PagedSpan | KvCacheHandle
_Out = TypeVar("_Out", bound=_Memory)

# A sequence of caches must be a list or a tuple, which is checked at run time: of a list, type checkers
# would want the very type of its items.
@overload
def attention(
    query: _Memory,
    cache: _Attended | Sequence[_Attended],
    layer: SupportsIndex | None = None,
    *,
    scale: SupportsFloat | None = None,
    causal: bool = True,
    window: SupportsIndex | None = None,
    softcap: SupportsFloat | None = None,
    query_lens: _Indices | None = None,
    kv_lens: SupportsIndex | _Indices | None = None,
    out: None = None,
    pool: AttentionPool | None = None,
) -> _Float32Array:
    """Returns softmax(query @ keys * scale) @ values."""

@overload
def attention(
    query: _Memory,
    cache: _Attended | Sequence[_Attended],
    layer: SupportsIndex | None = None,
    *,
    scale: SupportsFloat | None = None,
    causal: bool = True,
    window: SupportsIndex | None = None,
    softcap: SupportsFloat | None = None,
    query_lens: _Indices | None = None,
    kv_lens: SupportsIndex | _Indices | None = None,
    out: _Out,
    pool: AttentionPool | None = None,
) -> _Out: ...
def _after_fork_in_child(had_threads: bool) -> None:
    """Marks all existing objects as the parent's."""
