"""Random histories of a cache of any element type, its copies, and everything that is held over them,
beside a model.

After every step the cache must hold what the model says, and whatever is held must be as it was
when it was taken.
"""

import copy
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import kvspan
from cache_model import CacheModel, Pin, elements
from kvspan.errors import InvalidInputError, PinnedError, ReservedError, ViewsAliveError
from rounding import DTYPES, assert_same, rounded, stored
from softmax import softmax_attention
from support import CAPACITY, DIM, HEADS, WIDTH, new_cache

positions = st.integers(0, 6) | st.integers(0, CAPACITY + 2)
ranges = st.tuples(positions, positions).map(sorted) | st.tuples(positions, positions)
counts = st.integers(0, 5)
timeouts = st.sampled_from([None, 0])
# With which the scores of such keys are neither all alike nor far apart.
SCALE = 2.0**-11
# Which one of several: an index into whatever there is.
choices = st.integers(0, 1_000)


@dataclass
class Held:
    """Something that keeps its pin, and what an array over it must show; None for a span."""

    pin: Pin
    thing: object
    expected: np.ndarray | None = None


class Capsule:
    """Gives a capsule that was made earlier to whoever asks for one."""

    def __init__(self, exporter):
        self._capsule = exporter.__dlpack__(max_version=(1, 0))

    def __dlpack__(self, **_):
        return self._capsule

    def __dlpack_device__(self):
        return (1, 0)


