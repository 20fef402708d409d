"""Writing: what each call makes of the tokens, and every form in which it takes them."""

import array
import ctypes

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan import LayerKvCache
from support import CAPACITY, DIM, HEADS, WIDTH, assert_holds, new_cache, token, tokens


class OnlyDLPack:
    """Exports an array through DLPack and in no other way."""

    def __init__(self, exported):
        self._exported = exported

    def __dlpack__(self, **options):
        return self._exported.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._exported.__dlpack_device__()


class Derived(np.ndarray):
    """A subclass of NumPy's array."""


def read_only(exported):
    copied = exported.copy()
    copied.setflags(write=False)
    return copied


def in_ctypes(exported):
    return (ctypes.c_float * exported.size)(*exported.ravel())


def in_2d_ctypes(exported):
    return (ctypes.c_float * DIM * HEADS).from_buffer_copy(exported)


# One token, in everything that can hold it.
HOLDERS = {
    "array": np.array,
    "flat array": np.ravel,
    "read-only array": read_only,
    "native byte order by name": lambda exported: exported.astype("<f4"),
    "derived array": lambda exported: exported.view(Derived),
    "matrix": lambda exported: exported.view(np.matrix),
    "slice of a larger array": lambda exported: np.stack([exported, exported])[1],
    "memoryview": memoryview,
    "memoryview of bytes": lambda exported: memoryview(exported.tobytes()).cast("f"),
    "2-d memoryview of bytearray": lambda exported: (
        memoryview(bytearray(exported)).cast("B").cast("f", (HEADS, DIM))
    ),
    "array.array": lambda exported: array.array("f", exported.ravel()),
    "ctypes array": in_ctypes,
    "2-d ctypes array": in_2d_ctypes,
    "DLPack exporter": OnlyDLPack,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_token_can_come_in(holder, cache):
    keys, values = (holder(side) for side in token())
    cache.initialize(4)
    cache.write_kv(0, keys, values)
    cache.write_kv_batch([(1, keys, values)])
    cache.append(keys, values)
    assert_array_equal(cache.read_kv(0), token())
    assert_array_equal(cache.read_kv(1), token())
    assert_array_equal(cache.read_kv(4), token())


@pytest.mark.parametrize("shape", [(3, HEADS, DIM), (3, WIDTH)])
@pytest.mark.parametrize("holder", [np.array, read_only, memoryview, OnlyDLPack])
def test_tokens_can_come_in(shape, holder, cache):
    keys, values = (holder(side.reshape(shape)) for side in tokens(3))
    cache.append(keys, values)
    cache.write_kv_batch([5, 4, 3], keys, values)
    assert_array_equal(cache.read_range(0, 3), tokens(3))
    assert_array_equal(cache.read_range(3, 6), [side[::-1] for side in tokens(3)])


def test_keys_and_values_can_have_different_shapes(cache):
    keys, values = tokens(3)
    cache.append(keys, values.reshape(3, WIDTH))
    cache.append(keys[0], values[0].ravel())
    cache.append(keys[:1], values[0])
    assert_array_equal(cache.read_range(0, 3), (keys, values))
    assert_array_equal(cache.read_range(4, 5), (keys[:1], values[:1]))


def test_arguments_have_names(cache):
    keys, values = token()
    cache.initialize(seq_len=2)
    cache.write_kv(token_idx=0, keys=keys, values=values, timeout=1)
    cache.write_kv_batch(token_idxs=[1], keys=keys[None], values=values[None], timeout=None)
    cache.append(values=values, keys=keys)
    cache.truncate(new_len=3, timeout=0)
    assert_array_equal(cache.read_range(start=0, end=3), np.stack([token()] * 3, axis=1))


# write_kv


def test_write_replaces_one_token(filled):
    filled.write_kv(2, *token(9))
    keys, values = tokens(6)
    keys[2], values[2] = token(9)
    assert_holds(filled, keys, values)


def test_write_past_the_end_moves_it_and_leaves_zeros(cache):
    cache.initialize(1)
    cache.write_kv(3, *token())
    keys, values = np.zeros((2, 4, HEADS, DIM), np.float32)
    keys[3], values[3] = token()
    assert_holds(cache, keys, values)


def test_zeros_come_after_what_was_truncated(filled):
    filled.truncate(1)
    filled.write_kv(5, *token())
    assert not np.any(filled.read_range(1, 5))
    filled.truncate(1)
    filled.initialize(6)
    assert not np.any(filled.read_range(1, 6))


def test_last_token_can_be_written(cache):
    cache.initialize(1)
    cache.write_kv(CAPACITY - 1, *token())
    assert len(cache) == CAPACITY


# write_kv_batch

BATCH = [4, 1, 7]


def entries():
    keys, values = tokens(3)
    return [(at, keys[row], values[row]) for row, at in enumerate(BATCH)]


@pytest.mark.parametrize(
    "in_one",
    [list, tuple, iter, lambda batch: (entry for entry in batch)],
    ids=["list", "tuple", "iterator", "generator"],
)
def test_batch_takes_entries(in_one, filled):
    assert filled.write_kv_batch(in_one(entries())) is None
    for at, keys, values in entries():
        assert_array_equal(filled.read_kv(at), (keys, values))
    assert len(filled) == 8


@pytest.mark.parametrize(
    "indices",
    [
        list,
        tuple,
        np.int64,
        np.int32,
        np.uint8,
        np.uint64,
        lambda batch: np.array(batch, ">i4"),
        lambda batch: np.repeat(batch, 2)[::2],
        lambda batch: array.array("q", batch),
        lambda batch: memoryview(array.array("i", batch)),
        lambda batch: [np.int64(at) for at in batch],
    ],
)
def test_batch_takes_arrays(indices, filled):
    by_entries = new_cache()
    by_entries.append(*tokens(6))
    by_entries.write_kv_batch(entries())
    filled.write_kv_batch(indices(BATCH), *tokens(3))
    assert_holds(filled, *by_entries.read_range(0, 8))


def test_last_of_duplicates_wins(filled):
    filled.write_kv_batch([(1, *token(7)), (2, *token(8)), (1, *token(9))])
    assert_array_equal(filled.read_kv(1), token(9))
    filled.write_kv_batch([3, 3, 3], *tokens(3))
    assert_array_equal(filled.read_kv(3), token(3))


@pytest.mark.parametrize(
    "batch",
    [
        ([],),
        ((),),
        ({},),
        ([], *tokens(0)),
        (np.array([], int), *tokens(0)),
        (range(0), *tokens(0)),
    ],
)
def test_empty_batch_changes_nothing_even_before_initialize(batch, cache):
    cache.write_kv_batch(*batch)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_batch_can_span_the_end(filled):
    filled.write_kv_batch([(8, *token(9)), (5, *token(8))])
    keys, values = filled.read_range(4, 9)
    assert_array_equal(keys[[0, 1, 4]], np.stack([token(number)[0] for number in (5, 8, 9)]))
    assert_array_equal(values[[0, 1, 4]], np.stack([token(number)[1] for number in (5, 8, 9)]))
    assert not keys[2:4].any()
    assert not values[2:4].any()


# append


def test_append_returns_the_positions(cache):
    assert cache.append(*tokens(3)) == range(3)
    assert cache.append(*token(4)) == range(3, 4)
    assert cache.append(*tokens(0)) == range(4, 4)
    assert type(cache.append(*tokens(2, first=5))) is range
    assert_holds(cache, *tokens(6))


def test_append_fills_the_cache_to_the_last_token(cache):
    cache.append(*tokens(CAPACITY))
    assert_holds(cache, *tokens(CAPACITY))


def test_append_with_one_head_tells_tokens_from_heads():
    cache = new_cache(heads=1, dim=3)
    rows = np.arange(6, dtype=np.float32)
    cache.append(rows.reshape(2, 3), rows.reshape(2, 1, 3))
    cache.append(rows[:3], rows[:3].reshape(1, 3))
    assert len(cache) == 3


def test_append_takes_the_cache_s_own_tokens(filled):
    with filled.view(1, 4) as span:
        filled.append(span.keys, span.values)
        filled.append(span.key_view, span.value_view)
    assert_array_equal(filled.read_range(6, 9), tokens(3, first=2))
    assert_array_equal(filled.read_range(9, 12), tokens(3, first=2))


# initialize, truncate, reset, prefault


@pytest.mark.parametrize("asked", [CAPACITY, CAPACITY + 1, 2**64 - 1])
def test_initialize_ends_at_the_capacity(asked, cache):
    assert cache.initialize(asked) is None
    assert len(cache) == CAPACITY
    assert not np.any(cache.read_range(0, CAPACITY))


def test_initialize_never_shrinks_and_never_erases(filled):
    filled.initialize(3)
    assert_holds(filled, *tokens(6))
    filled.initialize(8)
    assert_array_equal(filled.read_range(0, 6), tokens(6))
    assert not np.any(filled.read_range(6, 8))


def test_truncate_keeps_the_first_tokens(filled):
    assert filled.truncate(4) is None
    assert_holds(filled, *tokens(4))
    filled.truncate(4)
    filled.append(*token(5))
    assert_holds(filled, *tokens(5))


def test_reset_empties_the_cache_and_keeps_its_buffer(filled):
    nbytes = filled.nbytes
    assert filled.reset() is None
    assert (len(filled), filled.is_empty(), filled.nbytes) == (0, True, nbytes)
    filled.write_kv(0, *token())
    assert_holds(filled, *tokens(1))


def test_buffer_is_allocated_by_the_first_write(cache):
    assert (cache.capacity, cache.nbytes) == (CAPACITY, 0)
    cache.append(*token())
    assert cache.nbytes >= 2 * CAPACITY * WIDTH * 4


def test_prefault_changes_no_token(cache):
    assert cache.prefault() is None
    assert (len(cache), cache.is_empty()) == (0, True)
    assert cache.nbytes > 0
    cache.append(*tokens(6))
    cache.truncate(3)
    cache.prefault()
    assert_holds(cache, *tokens(3))


@pytest.mark.parametrize("tokens_written", [1, 8_000])
def test_nan_payloads_and_negative_zeros_come_back_bit_for_bit(tokens_written):
    bits = np.random.default_rng(3).integers(0, 2**32, (tokens_written, 2, 2), dtype=np.uint32)
    bits[:, 0, 0] = 0x7FA0_1234  # a signalling NaN
    bits[:, 1, 1] = 0x8000_0000  # -0.0
    cache = new_cache(capacity=tokens_written, heads=2, dim=2)
    cache.append(bits.view(np.float32), bits[::-1].copy().view(np.float32))
    keys, values = cache.read_range(0, tokens_written)
    assert_array_equal(keys.view(np.uint32), bits)
    assert_array_equal(values.view(np.uint32), bits[::-1])


def test_methods_work_unbound(cache):
    assert LayerKvCache.append(cache, *tokens(2)) == range(2)
    assert LayerKvCache.__len__(cache) == 2
