"""Positions, numbers of tokens and timeouts: what counts as one, and what the others raise."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan.errors import (
    CapacityExceededError,
    InvalidInputError,
    KvTimeoutError,
    NotInitializedError,
    OutOfRangeError,
)
from support import CAPACITY, new_cache, refused, said, token, tokens

KEYS, VALUES = token(9)
ROOM = np.zeros((CAPACITY, 8), np.float32)


class Index:
    """What its maker says it is, to whoever asks for an index."""

    def __init__(self, index):
        self.index = index

    def __index__(self):
        if isinstance(self.index, BaseException):
            raise self.index
        return self.index


# Each call that takes an index, as a call that takes nothing else.
CALLS = {
    "initialize": lambda cache, index: cache.initialize(index),
    "write_kv": lambda cache, index: cache.write_kv(index, KEYS, VALUES),
    "write_kv_batch": lambda cache, index: cache.write_kv_batch([(index, KEYS, VALUES)]),
    "write_kv_batch of arrays": lambda cache, index: cache.write_kv_batch([0, index], *tokens(2)),
    "reserve": lambda cache, index: cache.reserve(index),
    "truncate": lambda cache, index: cache.truncate(index),
    "view from": lambda cache, index: cache.view(index),
    "view to": lambda cache, index: cache.view(0, index),
    "with_read_kv": lambda cache, index: cache.with_read_kv(index, lambda *_: None),
    "with_read_range from": lambda cache, index: cache.with_read_range(index, 6, len),
    "with_read_range to": lambda cache, index: cache.with_read_range(0, index, len),
    "read_range_into from": lambda cache, index: cache.read_range_into(index, 6, ROOM, ROOM),
    "read_range_into to": lambda cache, index: cache.read_range_into(0, index, ROOM, ROOM),
    "read_kv": lambda cache, index: cache.read_kv(index),
    "read_range from": lambda cache, index: cache.read_range(index, 6),
    "read_range to": lambda cache, index: cache.read_range(0, index),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@each_call
@pytest.mark.parametrize(
    "index", [np.int64(1), np.uint8(1), np.array(1), Index(1), True], ids=lambda index: type(index)
)
def test_whatever_has_an_index_is_one(call, index, filled):
    call(filled, index)


@each_call
@pytest.mark.parametrize("index", [1.0, "1", None, b"1", [1], 1j, np.float32(1), object()])
def test_what_has_no_index_is_a_type_error(call, index, filled):
    if index is None and call is CALLS["view to"]:
        assert len(filled.view(0, None)) == 6
        return
    refused(filled, TypeError, call, filled, index)


@each_call
@pytest.mark.parametrize(
    "index",
    [
        -1,
        -(2**63),
        -(2**64),
        2**64,
        2**100,
        np.int64(-1),
        Index(-1),
        pytest.param(10**5000, id="10**5000"),
        pytest.param(-(10**5000), id="-10**5000"),
    ],
)
def test_numbers_that_no_cache_can_reach_are_out_of_range(call, index, filled):
    error = refused(filled, OutOfRangeError, call, filled, index)
    assert isinstance(error, IndexError)
    assert (error.start, error.end, error.len) == (None, None, None)


@each_call
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_of_an_index_passes_unchanged(call, error, filled):
    raised = refused(filled, type(error), call, filled, Index(error))
    # But that an error of a batch may say which entry it is about.
    assert raised is error or (type(error) is ZeroDivisionError and "of the batch" in said(raised))


@pytest.mark.parametrize("index", [CAPACITY, 2**63 - 1, 2**63, 2**64 - 1])
def test_writes_beyond_the_capacity_are_refused(index, filled):
    for call in [
        CALLS["write_kv"],
        CALLS["write_kv_batch"],
        CALLS["write_kv_batch of arrays"],
    ]:
        error = refused(filled, CapacityExceededError, call, filled, index)
        assert error.start == index
        assert error.capacity == CAPACITY
        assert isinstance(error, IndexError)


@pytest.mark.parametrize("index", [6, 7, CAPACITY, 2**63, 2**64 - 1])
def test_reads_beyond_the_length_are_refused(index, filled):
    for name in ["read_kv", "with_read_kv"]:
        error = refused(filled, OutOfRangeError, CALLS[name], filled, index)
        assert (error.start, error.len) == (index, 6)
        assert str(index) in str(error)


@pytest.mark.parametrize(("start", "end"), [(0, 7), (6, 7), (7, 7), (7, 2**64 - 1), (3, 2)])
def test_ranges_that_are_not_stored_are_refused(start, end, filled):
    room = np.zeros(8 * 2 * CAPACITY, np.float32)
    for call in [
        lambda: filled.view(start, end),
        lambda: filled.read_range(start, end),
        lambda: filled.with_read_range(start, end, pytest.fail),
        lambda: filled.read_range_into(start, min(end, CAPACITY), room, room),
    ]:
        error = refused(filled, OutOfRangeError, call)
        assert error.start == start
        assert error.len == (None if start > end else 6)


@pytest.mark.parametrize("length", [7, CAPACITY, 2**64 - 1])
def test_truncate_never_grows(length, filled):
    error = refused(filled, OutOfRangeError, filled.truncate, length)
    assert (error.end, error.len) == (length, 6)


def test_no_tokens_are_no_length_to_initialize(filled):
    for cache in [new_cache(), filled]:
        refused(cache, InvalidInputError, cache.initialize, 0)


def test_writes_come_after_initialize(cache):
    for name in ["write_kv", "write_kv_batch", "write_kv_batch of arrays"]:
        with pytest.raises(NotInitializedError):
            CALLS[name](cache, 1)
        assert (len(cache), cache.nbytes) == (0, 0)


def test_arguments_are_checked_before_the_cache(cache):
    refused(cache, InvalidInputError, cache.write_kv, CAPACITY, KEYS[:1], VALUES)
    with pytest.raises(CapacityExceededError):
        new_cache().write_kv(CAPACITY, KEYS, VALUES)


# Arrays of indices


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        ([0, -1], OutOfRangeError),
        (np.array([0, -1]), OutOfRangeError),
        ([0, 2**64], OutOfRangeError),
        ([2**63, -1], OutOfRangeError),
        ([0, CAPACITY], CapacityExceededError),
        (np.array([0, 2**64 - 1], np.uint64), CapacityExceededError),
        ([0.0, 1.0], TypeError),
        (np.array([0, 1], np.float32), TypeError),
        (np.array([True, False]), TypeError),
        (["0", "1"], TypeError),
        ("01", TypeError),
        ([0, None], TypeError),
        ([[0], [1]], TypeError),
        (np.array([[0], [1]]), TypeError),
        (np.array([[0, 1]]), TypeError),
        (np.array(0), TypeError),
        (0, TypeError),
        (np.array(["2026-01-01", "2026-01-02"], "M8[D]"), TypeError),
    ],
    ids=str,
)
def test_wrong_indices_of_a_batch_are_refused(indices, error, filled):
    refused(filled, error, filled.write_kv_batch, indices, *tokens(2))


def test_wrong_index_of_a_batch_is_named(filled):
    error = refused(filled, OutOfRangeError, filled.write_kv_batch, [0, -1], *tokens(2))
    assert "entry 1 of the batch" in said(error)


# Timeouts

WAITS = {
    "write_kv": lambda cache, timeout: cache.write_kv(0, KEYS, VALUES, timeout=timeout),
    "write_kv_batch": lambda cache, timeout: cache.write_kv_batch(
        [(0, KEYS, VALUES)], timeout=timeout
    ),
    "write_kv_batch of arrays": lambda cache, timeout: cache.write_kv_batch(
        [0], KEYS[None], VALUES[None], timeout=timeout
    ),
    "truncate": lambda cache, timeout: cache.truncate(0, timeout=timeout),
    "reset": lambda cache, timeout: cache.reset(timeout=timeout),
}
each_wait = pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)


@each_wait
@pytest.mark.parametrize(
    "timeout", [None, 0, 0.0, -0.0, 1e-300, 3, 1e300, float("inf"), np.float32(1), 2**100, True]
)
def test_timeouts_are_seconds(call, timeout, filled):
    call(filled, timeout)


@each_wait
@pytest.mark.parametrize(
    "timeout", [-1, -1e-9, float("-inf"), float("nan"), np.float32("nan"), -(2**100)]
)
def test_timeouts_can_not_be_negative(call, timeout, filled):
    error = refused(filled, InvalidInputError, call, filled, timeout)
    assert "timeout" in str(error)


@each_wait
@pytest.mark.parametrize("timeout", ["1", b"1", [1], (1, 2), object(), 1j])
def test_timeouts_are_numbers(call, timeout, filled):
    assert "timeout" in str(refused(filled, TypeError, call, filled, timeout))


@each_wait
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_exception_of_a_timeout_passes_unchanged(call, error, filled):
    class Seconds:
        def __float__(self):
            raise error

    assert refused(filled, type(error), call, filled, Seconds()) is error


@each_wait
@pytest.mark.parametrize("timeout", [0, 1e-9, 0.01, 0.12])
def test_timeout_ends_the_wait_for_a_view(call, timeout, filled):
    span = filled.view()
    error = refused(filled, KvTimeoutError, call, filled, timeout)
    assert isinstance(error, TimeoutError)
    assert (error.start, error.pins) == (0, 1)
    assert_array_equal(span.keys, tokens(6)[0])


def test_timeout_is_a_keyword(filled):
    with pytest.raises(TypeError):
        filled.write_kv(0, KEYS, VALUES, 1.0)
    with pytest.raises(TypeError):
        filled.truncate(0, 1.0)
    with pytest.raises(TypeError):
        filled.reset(1.0)