# From one thing over the memory to another. A span has two sides.
FROM_SPAN = [
    (0, "elements", lambda span: span.keys),
    (1, "elements", lambda span: span.values),
    (0, "elements", lambda span: span.key_view),
    (1, "elements", lambda span: span.value_view),
]
FROM_INT8 = [
    (0, "scales", lambda span: span.key_scales),
    (1, "scales", lambda span: span.value_scales),
]
FROM_EXPORTER = [
    lambda exporter, _: memoryview(exporter),
    lambda exporter, _: np.asarray(exporter),
    lambda exporter, _: Capsule(exporter),
    lambda exporter, dtype: np.ndarray(exporter.shape, dtype, buffer=exporter),
]
FROM_DLPACK = [lambda exporter, _: np.from_dlpack(exporter)]
FROM_ARRAY = [
    lambda array: array[1:],
    lambda array: array[..., :1],
    lambda array: array.T,
    lambda array: array[::-1],
]
FROM_ROWS = [lambda rows: rows.keys, lambda rows: rows.key_view]


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.dtype, self.handles = None, []
        self.model = CacheModel()
        self.held = []
        self.rows, self.arrays_of_rows = None, []
        self.deep_copies = []
        self.last_number = 0

    def new_numbers(self, count):
        self.last_number += count
        return list(range(self.last_number - count + 1, self.last_number + 1))

    def given(self, numbers, narrow=False):
        """Keys and values to write, which may have been rounded before."""
        dtype = np.float32 if self.dtype == "int8" or not narrow else DTYPES[self.dtype]
        return [side.astype(dtype) for side in elements(numbers)]

    def stored(self, numbers):
        """Elements and scales of the keys, and of the values."""
        return [stored(side, self.dtype) for side in elements(numbers)]

    def shown(self, numbers):
        """Keys and values as float32."""
        return [rounded(side, self.dtype) for side in elements(numbers)]

    def handle(self, choice):
        return self.handles[choice % len(self.handles)]

    def pins(self):
        return {held.pin for held in self.held}

    @staticmethod
    def call(error, call, *arguments, **keywords):
        """The result of a call, or its exception, if that is just what the model says."""
        try:
            result = call(*arguments, **keywords)
        except Exception as raised:
            if type(raised) is not error:
                raise
            return raised.with_traceback(None)
        assert error is None, f"{error.__name__} was not raised"
        return result

    # Writing

    @initialize(dtype=st.sampled_from(list(DTYPES)), count=st.integers(0, 8))
    def begin_with_some_tokens(self, dtype, count):
        self.dtype, self.handles = dtype, [new_cache(dtype=dtype)]
        if count:
            self.append(0, count, "3-d", False)

    @rule(choice=choices, length=positions)
    def initialize(self, choice, length):
        self.call(self.model.initialize(length), self.handle(choice).initialize, length)

    @rule(
        choice=choices,
        at=positions,
        shape=st.sampled_from([(HEADS, DIM), (WIDTH,)]),
        narrow=st.booleans(),
        t=timeouts,
    )
    def write_kv(self, choice, at, shape, narrow, t):
        numbers = self.new_numbers(1)
        arguments = at, *(side.reshape(shape) for side in self.given(numbers, narrow))
        self.check_write([at], numbers, t, self.handle(choice).write_kv, *arguments)

    @rule(
        choice=choices,
        ats=st.lists(positions, max_size=4),
        form=st.sampled_from(["entries", "iterator", "arrays", "flat arrays"]),
        narrow=st.booleans(),
        t=timeouts,
    )
    def write_kv_batch(self, choice, ats, form, narrow, t):
        numbers = self.new_numbers(len(ats))
        keys, values = self.given(numbers, narrow)
        arguments = {
            "entries": (list(zip(ats, keys, values, strict=True)),),
            "iterator": (zip(ats, keys, values, strict=True),),
            "arrays": (ats, keys, values),
            "flat arrays": (np.array(ats, int), keys.reshape(-1, WIDTH), values.reshape(-1, WIDTH)),
        }[form]
        self.check_write(ats, numbers, t, self.handle(choice).write_kv_batch, *arguments)

    def check_write(self, ats, numbers, timeout, call, *arguments):
        pins = self.pins()
        error = self.model.write(ats, numbers, pins, timeout)
        raised = self.call(error, call, *arguments, timeout=timeout)
        if error is PinnedError:
            assert raised.pins == self.model.pins_over(ats, pins)
            assert raised.start in ats

    @rule(
        choice=choices,
        count=counts,
        form=st.sampled_from(["3-d", "2-d", "one", "flat"]),
        narrow=st.booleans(),
    )
    def append(self, choice, count, form, narrow):
        count = 1 if form in ("one", "flat") else count
        numbers, start = self.new_numbers(count), len(self.model.numbers)
        shape = {"2-d": (count, WIDTH), "one": (HEADS, DIM), "flat": (WIDTH,)}.get(
            form, (count, HEADS, DIM)
        )
        arguments = (side.reshape(shape) for side in self.given(numbers, narrow))
        error = self.model.append(numbers)
        result = self.call(error, self.handle(choice).append, *arguments)
        assert error or result == range(start, start + count)

    @rule(choice=choices, length=positions, t=timeouts)
    def truncate(self, choice, length, t):
        error = self.model.truncate(length, self.pins(), t)
        self.call(error, self.handle(choice).truncate, length, timeout=t)

    @rule(choice=choices, t=timeouts)
    def reset(self, choice, t):
        error = self.model.truncate(0, self.pins(), t)
        self.call(error, self.handle(choice).reset, timeout=t)

    # Reservations

    @rule(choice=choices, count=counts)
    def reserve(self, choice, count):
        error = self.model.reserve(count)
        result = self.call(error, self.handle(choice).reserve, count)
        if error is None:
            self.rows = result

    @precondition(lambda self: self.rows is not None)
    @rule(keep=st.booleans(), way=choices)
    def fill(self, keep, way):
        self.model.reserved = self.new_numbers(len(self.rows))
        (keys, key_scales), (values, value_scales) = self.stored(self.model.reserved)
        self.rows.keys[...], self.rows.values[...] = keys, values
        if self.dtype == "int8":
            self.rows.key_scales[...], self.rows.value_scales[...] = key_scales, value_scales
        if keep:
            self.arrays_of_rows.append(FROM_ROWS[way % len(FROM_ROWS)](self.rows))

    @precondition(lambda self: self.arrays_of_rows)
    @rule()
    def drop_arrays_of_rows(self):
        self.arrays_of_rows.clear()

    @precondition(lambda self: self.rows is not None)
    @rule(commits=st.booleans())
    def end_reservation(self, commits):
        alive = len(self.arrays_of_rows)
        end = self.rows.commit if commits else self.rows.discard
        result = self.call(ViewsAliveError if alive else None, end)
        if alive:
            assert result.views == alive
        else:
            self.ended(commits)

    @precondition(lambda self: self.rows is not None and not self.arrays_of_rows)
    @rule(raises=st.booleans())
    def end_reservation_by_its_block(self, raises):
        try:
            with self.rows:
                if raises:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        self.ended(commits=not raises)

    @precondition(lambda self: self.rows is not None)
    @rule()
    def drop_rows(self):
        self.rows = None
        if self.arrays_of_rows:
            # They keep the reservation open.
            self.call(ReservedError, self.handle(0).reserve, 0)
            self.arrays_of_rows.clear()
        self.ended(commits=False)

    def ended(self, commits):
        self.rows = None
        self.model.end_reservation(commits)

    # Reading

    @rule(choice=choices, bounds=ranges)
    def view(self, choice, bounds):
        error = self.model.read(*bounds)
        span = self.call(error, self.handle(choice).view, *bounds)
        if error is None:
            self.held.append(Held(Pin(*bounds), span))

    @precondition(lambda self: self.held)
    @rule(choice=choices, way=choices)
    def derive(self, choice, way):
        """Makes something else over the same memory."""
        held = self.held[choice % len(self.held)]
        if held.expected is None:
            ways = FROM_SPAN + (FROM_INT8 if self.dtype == "int8" else [])
            side, part, make = ways[way % len(ways)]
            expected = self.stored(self.numbers_of(held))[side][part == "scales"]
            self.held.append(Held(held.pin, make(held.thing), expected))
        elif isinstance(held.thing, np.ndarray) and held.thing.ndim > 1:
            make = FROM_ARRAY[way % len(FROM_ARRAY)]
            self.held.append(Held(held.pin, make(held.thing), make(held.expected)))
        elif not isinstance(held.thing, (np.ndarray, memoryview, Capsule)):
            # NumPy's DLPack knows nothing of bfloat16.
            ways = FROM_EXPORTER + (FROM_DLPACK if self.dtype != "bfloat16" else [])
            thing = ways[way % len(ways)](held.thing, held.expected.dtype)
            self.held.append(Held(held.pin, thing, held.expected))

    def numbers_of(self, held):
        return self.model.numbers[held.pin.start : held.pin.end]

    @precondition(lambda self: self.held)
    @rule(choice=choices)
    def drop(self, choice):
        del self.held[choice % len(self.held)]

    @precondition(lambda self: any(held.expected is None for held in self.held))
    @rule(choice=choices, by_release=st.booleans())
    def end_span(self, choice, by_release):
        spans = [held for held in self.held if held.expected is None]
        ending = spans[choice % len(spans)]
        others = [held for held in self.held if held is not ending]
        shared = any(held.pin is ending.pin for held in others)
        if by_release:
            self.call(ViewsAliveError if shared else None, ending.thing.release)
        else:
            with ending.thing:
                assert not ending.thing.released
        assert ending.thing.released == (not (by_release and shared))
        if ending.thing.released:
            self.held = others

    @rule(choice=choices, at=positions, keep=st.booleans())
    def with_read_kv(self, choice, at, keep):
        error = self.model.read(at, at + 1)
        result = self.call(error, self.handle(choice).with_read_kv, at, lambda *sides: sides)
        if error is None:
            expected = [side[0] for side, _ in self.stored([self.model.numbers[at]])]
            for found, side in zip(result, expected, strict=True):
                assert_same(found, side)
            if keep:
                self.held.append(Held(Pin(at, at + 1), result[1], expected[1]))

    @rule(choice=choices, bounds=ranges, keep=st.booleans())
    def with_read_range(self, choice, bounds, keep):
        error = self.model.read(*bounds)
        span = self.call(error, self.handle(choice).with_read_range, *bounds, lambda span: span)
        if keep and error is None:
            self.held.append(Held(Pin(*bounds), span))

    @rule(choice=choices, bounds=ranges, more=counts)
    def read_range_into(self, choice, bounds, more):
        start, end = bounds
        error = self.model.read(start, end)
        room = np.full((2, max(end - start, 0) + more, WIDTH), -1, np.float32)
        self.call(error, self.handle(choice).read_range_into, start, end, *room)
        count = 0 if error else end - start
        numbers = self.model.numbers[start : start + count]
        assert_same(room[:, :count], np.reshape(self.shown(numbers), (2, count, WIDTH)))
        assert np.all(room[:, count:] == -1)

    @rule(choice=choices, count=st.integers(1, 3), window=st.none() | st.integers(1, 12))
    def attend(self, choice, count, window):
        numbers = self.model.numbers
        self.check_attention(self.handle(choice), numbers, min(count, max(len(numbers), 1)), window)

    @precondition(lambda self: any(held.expected is None for held in self.held))
    @rule(choice=choices, window=st.none() | st.integers(1, 12))
    def attend_to_span(self, choice, window):
        spans = [held for held in self.held if held.expected is None]
        held = spans[choice % len(spans)]
        self.check_attention(held.thing, self.numbers_of(held), 1, window)

    def check_attention(self, context, numbers, num_queries, window):
        query = np.random.default_rng(num_queries).standard_normal(
            (num_queries, 2 * HEADS, DIM), np.float32
        )
        error = None if numbers else InvalidInputError
        found = self.call(error, kvspan.attention, query, context, scale=SCALE, window=window)
        if error is None:
            sides = self.shown(numbers)
            expected = softmax_attention(query, *sides, scale=SCALE, window=window)
            tolerance = 1e-5 * np.abs(sides[1]).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)

    # Copies

    @precondition(lambda self: len(self.handles) < 3)
    @rule(choice=choices)
    def share(self, choice):
        self.handles.append(copy.copy(self.handle(choice)))

    @precondition(lambda self: len(self.handles) > 1)
    @rule(choice=choices)
    def drop_handle(self, choice):
        del self.handles[choice % len(self.handles)]

    @precondition(lambda self: len(self.deep_copies) < 2)
    @rule(choice=choices, length=counts)
    def deepcopy(self, choice, length):
        own, numbers = copy.deepcopy(self.handle(choice)), list(self.model.numbers)
        self.check(own, numbers)
        del numbers[length:]
        own.truncate(len(numbers))
        own.initialize(length + 3)
        self.deep_copies.append((own, numbers + [0] * (length + 3 - len(numbers))))

    # After every step

    def check(self, cache, numbers):
        assert len(cache) == len(numbers)
        assert cache.is_empty() == (not numbers)
        sides = zip(cache.read_range(0, len(numbers)), self.shown(numbers), strict=True)
        for found, expected in sides:
            assert found.dtype == (np.float32 if self.dtype == "int8" else self.dtype)
            assert_same(found.astype(np.float32), expected)

    def check_rows(self, rows, numbers):
        """Of a span, or reserved."""
        keys, values = self.stored(numbers)
        assert_same(rows.keys, keys[0])
        assert_same(rows.values, values[0])
        for scales, expected in [(rows.key_scales, keys[1]), (rows.value_scales, values[1])]:
            assert (scales is None) == (expected is None)
            if scales is not None:
                assert_same(scales, expected)

    @invariant()
    def caches_hold_what_the_model_says(self):
        for cache in self.handles:
            self.check(cache, self.model.numbers)
        for cache, numbers in self.deep_copies:
            self.check(cache, numbers)

    @invariant()
    def held_things_are_as_they_were(self):
        for held in self.held:
            if held.expected is None:
                self.check_rows(held.thing, self.numbers_of(held))
            elif isinstance(held.thing, Capsule):
                pass  # can be looked at only once
            else:
                assert_same(np.asarray(held.thing), held.expected)

    @invariant()
    def reserved_rows_are_as_they_were_filled(self):
        if self.rows is not None:
            self.check_rows(self.rows, self.model.reserved)


# To find the shortest history that fails can take minutes, and the slow profile any time.
FAST = settings.get_current_profile_name() == "fast"
TestCache = pytest.mark.timeout(600 if FAST else 0)(CacheMachine.TestCase)
