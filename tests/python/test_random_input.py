"""Random memory and numbers: accepted if they fit, refused by the right exception if not."""

import contextlib

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from numpy.testing import assert_array_equal

from kvspan.errors import (
    CapacityExceededError,
    InvalidInputError,
    KvCacheError,
    NotInitializedError,
    OutOfRangeError,
    PinnedError,
)
from support import CAPACITY, DIM, HEADS, WIDTH, contents, new_cache, new_filled_cache, unchanged

each_200 = settings(max_examples=max(200, settings.default.max_examples))

ONE = [(HEADS, DIM), (WIDTH,)]
sizes = st.sampled_from([0, 1, 2, 3, DIM, WIDTH])
shapes = (
    st.sampled_from(ONE)
    | st.tuples(sizes, st.just(WIDTH))
    | st.tuples(sizes, st.just(HEADS), st.just(DIM))
)
any_shapes = shapes | st.lists(sizes, max_size=4).map(tuple)
dtypes = st.sampled_from(
    ["<f4"] * 6 + ["<f2"] * 3 + [">f4", ">f2", "f8", "i1", "i4", "u1", "u2", "?", "c8", "O", "S4"]
)
cache_dtypes = st.sampled_from(["float32", "float32", "float16", "int8"])


@st.composite
def memory(draw):
    """An array of any kind, mostly one that fits."""
    shape, dtype = draw(any_shapes), np.dtype(draw(dtypes))
    array = np.ones(shape, dtype)
    how = draw(st.sampled_from(["as it is"] * 6 + ["strided", "reversed", "fortran", "shifted"]))
    if how == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif how == "reversed" and array.ndim:
        array = array[::-1]
    elif how == "fortran":
        array = np.asfortranarray(array)
    elif how == "shifted" and not dtype.hasobject:
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
        array = raw.view(dtype).reshape(shape)
    return array


def fits(array, accepted, cache):
    taken = ["<f4", "<f2"] if cache.dtype == "float16" else ["<f4"]
    return (
        array.dtype in [np.dtype(dtype) for dtype in taken]
        and array.flags.c_contiguous
        and array.flags.aligned
        and accepted(array.shape)
    )


def is_one_token(shape):
    return shape in ONE


def are_tokens(shape):
    return is_one_token(shape) or (len(shape) > 1 and shape[1:] in ONE)


def count_of(array):
    return 1 if is_one_token(array.shape) else len(array)


@each_200
@given(keys=memory(), values=memory(), as_view=st.booleans(), dtype=cache_dtypes)
def test_append_accepts_what_fits(keys, values, as_view, dtype):
    cache = new_filled_cache(dtype=dtype)
    before = contents(cache)
    good = fits(keys, are_tokens, cache) and fits(values, are_tokens, cache)
    if good and count_of(keys) == count_of(values):
        count = count_of(keys)
        given = (keys.data, values.data) if as_view and keys.size else (keys, values)
        assert cache.append(*given) == range(6, 6 + count)
        assert_array_equal(cache.read_range(6, 6 + count)[0].ravel(), keys.ravel())
        cache.truncate(6)
    else:
        check_refusal(cache, InvalidInputError, cache.append, keys, values)
    assert contents(cache) == before


@each_200
@given(
    keys=memory(),
    values=memory(),
    at=st.integers(0, CAPACITY + 1),
    batch=st.booleans(),
    dtype=cache_dtypes,
)
def test_write_accepts_what_fits(keys, values, at, batch, dtype):
    cache = new_filled_cache(dtype=dtype)

    def write():
        if batch:
            cache.write_kv_batch([(at, keys, values)])
        else:
            cache.write_kv(at, keys, values)

    if not (fits(keys, is_one_token, cache) and fits(values, is_one_token, cache)):
        check_refusal(cache, InvalidInputError, write)
    elif at >= CAPACITY:
        check_refusal(cache, CapacityExceededError, write)
    else:
        write()
        assert len(cache) == max(6, at + 1)
        assert_array_equal(cache.read_kv(at)[1].ravel(), values.ravel())


