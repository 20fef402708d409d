"""What an engine holds of one sequence's cache, whatever kind of cache it is."""

from __future__ import annotations

import abc
import operator
from typing import Any, SupportsIndex

from kvspan._kvspan import (
    BlockTable,
    CacheHandleStats,
    ContiguousKvCacheHandle,
    PagedKvCacheHandle,
)
from kvspan.errors import InvalidInputError, LayerOutOfRangeError

__all__ = ["KvCacheHandle"]


class KvCacheHandle(abc.ABC):
    """One sequence's keys and values in all layers of a model: a class to derive from.

    ``PagedKvCacheHandle`` and ``ContiguousKvCacheHandle`` are registered with it, so that
    ``isinstance`` says yes to them. Derive from it to bring a cache of your own to code that takes
    any handle, and keep the contract:

    * ``num_heads`` means KV heads.
    * A layer that does not exist is an error. ``None`` means that the cache does not hold the layer
      as a tensor.
    * A tensor is a ``CacheTensor``, or any array, of shape [tokens, num_heads, head_dim]. It stays as
      it is, whatever happens to the handle. ``attention`` reads a ``CacheTensor`` where it lies, and
      copies an array, which has to be of float32, at each call.
    * A handle that is not valid refuses every use with StaleHandleError; its plain properties still
      answer.

    What is provided here checks what the rest returned: a handle that contradicts itself raises
    TypeError or InvalidInputError where it does.

    Examples
    --------
    >>> import kvspan
    >>> manager = kvspan.KvCacheManager(8, block_size=4, num_layers=2)
    >>> handle = manager.allocate([1, 2, 3])
    >>> isinstance(handle, kvspan.KvCacheHandle)
    True
    >>> handle.num_tokens, [tensor.shape for tensor in handle.kv_cache(1)]
    (3, [(3, 4, 64), (3, 4, 64)])
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def block_table(self) -> BlockTable:
        """Which blocks the sequence has, and how long it is."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """Where the memory is: ``"cpu"``."""

    @property
    @abc.abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """Number of KV heads."""

    @property
    @abc.abstractmethod
    def head_dim(self) -> int:
        """Elements of one head."""

    @property
    @abc.abstractmethod
    def is_valid(self) -> bool:
        """Whether the handle can be used: false once its sequence was freed."""

    @property
    @abc.abstractmethod
    def cache_id(self) -> str:
        """The name of the handle, which no other one in this process has."""

    @abc.abstractmethod
    def key_cache(self, layer: SupportsIndex, /) -> Any:
        """Returns the keys of a layer, or ``None``."""

    @abc.abstractmethod
    def value_cache(self, layer: SupportsIndex, /) -> Any:
        """Returns the values of a layer, or ``None``."""

    @abc.abstractmethod
    def clone_handle(self) -> KvCacheHandle:
        """Returns a handle of its own with the same tokens; what one writes the other does not see."""

    @abc.abstractmethod
    def stats(self) -> CacheHandleStats | Any:
        """Returns how much the sequence has, and how full that is."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence: the length that ``block_table`` says."""
        table = self.block_table
        if not isinstance(table, BlockTable):
            raise TypeError(
                f"{self._called('block_table')} must be a BlockTable, not {_kind(table)}"
            )
        return table.sequence_length

    def kv_cache(self, layer: SupportsIndex, /) -> tuple[Any, Any]:
        """Returns the keys and the values of a layer, each or ``None``.

        Raises LayerOutOfRangeError, and TypeError or InvalidInputError if ``num_layers``,
        ``num_heads`` or ``head_dim`` are no counts, or a tensor does not have the shape that they say.
        """
        layer = operator.index(layer)
        num_layers, *dims = map(self._count, ("num_layers", "num_heads", "head_dim"))
        if not 0 <= layer < num_layers:
            raise LayerOutOfRangeError(
                f"there is no layer {layer}: there are {num_layers}", layer, num_layers
            )
        num_tokens = self.num_tokens
        keys, values = self.key_cache(layer), self.value_cache(layer)
        for name, tensor in [("key_cache", keys), ("value_cache", values)]:
            if tensor is not None:
                self._check_shape(f"{name}({layer})", tensor, num_tokens, dims)
        return keys, values

    def _count(self, name: str) -> int:
        count = getattr(self, name)
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise TypeError(f"{self._called(name)} must be an integer, not {_kind(count)}")
        if (number := operator.index(count)) < 1:
            raise InvalidInputError(f"{self._called(name)} must be at least 1, but it is {number}")
        return number

    def _check_shape(self, name: str, tensor: Any, num_tokens: int, dims: list[int]) -> None:
        shape = getattr(tensor, "shape", None)
        if shape is None:
            raise TypeError(
                f"{self._called(name)} must be a tensor, which has a shape, or None, not "
                f"{_kind(tensor)}"
            )
        try:
            shape = tuple(map(operator.index, shape))
        except TypeError:
            raise TypeError(
                f"{self._called(name)} has shape {shape!r:.80}, which is no tuple of integers"
            ) from None
        # Of a cache that is being filled, a layer may have tokens that others still lack.
        if len(shape) != 3 or list(shape[1:]) != dims or shape[0] < num_tokens:
            raise InvalidInputError(
                f"{self._called(name)} has shape {shape}, but ({num_tokens}, {dims[0]}, {dims[1]}) "
                "is wanted: num_tokens, num_heads and head_dim"
            )

    def _called(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"


def _kind(value: object) -> str:
    return type(value).__name__


KvCacheHandle.register(ContiguousKvCacheHandle)
KvCacheHandle.register(PagedKvCacheHandle)
