"""`ReservedSpan`: rows to compute into, which become tokens or never were."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan.errors import CapacityExceededError, ReleasedError, ReservedError, ViewsAliveError
from support import (
    CAPACITY,
    DIM,
    HEADS,
    address,
    assert_holds,
    new_filled_cache,
    refused,
    token,
    tokens,
)


def fill(rows, first):
    rows.keys[...], rows.values[...] = tokens(len(rows), first)


# What is reserved


def test_rows_come_after_the_tokens(filled):
    rows = filled.reserve(3)
    assert (rows.start, rows.end, len(rows)) == (6, 9, 3)
    assert rows.keys.shape == rows.values.shape == (3, HEADS, DIM)
    assert repr(rows) == "ReservedSpan(start=6, end=9, dtype='float32')"


def test_rows_lie_where_the_tokens_will(filled):
    rows = filled.reserve(3)
    keys, values = address(rows.keys), address(rows.values)
    assert np.from_dlpack(rows.key_view).ctypes.data == keys
    rows.commit()
    span = filled.view(6, 9)
    assert (address(span.keys), address(span.values)) == (keys, values)


@pytest.mark.parametrize(
    "consume",
    [
        lambda rows: rows.keys,
        lambda rows: np.asarray(rows.key_view),
        lambda rows: np.frombuffer(rows.key_view, np.float32).reshape(3, HEADS, DIM),
        lambda rows: np.ndarray((3, HEADS, DIM), np.float32, buffer=rows.key_view),
        lambda rows: np.from_dlpack(rows.key_view),
        lambda rows: np.asarray(memoryview(rows.key_view)),
    ],
)
def test_every_way_to_an_array_is_writable(consume, cache):
    rows = cache.reserve(3)
    array = consume(rows)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert address(array) == address(rows.keys)
    array[...] = tokens(3)[0]
    del array
    rows.commit()
    assert_array_equal(cache.read_range(0, 3)[0], tokens(3)[0])


def test_rows_are_zero_to_begin_with_whatever_was_there_before(filled):
    with contextlib.suppress(ZeroDivisionError), filled.reserve(4) as rows:
        fill(rows, first=50)
        raise ZeroDivisionError
    filled.truncate(2)
    rows = filled.reserve(10)
    assert not rows.keys.any()
    assert not rows.values.any()


def test_nobody_sees_the_rows(filled):
    rows = filled.reserve(3)
    fill(rows, first=50)
    assert_holds(filled, *tokens(6))
    assert len(filled.view()) == 6
    with pytest.raises(IndexError):
        filled.read_kv(6)


def test_no_rows_can_be_reserved(filled):
    assert filled.reserve(0).commit() == range(6, 6)
    assert_holds(filled, *tokens(6))


def test_what_does_not_fit_is_refused(filled):
    for count in [CAPACITY - 5, 2**63, 2**64 - 1]:
        error = refused(filled, CapacityExceededError, filled.reserve, count)
        assert (error.start, error.capacity) == (6, CAPACITY)
    filled.reserve(CAPACITY - 6).discard()


# commit() and discard()


def test_commit_publishes_the_rows(filled):
    rows = filled.reserve(3)
    fill(rows, first=7)
    assert not rows.ended
    assert rows.commit() == range(6, 9)
    assert_holds(filled, *tokens(9))
    assert rows.ended
    assert repr(rows) == "ReservedSpan(start=6, end=9, dtype='float32', ended)"


def test_discard_leaves_no_trace(filled):
    rows = filled.reserve(3)
    fill(rows, first=50)
    assert rows.discard() is None
    assert_holds(filled, *tokens(6))
    filled.initialize(9)
    assert not np.any(filled.read_range(6, 9))


def test_dropping_the_rows_gives_them_up(filled):
    rows = filled.reserve(3)
    fill(rows, first=50)
    gone = weakref.ref(rows)
    del rows
    assert gone() is None
    filled.append(*token(7))
    assert_holds(filled, *tokens(7))


@pytest.mark.parametrize("end", ["commit", "discard"])
def test_ended_rows_give_no_memory(end, filled):
    rows = filled.reserve(3)
    getattr(rows, end)()
    for attribute in ["keys", "values", "key_view", "value_view"]:
        with pytest.raises(ReleasedError):
            getattr(rows, attribute)
    with pytest.raises(ReleasedError):
        rows.commit()
    rows.discard()
    with pytest.raises(ReleasedError), rows:
        pytest.fail("ended rows were entered")
    assert (rows.start, rows.end, len(rows)) == (6, 9, 3)


HOLDERS = [
    lambda rows: rows.keys,
    lambda rows: rows.values[1:, 0],
    lambda rows: rows.key_view,
    lambda rows: memoryview(rows.value_view),
    lambda rows: np.ndarray(1, np.float32, buffer=rows.key_view),
    lambda rows: np.from_dlpack(rows.key_view),
    lambda rows: rows.key_view.__dlpack__(),
]


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("end", ["commit", "discard"])
def test_rows_can_not_end_while_something_leads_to_them(end, hold, filled):
    rows = filled.reserve(3)
    held = hold(rows)
    with pytest.raises(ViewsAliveError, match="1 view") as caught:
        getattr(rows, end)()
    assert caught.value.views == 1
    refused(filled, ReservedError, filled.append, *token())
    fill(rows, first=7)
    del held
    getattr(rows, end)()
    assert_holds(filled, *tokens(9 if end == "commit" else 6))


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_leads_to_the_rows_keeps_them_reserved(hold, filled):
    held = hold(filled.reserve(3))
    gc.collect()
    error = refused(filled, ReservedError, filled.append, *token())
    assert (error.start, error.end) == (6, 9)
    del held
    filled.append(*token(7))


def test_arrays_of_the_rows_outlive_the_cache():
    array = new_filled_cache().reserve(3).keys
    gc.collect()
    array[...] = tokens(3)[0]
    assert_array_equal(array, tokens(3)[0])


# Everybody else meanwhile


@pytest.mark.parametrize(
    "move",
    [
        lambda cache: cache.append(*token()),
        lambda cache: cache.initialize(7),
        lambda cache: cache.write_kv(6, *token()),
        lambda cache: cache.write_kv(9, *token(), timeout=0),
        lambda cache: cache.write_kv_batch([(0, *token()), (6, *token())]),
        lambda cache: cache.write_kv_batch([8, 7], *tokens(2)),
        lambda cache: cache.truncate(3),
        lambda cache: cache.reset(timeout=0),
        lambda cache: cache.reserve(1),
        lambda cache: cache.reserve(0),
    ],
)
def test_length_can_not_move(move, filled):
    rows = filled.reserve(3)
    error = refused(filled, ReservedError, move, filled)
    assert (error.start, error.end) == (6, 9)
    rows.discard()
    move(filled)


def test_tokens_can_be_read_and_overwritten(filled):
    rows = filled.reserve(3)
    filled.write_kv(0, *token(50))
    filled.write_kv_batch([5, 1], *tokens(2, first=60))
    filled.initialize(6)
    filled.initialize(2)
    filled.truncate(6)
    assert filled.append(*tokens(0)) == range(6, 6)
    assert_array_equal(filled.read_kv(5), token(60))
    assert_array_equal(filled.view(0, 1).keys[0], token(50)[0])
    assert not rows.keys.any()
    assert rows.commit() == range(6, 9)


def test_too_much_is_reported_before_the_reservation(filled):
    rows = filled.reserve(3)
    refused(filled, CapacityExceededError, filled.append, *tokens(CAPACITY))
    refused(filled, CapacityExceededError, filled.reserve, CAPACITY)
    rows.discard()


# `with`


def test_with_block_commits(filled):
    with filled.reserve(3) as rows:
        fill(rows, first=7)
        assert len(filled) == 6
    assert_holds(filled, *tokens(9))


def test_with_block_discards_on_an_exception_and_lets_it_through(filled):
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as caught, filled.reserve(3) as rows:
        fill(rows, first=50)
        raise error
    assert caught.value is error
    assert_holds(filled, *tokens(6))
    filled.append(*token(7))


@pytest.mark.parametrize("end", ["commit", "discard"])
def test_with_block_may_end_the_rows_itself(end, filled):
    with filled.reserve(3) as rows:
        fill(rows, first=7)
        getattr(rows, end)()
    assert_holds(filled, *tokens(9 if end == "commit" else 6))


def test_with_block_that_keeps_an_array_does_not_commit(filled):
    with pytest.raises(ViewsAliveError, match="still reserved"), filled.reserve(3) as rows:
        keys = rows.keys
        keys[...] = tokens(3, first=7)[0]
    assert_holds(filled, *tokens(6))
    assert not rows.ended
    del keys
    rows.values[...] = tokens(3, first=7)[1]
    rows.commit()
    assert_holds(filled, *tokens(9))


def test_array_that_a_traceback_keeps_gives_the_rows_up_at_last(filled):
    def fails():
        with filled.reserve(3) as rows:
            keys = rows.keys
            raise ZeroDivisionError(keys.shape)

    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    refused(filled, ReservedError, filled.append, *token())
    del caught
    gc.collect()
    filled.append(*token(7))
    assert_holds(filled, *tokens(7))