@each_200
@given(
    keys=memory(),
    values=memory(),
    end=st.integers(0, 8),
    writable=st.booleans(),
    dtype=cache_dtypes,
)
def test_read_accepts_what_has_room(keys, values, end, writable, dtype):
    cache = new_filled_cache(dtype=dtype)
    keys.flags.writeable = writable

    def has_room(shape):
        return len(shape) == 1 or are_tokens(shape)

    def read():
        cache.read_range_into(0, end, keys, values)

    fit = fits(keys, has_room, cache) and fits(values, has_room, cache) and writable
    if not fit or min(keys.size, values.size) < end * WIDTH:
        check_refusal(cache, InvalidInputError, read)
    elif end > 6:
        check_refusal(cache, OutOfRangeError, read)
    else:
        read()
        assert_array_equal(keys.ravel()[: end * WIDTH], cache.read_range(0, end)[0].ravel())


def check_refusal(cache, error, call, *arguments):
    with unchanged(cache):
        try:
            call(*arguments)
        except error as raised:
            assert type(raised) is error
            assert "panic" not in str(raised)
        else:
            raise AssertionError("not refused")


numbers = (
    st.integers()
    | st.integers(-3, CAPACITY + 3)
    | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, -(2**31), -(2**63), -(2**64)])
)
not_numbers = st.none() | st.floats() | st.text() | st.binary() | st.complex_numbers()
anything = numbers | st.booleans() | not_numbers | st.lists(numbers, max_size=2)
DOCUMENTED = (KvCacheError, TypeError)


@each_200
@given(one=anything, other=anything, timeout=anything, pinned=st.booleans())
def test_any_numbers_are_used_or_refused(one, other, timeout, pinned):
    cache = new_filled_cache()
    held = cache.view() if pinned else None
    rows = np.ones((1, HEADS, DIM), np.float32)
    timeout = min(timeout, 0.001) if isinstance(timeout, float) and timeout > 0 else timeout
    timeout = 0 if isinstance(timeout, int) and timeout > 0 else timeout
    for call in [
        lambda: cache.view(one, other),
        lambda: cache.read_kv(one),
        lambda: cache.read_range(one, other),
        lambda: cache.read_range_into(one, other, rows, rows),
        lambda: cache.with_read_kv(one, lambda *_: None),
        lambda: cache.with_read_range(one, other, lambda _: None),
        lambda: cache.reserve(one),
    ]:
        with unchanged(cache), contextlib.suppress(*DOCUMENTED):
            call()
    for call in [
        lambda: cache.write_kv(one, rows[0], rows[0], timeout=timeout),
        lambda: cache.write_kv_batch([(one, rows[0], rows[0])], timeout=timeout),
        lambda: cache.write_kv_batch([one], rows, rows, timeout=timeout),
        lambda: cache.truncate(one, timeout=timeout),
        lambda: cache.reset(timeout=timeout),
        lambda: cache.initialize(one),
    ]:
        before = contents(cache)
        try:
            call()
        except DOCUMENTED as raised:
            assert contents(cache) == before
            assert not (isinstance(raised, PinnedError) and timeout is not None)
        assert len(cache) <= CAPACITY
    del held
    cache.reset()


@each_200
@given(indices=st.lists(st.integers(-2, CAPACITY + 1), max_size=5), initialized=st.booleans())
def test_batch_is_written_whole_or_not_at_all(indices, initialized):
    cache = new_filled_cache() if initialized else new_cache()
    rows = np.ones((len(indices), HEADS, DIM), np.float32)
    entries = list(zip(indices, rows, rows, strict=True))
    for arguments in [(entries,), (indices, rows, rows)]:
        before = contents(cache)
        try:
            cache.write_kv_batch(*arguments)
        except (OutOfRangeError, CapacityExceededError, NotInitializedError) as raised:
            assert contents(cache) == before
            bad = [at for at in indices if not 0 <= at < CAPACITY]
            assert bool(bad) == (not isinstance(raised, NotInitializedError))
        else:
            assert all(0 <= at < CAPACITY for at in indices)
            assert all(cache.read_kv(at)[0].all() for at in indices)
