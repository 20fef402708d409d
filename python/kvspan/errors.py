"""The exceptions of kvspan.

Each is a :class:`KvCacheError`, and also the built-in exception that a Python author would catch.
The numbers in the message are attributes as well. After any of them the cache is as it was.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "BlockIndexError",
    "BlocksInUseError",
    "CapacityExceededError",
    "CorruptedError",
    "DuplicateBlockError",
    "ForeignHandleError",
    "ForkedError",
    "InconsistentTableError",
    "InvalidConfigError",
    "InvalidInputError",
    "KvCacheError",
    "KvTimeoutError",
    "LayerOutOfRangeError",
    "LayersDifferError",
    "NoStorageError",
    "NoThreadsError",
    "NotInitializedError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PinnedError",
    "ReleasedError",
    "RequestExistsError",
    "ReservedError",
    "SlotOverflowError",
    "StaleHandleError",
    "TokenMismatchError",
    "UnknownBlockError",
    "UnknownRequestError",
    "ViewsAliveError",
    "WouldDeadlockError",
    "WrongBlockStateError",
]


class KvCacheError(Exception):
    """Base of all exceptions of this package.

    ``args`` is the message and then the numbers; a number that does not apply is ``None``.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", *numbers: Any) -> None:
        # Not through super(): an OSError, as TimeoutError is one, takes two and more arguments for
        # an errno and what belongs to it.
        self.args = (message, *numbers)
        for position, field in enumerate(self._fields):
            setattr(self, field, numbers[position] if position < len(numbers) else None)

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidConfigError(KvCacheError, ValueError):
    """The geometry of a cache is impossible: a zero, a negative number, or a size that overflows."""


class InvalidInputError(KvCacheError, ValueError):
    """An array has the wrong dtype, shape, layout or size, or an argument has no sensible value."""


class OutOfRangeError(KvCacheError, IndexError):
    """Tokens ``start..end`` are not stored: there are ``len`` of them, or the range is no range.

    Also for a number that is no position, such as a negative one; all fields are ``None`` then.
    """

    _fields = ("start", "end", "len")
    start: int | None
    end: int | None
    len: int | None


class CapacityExceededError(KvCacheError, IndexError):
    """Tokens ``start..end`` do not fit into a cache of ``capacity`` tokens."""

    _fields = ("start", "end", "capacity")
    start: int
    end: int
    capacity: int


class NotInitializedError(KvCacheError, RuntimeError):
    """``write_kv`` or ``write_kv_batch`` came before ``initialize``."""


class OutOfMemoryError(KvCacheError, MemoryError):
    """The system does not give the ``bytes`` that the buffer needs."""

    _fields = ("bytes",)
    bytes: int


class PinnedError(KvCacheError, BufferError):
    """Tokens ``start..end`` can not change, because ``pins`` views of them are alive.

    An array, memoryview or tensor that was made from a view keeps it alive.
    """

    _fields = ("start", "end", "pins")
    start: int
    end: int
    pins: int


class ReservedError(KvCacheError, BufferError):
    """The length can not move, because a reservation of tokens ``start..end`` is open."""

    _fields = ("start", "end")
    start: int
    end: int


class ViewsAliveError(KvCacheError, BufferError):
    """A span can not be released, or a reservation not be ended, because ``views`` over it are alive.

    Arrays, memoryviews, tensors, capsules, and the objects from ``key_view`` and ``value_view`` count.
    """

    _fields = ("views",)
    views: int


class ReleasedError(KvCacheError, ValueError):
    """A span was used after ``release()``, or a reservation after it was ended."""


class KvTimeoutError(KvCacheError, TimeoutError):
    """The timeout ran out while ``pins`` views, or closures, kept tokens ``start..end`` as they are."""

    _fields = ("start", "end", "pins")
    start: int
    end: int
    pins: int


class WouldDeadlockError(KvCacheError, RuntimeError):
    """A write would wait for a reader on its own thread.

    Callbacks from Python run under a pin and no lock, so Python code does not normally meet this.
    """


