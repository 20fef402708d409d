"""JAX takes views in place, and its arrays come in."""

import gc

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from kvspan.errors import InvalidInputError, PinnedError
from support import HEADS, address, new_filled_cache, refused, token, tokens

jax = pytest.importorskip("jax", reason="jax is not installed")

COUNT = 6


def taken_in_place(exporter):
    try:
        return jax.dlpack.from_dlpack(exporter)
    except BufferError:
        pytest.skip("this version of jax does not speak DLPack 1.0, which says read-only")


def test_jax_array_lies_over_the_cache_and_pins_it(filled):
    array = taken_in_place(filled.view().key_view)
    gc.collect()
    assert array.unsafe_buffer_pointer() == address(filled.view().keys)
    assert_array_equal(array, tokens(COUNT)[0])
    refused(filled, PinnedError, filled.reset)
    del array
    gc.collect()
    filled.reset()


def test_jax_array_outlives_the_cache():
    array = taken_in_place(new_filled_cache().view().value_view)
    gc.collect()
    assert_array_equal(array, tokens(COUNT)[1])


def test_jax_can_copy(filled):
    array = jax.numpy.array(filled.view().keys, copy=True)
    gc.collect()
    filled.reset()
    assert_array_equal(array + 1, tokens(COUNT)[0] + 1)


def test_jax_arrays_come_in(cache):
    keys, values = (jax.numpy.asarray(side) for side in tokens(4))
    cache.append(keys[:3], values[:3])
    cache.append(keys[3], values[3])
    assert_array_equal(cache.read_range(0, 4), tokens(4))


def test_jax_arrays_are_not_written_to(filled):
    array = jax.numpy.zeros((COUNT, HEADS, 4))
    refused(filled, InvalidInputError, filled.read_range_into, 0, COUNT, array, array)
    assert not array.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_jax_arrays_of_other_types_are_refused(dtype, filled):
    array = jax.numpy.zeros((HEADS, 4), dtype)
    refused(filled, InvalidInputError, filled.append, array, token()[1])


# Every element type


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8"])
def test_jax_takes_every_dtype(name):
    cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(64, HEADS, 4, name))
    # Which can be written, so that all versions of jax take them.
    with cache.reserve(4) as rows:
        rows.keys[...] = tokens(4)[0]
        array = jax.dlpack.from_dlpack(rows.key_view)
        assert (array.dtype, array.shape) == (name, (4, HEADS, 4))
        assert_array_equal(array, jax.numpy.asarray(tokens(4)[0], name))
        del array
        gc.collect()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_jax_arrays_of_the_own_dtype_come_in(name):
    cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(64, HEADS, 4, name))
    keys, values = (jax.numpy.asarray(side, name) for side in tokens(4))
    cache.append(keys, values)
    cache.append(keys[2], values[2])
    room = np.zeros((2, 5, HEADS, 4), np.float32)
    cache.read_range_into(0, 5, *room)
    assert_array_equal(room[0], jax.numpy.stack([*keys, keys[2]]).astype("float32"))
    assert_array_equal(room[1][:4], values.astype("float32"))
    array = jax.numpy.zeros((5, HEADS, 4), name)
    refused(cache, InvalidInputError, cache.read_range_into, 0, 5, array, array)
    assert not array.any()
