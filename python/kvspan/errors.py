"""The exceptions of kvspan.

Each is a :class:`KvCacheError`, and also the built-in exception that a Python author would catch.
The numbers in the message are attributes as well. After any of them the cache is as it was.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "CapacityExceededError",
    "ForkedError",
    "InvalidConfigError",
    "InvalidInputError",
    "KvCacheError",
    "KvTimeoutError",
    "NotInitializedError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PinnedError",
    "ReleasedError",
    "ReservedError",
    "ViewsAliveError",
    "WouldDeadlockError",
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


class ForkedError(KvCacheError, RuntimeError):
    """An object that was made before ``fork()`` was used in the child.

    Or the child wanted to make a cache although the parent had other threads when it forked.
    """