class OutOfBlocksError(KvCacheError, MemoryError):
    """A call had to take ``needed`` blocks, but only ``free`` and ``evictable`` ones are there.

    Blocks that only views keep, ``pinned`` of them, come back when the views are gone.
    """

    _fields = ("needed", "free", "evictable", "pinned")
    needed: int
    free: int
    evictable: int
    pinned: int


class StaleHandleError(KvCacheError, ValueError):
    """The handle ``cache_id`` was used, or freed again, after its sequence was freed."""

    _fields = ("cache_id",)
    cache_id: str


class ForeignHandleError(KvCacheError, ValueError):
    """The handle ``cache_id`` was given to a manager that did not make it."""

    _fields = ("cache_id",)
    cache_id: str


class RequestExistsError(KvCacheError, ValueError):
    """A live sequence has the name ``request_id`` already, or another one of the same call."""

    _fields = ("request_id",)
    request_id: str


class UnknownRequestError(KvCacheError, KeyError):
    """No live sequence has the name ``request_id``; to free a request twice ends here."""

    _fields = ("request_id",)
    request_id: str


class TokenMismatchError(KvCacheError, ValueError):
    """The token at position ``token`` is not the one that the sequence was allocated with."""

    _fields = ("token",)
    token: int


class LayerOutOfRangeError(KvCacheError, IndexError):
    """There is no layer ``layer``: there are ``num_layers``.

    Also for a number that is no layer anywhere, such as a negative one; both fields are ``None``.
    """

    _fields = ("layer", "num_layers")
    layer: int | None
    num_layers: int | None


class LayersDifferError(KvCacheError, ValueError):
    """The cache of layer ``layer`` has another shape, capacity or element type than that of layer 0."""

    _fields = ("layer",)
    layer: int


class NoStorageError(KvCacheError, RuntimeError):
    """A manager that keeps count of blocks alone was asked for their content, or to copy it unseen."""


class NoThreadsError(KvCacheError, RuntimeError):
    """The system does not give a pool its ``num_threads``, the caller's among them, or they are over 4096."""

    _fields = ("num_threads",)
    num_threads: int


class BlocksInUseError(KvCacheError, RuntimeError):
    """The prefix cache can not be reset while ``in_use`` blocks are in use, or pinned by views."""

    _fields = ("in_use",)
    in_use: int


class UnknownBlockError(KvCacheError, IndexError):
    """There is no block ``block``: the blocks are 1 to ``num_blocks``.

    In a block table, which knows of no pool, ``num_blocks`` is ``None``.
    """

    _fields = ("block", "num_blocks")
    block: int
    num_blocks: int | None


class BlockIndexError(KvCacheError, IndexError):
    """A sequence has no block at ``block_index``: it has ``num_blocks``."""

    _fields = ("block_index", "num_blocks")
    block_index: int
    num_blocks: int


class DuplicateBlockError(KvCacheError, ValueError):
    """The block ``block`` would be in a block table twice."""

    _fields = ("block",)
    block: int


class InconsistentTableError(KvCacheError, ValueError):
    """A block table contradicts itself, or what the sequence has; ``reason`` says how."""

    _fields = ("reason",)
    reason: str


class WrongBlockStateError(KvCacheError, RuntimeError):
    """The block ``block`` is ``state``, but it must be ``wanted``.

    Two sequences that share a block they did not write commit it with different tokens, for example.
    """

    _fields = ("block", "state", "wanted")
    block: int
    state: str
    wanted: str


class SlotOverflowError(KvCacheError, OverflowError):
    """The slot of the token at position ``token`` is too large a number."""

    _fields = ("token",)
    token: int


class CorruptedError(KvCacheError, RuntimeError):
    """The books contradict themselves: ``what`` should be ``recorded``, but is ``counted``.

    That is a bug in this package.
    """

    _fields = ("what", "recorded", "counted")
    what: str
    recorded: int
    counted: int


class ForkedError(KvCacheError, RuntimeError):
    """An object that was made before ``fork()`` was used in the child.

    Or the child wanted to make a cache although the parent had other threads when it forked.
    """
