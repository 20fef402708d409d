"""Reading: copies, reads into the caller's memory, and callbacks."""

import array
import contextlib
import ctypes

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan import KVSpan
from kvspan.errors import InvalidInputError, OutOfRangeError
from support import CAPACITY, DIM, HEADS, WIDTH, new_cache, refused, token, tokens

UNTOUCHED = 7.0


# Copies


def test_read_kv_gives_one_token(filled):
    keys, values = filled.read_kv(2)
    assert_array_equal((keys, values), token(3))
    assert keys.shape == values.shape == (HEADS, DIM)


def test_read_range_gives_tokens(filled):
    keys, values = filled.read_range(1, 4)
    assert_array_equal((keys, values), tokens(3, first=2))
    assert keys.shape == values.shape == (3, HEADS, DIM)


@pytest.mark.parametrize("read", [lambda c: c.read_kv(0), lambda c: c.read_range(0, 1)])
def test_copies_are_the_caller_s_own(read, filled):
    result = read(filled)
    assert type(result) is tuple
    for copied in result:
        assert copied.dtype == np.float32
        assert copied.flags.writeable
        assert copied.flags.owndata
        assert copied.flags.c_contiguous
        copied[...] = UNTOUCHED
    assert_array_equal(filled.read_kv(0), token())
    filled.reset()  # nothing is pinned


@pytest.mark.parametrize("at", [0, 3, 6])
def test_empty_range_reads_as_no_tokens(at, filled):
    keys, values = filled.read_range(at, at)
    assert keys.shape == values.shape == (0, HEADS, DIM)


def test_empty_range_is_fine_before_the_first_write(cache):
    assert cache.read_range(0, 0)[0].shape == (0, HEADS, DIM)
    cache.read_range_into(0, 0, np.empty(0, np.float32), np.empty((0, WIDTH), np.float32))
    assert len(cache.view()) == len(cache.view(0, 0)) == 0
    assert cache.with_read_range(0, 0, len) == 0
    assert cache.nbytes == 0


# read_range_into


@pytest.mark.parametrize(
    "shape", [(3, HEADS, DIM), (3, WIDTH), (3 * WIDTH,), (3 * WIDTH + 1,), (5, HEADS, DIM)]
)
def test_tokens_are_read_into_the_start_of_an_array(shape, filled):
    keys, values = np.full((2, *shape), UNTOUCHED, np.float32)
    assert filled.read_range_into(2, 5, keys, values) is None
    for read, expected in zip((keys, values), tokens(3, first=3), strict=True):
        assert_array_equal(read.ravel()[: 3 * WIDTH], expected.ravel())
        assert np.all(read.ravel()[3 * WIDTH :] == UNTOUCHED)


def test_one_token_is_read_into_its_own_shape(filled):
    keys, values = np.empty((2, HEADS, DIM), np.float32)
    filled.read_range_into(5, 6, keys, values)
    assert_array_equal((keys, values), token(6))


@pytest.mark.parametrize(
    "room",
    [
        lambda count: np.zeros(count, np.float32),
        lambda count: memoryview(bytearray(4 * count)).cast("f"),
        lambda count: array.array("f", bytes(4 * count)),
        lambda count: (ctypes.c_float * count)(),
    ],
    ids=["array", "memoryview of bytearray", "array.array", "ctypes array"],
)
def test_tokens_can_be_read_into(room, filled):
    keys, values = room(3 * WIDTH), room(3 * WIDTH)
    filled.read_range_into(0, 3, keys, values)
    assert_array_equal(np.frombuffer(keys, np.float32), tokens(3)[0].ravel())
    assert_array_equal(np.frombuffer(values, np.float32), tokens(3)[1].ravel())


def test_tokens_can_be_read_into_reserved_rows(filled):
    with filled.reserve(3) as rows:
        filled.read_range_into(0, 3, rows.keys, rows.values)
    assert_array_equal(filled.read_range(6, 9), tokens(3))


@pytest.mark.parametrize("short", ["keys", "values"])
@pytest.mark.parametrize("shape", [(3 * WIDTH - 1,), (2, HEADS, DIM), (HEADS, DIM), (0,)])
def test_too_short_an_array_is_refused_and_left_alone(short, shape, filled):
    room = {side: np.full((3, HEADS, DIM), UNTOUCHED, np.float32) for side in ("keys", "values")}
    room[short] = np.full(shape, UNTOUCHED, np.float32)
    error = refused(filled, InvalidInputError, filled.read_range_into, 0, 3, *room.values())
    assert f"the buffer for the {short} has {room[short].size} elements" in str(error)
    for untouched in room.values():
        assert np.all(untouched == UNTOUCHED)


