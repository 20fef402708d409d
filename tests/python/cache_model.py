"""What a cache should do, as naively as it can be said: a list with the number of each token.

Token 0 is zeros, and no two others have an element in common, unless rounding makes them equal. Each
method gives the error that the cache must raise, or makes the change and gives None.
"""

from dataclasses import dataclass

import numpy as np

from kvspan.errors import (
    CapacityExceededError,
    InvalidInputError,
    KvTimeoutError,
    NotInitializedError,
    OutOfRangeError,
    PinnedError,
    ReservedError,
)
from support import CAPACITY, DIM, HEADS, WIDTH


def elements(numbers):
    """Keys and values of tokens with these numbers."""
    numbers = np.array(numbers, np.float32).reshape(-1, 1)
    keys = np.where(numbers == 0, 0, numbers * WIDTH + np.arange(WIDTH, dtype=np.float32))
    # Values that round in another way than the keys. No zero has a sign.
    return keys.reshape(-1, HEADS, DIM), 0 - 1.3 * keys.reshape(-1, HEADS, DIM)


@dataclass(frozen=True, eq=False)
class Pin:
    """Tokens that one view keeps as they are."""

    start: int
    end: int

    def overlaps(self, start, end):
        return max(self.start, start) < min(self.end, end)


class CacheModel:
    def __init__(self):
        self.numbers = []
        self.allocated = False
        self.reserved = None  # the numbers of the rows

    def initialize(self, length):
        if length == 0:
            return InvalidInputError
        self.allocated = True
        length = min(length, CAPACITY)
        if self.reserved is not None and length > len(self.numbers):
            return ReservedError
        self.numbers += [0] * (length - len(self.numbers))
        return None

    def write(self, ats, numbers, pins, timeout):
        if any(at >= CAPACITY for at in ats):
            return CapacityExceededError
        if not ats:
            return None
        if not self.allocated:
            return NotInitializedError
        if min(ats) < len(self.numbers) and self.pins_over(ats, pins):
            return PinnedError if timeout is None else KvTimeoutError
        if self.reserved is not None and max(ats) >= len(self.numbers):
            return ReservedError
        self.numbers += [0] * (max(ats) + 1 - len(self.numbers))
        for at, number in zip(ats, numbers, strict=True):
            self.numbers[at] = number
        return None

    @staticmethod
    def pins_over(ats, pins):
        """How many pins overlap the first of the tokens that any overlaps."""
        counts = [sum(pin.overlaps(at, at + 1) for pin in pins) for at in ats]
        return next(filter(None, counts), 0)

    def append(self, numbers):
        if len(self.numbers) + len(numbers) > CAPACITY:
            return CapacityExceededError
        if self.reserved is not None and numbers:
            return ReservedError
        self.allocated = True
        self.numbers += numbers
        return None

    def truncate(self, length, pins, timeout):
        if length > len(self.numbers):
            return OutOfRangeError
        if length == len(self.numbers):
            return None
        if any(pin.overlaps(length, CAPACITY) for pin in pins):
            return PinnedError if timeout is None else KvTimeoutError
        if self.reserved is not None:
            return ReservedError
        del self.numbers[length:]
        return None

    def reserve(self, count):
        if len(self.numbers) + count > CAPACITY:
            return CapacityExceededError
        if self.reserved is not None:
            return ReservedError
        self.allocated = True
        self.reserved = [0] * count
        return None

    def end_reservation(self, commits):
        if commits:
            self.numbers += self.reserved
        self.reserved = None

    def read(self, start, end):
        return OutOfRangeError if start > end or end > len(self.numbers) else None