def test_size_is_checked_before_the_range(filled):
    short, enough = np.empty(1, np.float32), np.empty(99, np.float32)
    refused(filled, OutOfRangeError, filled.read_range_into, 5, 7, enough, enough)
    refused(filled, InvalidInputError, filled.read_range_into, 5, 7, short, enough)
    refused(filled, OutOfRangeError, filled.read_range_into, 7, 5, short, short)


# Callbacks


def test_callback_gets_one_token(filled):
    def f(keys, values):
        for side in (keys, values):
            assert isinstance(side, np.ndarray)
            assert side.shape == (HEADS, DIM)
            assert not side.flags.writeable
        assert_array_equal((keys, values), token(4))
        return result

    result = object()
    assert filled.with_read_kv(3, f) is result


def test_callback_gets_a_span(filled):
    def f(span):
        assert type(span) is KVSpan
        assert (span.start, span.end, len(span)) == (2, 5, 3)
        assert_array_equal((span.keys, span.values), tokens(3, first=3))
        return result

    result = object()
    assert filled.with_read_range(2, 5, f) is result


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), OutOfRangeError("mine", 1)]
)
def test_exception_of_a_callback_passes_unchanged(error, filled):
    def f(*_):
        raise error

    for call in [
        lambda: filled.with_read_kv(0, f),
        lambda: filled.with_read_range(0, 2, f),
    ]:
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
        assert error.__cause__ is error.__context__ is None


def test_tokens_are_free_again_when_the_callback_s_exception_is_gone(filled):
    def f(*arguments):
        raise ValueError(arguments)

    with contextlib.suppress(ValueError):
        filled.with_read_kv(0, f)
    with contextlib.suppress(ValueError):
        filled.with_read_range(0, 6, f)
    filled.reset()


def test_callback_is_not_called_for_tokens_that_are_not_there(filled):
    for call, arguments in [
        (filled.with_read_kv, (6,)),
        (filled.with_read_kv, (2**64 - 1,)),
        (filled.with_read_range, (0, 7)),
        (filled.with_read_range, (3, 2)),
    ]:
        refused(filled, OutOfRangeError, call, *arguments, pytest.fail)


def test_tokens_are_free_again_when_the_callback_is_over(filled):
    filled.with_read_kv(0, lambda keys, values: (keys + values).sum())
    filled.with_read_range(0, 6, lambda span: span.keys.sum())
    filled.reset()


@pytest.mark.parametrize(
    "keep",
    [
        lambda cache: cache.with_read_kv(1, lambda keys, _: keys),
        lambda cache: cache.with_read_kv(1, lambda _, values: values[0]),
        lambda cache: cache.with_read_range(1, 2, lambda span: span),
        lambda cache: cache.with_read_range(1, 2, lambda span: span.values),
        lambda cache: cache.with_read_range(1, 2, lambda span: memoryview(span.key_view)),
    ],
)
def test_what_a_callback_keeps_stays_pinned(keep, filled):
    kept = keep(filled)
    with pytest.raises(BufferError):
        filled.write_kv(1, *token(9))
    filled.write_kv(0, *token(9))
    del kept
    filled.write_kv(1, *token(9))


@pytest.mark.parametrize("not_callable", [None, 3, "f"])
def test_callback_must_be_callable(not_callable, filled):
    refused(filled, TypeError, filled.with_read_kv, 0, not_callable)
    refused(filled, TypeError, filled.with_read_range, 0, 1, not_callable)
    filled.reset()


# All of them


def test_real_keys_and_values_come_back_bit_for_bit(test_data):
    file = test_data / "smollm2_kv_sample.npz"
    if not file.is_file():
        pytest.skip(f"KVSPAN_TEST_DATA has no {file.name}")
    with np.load(file) as sample:
        layers = list(zip(sample["k"], sample["v"], strict=True))
    for keys, values in layers:
        count, heads, dim = keys.shape
        cache = new_cache(count, heads, dim)
        cache.append(keys[: count // 2], values[: count // 2])
        for row in range(count // 2, count):
            cache.append(keys[row], values[row])
        span = cache.view()
        into = np.empty_like(keys), np.empty_like(values)
        cache.read_range_into(0, count, *into)
        for read in [cache.read_range(0, count), (span.keys, span.values), into]:
            assert [side.tobytes() for side in read] == [keys.tobytes(), values.tobytes()]


def test_length_follows_the_tokens(cache):
    assert (len(cache), cache.is_empty(), bool(cache)) == (0, True, False)
    cache.append(*tokens(CAPACITY))
    assert (len(cache), cache.is_empty(), bool(cache)) == (CAPACITY, False, True)


def test_repr_says_the_shape_and_not_the_data(filled):
    shape = f"capacity={CAPACITY}, num_heads={HEADS}, head_dim={DIM}, dtype='float32'"
    assert repr(filled) == f"LayerKvCache(len=6, {shape})"
