"""Every element type: what goes in, what comes out, and what is refused."""

import array
import builtins
import copy
import gc
import json
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from blocks import read as read_numbers
from blocks import rows_of
from kvspan.errors import (
    ForeignHandleError,
    InvalidConfigError,
    InvalidInputError,
    LayersDifferError,
    PinnedError,
)
from rounding import BFLOAT16, DTYPES, ml_dtypes, quantized, rounded
from support import DIM, HEADS, WIDTH, address, isolated, refused, run_python, tokens

FLOATS = ["float32", "float16", "bfloat16"]


def new_cache(dtype, capacity=64, heads=HEADS, dim=DIM):
    config = kvspan.KVCacheConfig(capacity, heads, dim, dtype)
    return kvspan.LayerKvCache(config)


def bits(exported):
    return np.ascontiguousarray(exported).view(np.uint8).tolist()


def numbers(count, seed=1):
    """Keys and values that no narrow type holds."""
    return np.random.default_rng(seed).normal(size=(2, count, HEADS, DIM)).astype(np.float32)


# Names


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_goes_by_its_name(name):
    dtype = DTYPES[name]
    config = kvspan.KVCacheConfig(dtype=name)
    assert config == kvspan.KVCacheConfig(dtype=dtype) == kvspan.KVCacheConfig(dtype=dtype.type)
    assert (config.dtype, kvspan.LayerKvCache(config).dtype) == (name, name)
    assert (config == kvspan.KVCacheConfig()) is (name == "float32")
    assert pickle.loads(pickle.dumps(config)) == config
    assert f"dtype='{name}'" in repr(config)
    assert kvspan.KvCacheManager(2, dtype=dtype).dtype == name


@pytest.mark.parametrize(
    "dtype",
    [">f2", np.dtype(">f2"), "f2", np.uint8, "uint16", ml_dtypes.float8_e4m3fn, ml_dtypes.int4],
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidConfigError, match="'float32', 'float16', 'bfloat16' or 'int8'"):
        kvspan.KVCacheConfig(dtype=dtype)
    with pytest.raises(InvalidConfigError):
        kvspan.KvCacheManager(2, dtype=dtype)


@pytest.mark.parametrize(("name", "nbytes"), list(zip(DTYPES, [4, 2, 2, 2])))
def test_buffer_has_the_bytes_of_its_dtype(name, nbytes):
    cache = new_cache(name, capacity=8, heads=4, dim=4)
    cache.initialize(1)
    # Four scales a token weigh as much as sixteen int8.
    assert cache.nbytes == 2 * 8 * 16 * nbytes


# In


@pytest.mark.parametrize("name", FLOATS)
def test_elements_of_the_own_dtype_go_in_and_out_bit_by_bit(name):
    dtype = DTYPES[name]
    raw = np.arange(2**16, dtype=np.uint16).repeat(dtype.itemsize // 2)
    rows = raw.view(dtype).reshape(-1, 64, 64)
    cache = new_cache(name, len(rows), 64, 64)
    cache.append(rows, rows[::-1].copy())
    assert bits(cache.view().keys) == bits(rows)
    assert bits(cache.read_range(0, len(rows))[1]) == bits(rows[::-1])


@pytest.mark.parametrize("name", DTYPES)
def test_float32_is_rounded_while_it_is_copied(name):
    keys, values = numbers(8)
    cache = new_cache(name)
    cache.append(keys[:3], values[:3])
    cache.append(keys[3], values[3].ravel())
    cache.initialize(6)
    cache.write_kv(4, keys[4], memoryview(values[4]))
    cache.write_kv_batch([(5, keys[5], values[5])])
    cache.write_kv_batch([7, 6], keys[[7, 6]], values[[7, 6]])
    wanted = rounded(keys, name), rounded(values, name)
    for given, side in zip(cache.read_range(0, 8), wanted):
        assert given.dtype == (np.float32 if name == "int8" else DTYPES[name])
        assert_array_equal(given.astype(np.float32), side)
    room = np.zeros((2, 8, HEADS, DIM), np.float32)
    cache.read_range_into(0, 8, *room)
    assert_array_equal(room, wanted)
    assert_array_equal(cache.read_kv(6)[1].astype(np.float32), wanted[1][6])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_is_that_of_numpy(name):
    patterns = np.random.default_rng(3).integers(0, 2**32, 2**16, dtype=np.uint32)
    # Ties, and what is next to them.
    edges = (np.arange(2**16, dtype=np.uint32) << 16)[:, None] + np.array(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000], np.uint32
    )
    given = np.concatenate([patterns, edges.ravel()])[: 2**19].view(np.float32).reshape(-1, 64, 64)
    cache = new_cache(name, len(given), 64, 64)
    cache.append(given, given)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = given.astype(DTYPES[name])
    stored = cache.view().keys
    nan = np.isnan(given)
    assert np.isnan(stored[nan].astype(np.float32)).all()
    assert_array_equal(stored.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])


def test_int8_has_a_scale_for_each_head_of_a_token():
    keys, values = numbers(5)
    values[2, 1] = 0
    cache = new_cache("int8")
    cache.append(keys, values)
    with cache.view(1, 5) as span:
        for given, scales, side in [
            (span.keys, span.key_scales, keys),
            (span.values, span.value_scales, values),
        ]:
            assert given.dtype == np.int8 and scales.dtype == np.float32
            assert given.shape == (4, HEADS, DIM) and scales.shape == (4, HEADS)
            assert not given.flags.writeable and not scales.flags.writeable
            assert_array_equal(given, quantized(side[1:])[0])
            assert_array_equal(scales, quantized(side[1:])[1])
        assert span.value_scales[1, 1] == 0 and not span.values[1, 1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_scale_is_refused_and_nothing_changes(bad):
    cache = new_cache("int8")
    cache.append(*tokens(4))
    keys, values = tokens(3)
    values[1, 1, 2] = bad
    for call, arguments, token in [
        (cache.append, (keys, values), 1),
        (cache.write_kv, (0, keys[1], values[1]), 0),
        (cache.write_kv_batch, ([0, 1, 2], keys, values), 0),
    ]:
        error = refused(cache, InvalidInputError, call, *arguments)
        assert f"the values of token {token} of the input have an infinity or NaN in head 1" in str(
            error
        )
    for name in FLOATS:
        new_cache(name).append(keys, values)


def test_scales_of_a_view_keep_its_tokens():
    cache = new_cache("int8")
    cache.append(*tokens(4))
    scales = cache.view(0, 2).key_scales
    gc.collect()
    refused(cache, PinnedError, cache.write_kv, 1, *(side[1] for side in tokens(2)))
    assert_array_equal(scales, quantized(tokens(2)[0])[1])
    del scales
    cache.reset()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_have_no_scales(name):
    cache = new_cache(name)
    cache.append(*numbers(2))
    assert cache.view().key_scales is None and cache.view().value_scales is None
    assert cache.reserve(1).key_scales is None


@pytest.mark.parametrize("name", DTYPES)
def test_other_dtypes_do_not_go_in(name):
    cache = new_cache(name)
    cache.append(*numbers(3))
    good = numbers(1)[0]
    taken = {"float32", name} - {"int8"}
    others = {other: DTYPES[other] for other in DTYPES.keys() - taken}
    others |= {other: np.dtype(other) for other in ["float64", "int32", "uint16", "bool"]}
    for other, dtype in others.items():
        for arguments in [(good.astype(dtype), good), (good, good.astype(dtype))]:
            error = refused(cache, InvalidInputError, cache.append, *arguments)
            assert other in str(error) and "float32 is wanted" in str(error)
    room = np.zeros((1, HEADS, DIM), np.float64)
    refused(cache, InvalidInputError, cache.read_range_into, 0, 1, good, room)
    for swapped in [good.astype(">f4"), good.astype(">f2")]:
        refused(cache, InvalidInputError, cache.append, swapped, good)


def test_bits_of_bfloat16_are_not_bfloat16():
    cache = new_cache("bfloat16")
    rows = numbers(1)[0].astype(BFLOAT16).view(np.uint16)
    for given in [rows, memoryview(rows), array.array("H", rows.ravel())]:
        error = refused(cache, InvalidInputError, cache.append, given, given)
        assert ".view(ml_dtypes.bfloat16)" in str(error)


def test_an_int8_cache_says_that_it_wants_float32():
    cache = new_cache("int8")
    rows = np.zeros((1, HEADS, DIM), np.int8)
    error = refused(cache, InvalidInputError, cache.append, rows, rows)
    assert "finds the scales itself" in str(error)


def test_float16_comes_in_through_the_buffer_protocol():
    cache = new_cache("float16")
    rows = numbers(2)[0].astype(np.float16)
    cache.append(memoryview(rows), memoryview(rows[::-1].copy()))
    assert_array_equal(cache.read_range(0, 2), [rows, rows[::-1]])


# Out

FORMATS = {"float32": "f", "float16": "e", "bfloat16": "H", "int8": "b"}


@pytest.mark.parametrize("name", DTYPES)
def test_views_show_what_is_stored(name):
    cache = new_cache(name)
    cache.append(*numbers(5))
    span = cache.view(1, 4)
    dtype = DTYPES[name]
    assert span.keys.dtype == dtype and not span.keys.flags.writeable
    assert span.dtype == span.key_view.dtype == name
    assert f"dtype='{name}'" in repr(span) and f"dtype='{name}'" in repr(span.key_view)
    assert span.key_view.nbytes == 3 * WIDTH * dtype.itemsize
    view = memoryview(span.key_view)
    assert (view.format, view.itemsize, view.readonly) == (FORMATS[name], dtype.itemsize, True)
    assert view.strides == (WIDTH * dtype.itemsize, DIM * dtype.itemsize, dtype.itemsize)
    assert view.tobytes() == span.keys.tobytes()
    assert address(np.asarray(span.key_view)) == address(span.keys)

    # One token has no axis of tokens.
    def shapes(keys, values):
        return keys.shape, values.dtype

    assert cache.with_read_kv(2, shapes) == ((HEADS, DIM), dtype)


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_numpy_takes_a_view_through_dlpack(name):
    cache = new_cache(name)
    cache.append(*numbers(3))
    span = cache.view()
    taken = np.from_dlpack(span.value_view)
    assert taken.dtype == DTYPES[name] and address(taken) == address(span.values)
    assert_array_equal(np.from_dlpack(span.value_view, copy=True), span.values)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_own_tokens_come_in_again(name):
    cache = new_cache(name)
    cache.append(*numbers(3))
    span = cache.view()
    cache.append(span.key_view, span.value_view)
    cache.append(span.keys, span.values)
    for start in (3, 6):
        assert bits(cache.view(start, start + 3).keys) == bits(span.keys)


@pytest.mark.parametrize("name", FLOATS)
def test_reserved_rows_are_of_the_own_dtype(name):
    cache = new_cache(name)
    keys, values = numbers(3)
    with cache.reserve(3) as rows:
        assert rows.keys.dtype == DTYPES[name] and rows.keys.flags.writeable
        assert f"dtype='{name}'" in repr(rows)
        rows.keys[...], rows.values[...] = keys, values
    assert_array_equal(cache.view().values.astype(np.float32), rounded(values, name))


def test_reserved_rows_of_int8_are_elements_and_scales():
    cache = new_cache("int8")
    keys, values = numbers(3)
    with cache.reserve(3) as rows:
        assert not rows.keys.any() and not rows.key_scales.any()
        rows.keys[...], rows.key_scales[...] = quantized(keys)
        rows.values[...], rows.value_scales[...] = quantized(values)
    assert_array_equal(cache.read_range(0, 3), [rounded(keys, "int8"), rounded(values, "int8")])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_room_may_be_of_the_own_dtype(name):
    cache = new_cache(name)
    cache.append(*numbers(3))
    room = np.zeros((2, 2, HEADS, DIM), DTYPES[name])
    cache.read_range_into(1, 3, *room)
    assert bits(room[1]) == bits(cache.view(1, 3).values)


@pytest.mark.parametrize("name", DTYPES)
def test_copies_are_of_the_same_dtype(name):
    cache = new_cache(name)
    cache.append(*numbers(3))
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        assert other.dtype == name
        assert_array_equal(other.read_range(0, 3), cache.read_range(0, 3))


@pytest.mark.parametrize("name", DTYPES)
def test_truncated_tokens_do_not_come_back(name):
    cache = new_cache(name)
    cache.append(*numbers(4))
    cache.truncate(1)
    cache.initialize(4)
    span = cache.view(1, 4)
    assert not span.keys.any() and not span.values.any()
    assert name != "int8" or not span.key_scales.any()


def test_without_ml_dtypes_bfloat16_is_said_to_need_it():
    run_python(
        """
        import sys; sys.modules["ml_dtypes"] = None
        import numpy as np, kvspan
        config = kvspan.KVCacheConfig(num_heads=1, hidden_dim_per_head=2, dtype="bfloat16")
        cache = kvspan.LayerKvCache(config)
        rows = np.array([[[1.5, -2.0]]], np.float32)
        cache.append(rows, rows)
        span = cache.view()
        for call in [lambda: span.keys, lambda: cache.read_kv(0), lambda: cache.reserve(1).keys]:
            try:
                call()
            except ImportError as error:
                assert "pip install ml_dtypes" in str(error), error
                assert "append and write round them" in str(error), error
            else:
                raise AssertionError("no ImportError")
        assert memoryview(span.key_view).cast("B").cast("H").tolist() == [0x3FC0, 0xC000]
        room = np.zeros((2, 1, 1, 2), np.float32)
        cache.read_range_into(0, 1, *room)
        assert room[0].tolist() == rows.tolist()
        """.replace("\n        ", "\n")
    )


# Blocks


@pytest.mark.parametrize("name", DTYPES)
def test_blocks_hold_every_dtype(name):
    manager = kvspan.KvCacheManager(6, block_size=2, num_kv_heads=HEADS, head_dim=DIM, dtype=name)
    assert manager.dtype == name and f"dtype='{name}'" in repr(manager)
    keys, values = numbers(5)
    handle = manager.allocate([1, 2, 3, 4, 5])
    manager.write(handle, 0, 0, keys, values)
    wanted = rounded(keys, name), rounded(values, name)
    for given, side in zip(manager.read_range(handle, 0), wanted):
        assert_array_equal(given.astype(np.float32), side)
    room = np.zeros((2, 2, HEADS, DIM), np.float32)
    manager.read_range_into(handle, 0, 1, 3, *room)
    assert_array_equal(room, [side[1:3] for side in wanted])
    with manager.view(handle, 0, 1, 5) as span:
        segments = list(span)
        assert [segment.keys.dtype for segment in segments] == [DTYPES[name]] * 3
        assert [segment.dtype for segment in segments] == [name] * 3 and f"dtype='{name}'" in repr(
            span
        )
        if name == "int8":
            scales = np.concatenate([segment.key_scales for segment in segments])
            assert_array_equal(scales, quantized(keys)[1][1:])
            del scales
        del segments

    fork = manager.fork(handle)
    more = numbers(2, seed=2)
    manager.write_many(0, [fork, handle], [4, 0], *more)
    assert_array_equal(manager.read_range(handle, 0)[0][4].astype(np.float32), wanted[0][4])
    assert_array_equal(manager.read_range(fork, 0)[0][:4].astype(np.float32), wanted[0][:4])
    first = rounded(more[1], name)[0]
    assert_array_equal(manager.read_range(fork, 0)[1][4].astype(np.float32), first)


def test_recycled_blocks_have_no_scales_of_others():
    manager = kvspan.KvCacheManager(2, block_size=2, num_kv_heads=HEADS, head_dim=DIM, dtype="int8")
    with manager.allocate([1, 2, 3, 4]) as handle:
        manager.write(handle, 0, 0, *numbers(4))
    handle = manager.allocate([5, 6, 7, 8])
    for segment in manager.view(handle, 0):
        assert not segment.key_scales.any() and not segment.values.any()


def test_blocks_refuse_what_has_no_scale():
    manager = kvspan.KvCacheManager(4, num_kv_heads=HEADS, head_dim=DIM, dtype="int8")
    handle = manager.allocate([1, 2])
    keys, values = numbers(2)
    keys[1, 0, 0] = np.nan
    with pytest.raises(InvalidInputError, match=r"keys of token 1 .* NaN in head 0"):
        manager.write(handle, 0, 0, keys, values)
    assert not manager.read_range(handle, 0)[1].any()


def test_a_handle_of_another_dtype_is_foreign():
    narrow, wide = (kvspan.KvCacheManager(4, dtype=name) for name in ("float16", "float32"))
    handle = narrow.allocate([1, 2])
    for call in [
        lambda: wide.extend(handle),
        lambda: wide.fork(handle),
        lambda: wide.free(handle),
        lambda: wide.view(handle, 0),
        lambda: wide.commit(handle, [1]),
        lambda: wide.write_many(0, [handle], [0], *np.zeros((2, 1, 4, 64), np.float32)),
    ]:
        with pytest.raises(ForeignHandleError):
            call()
    assert handle.is_valid and handle.num_tokens == 2


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_handles_have_the_dtype(name):
    manager = kvspan.KvCacheManager(6, block_size=2, num_kv_heads=HEADS, head_dim=DIM, dtype=name)
    keys, values = numbers(3)
    paged = manager.allocate([1, 2, 3])
    manager.write(paged, 0, 0, keys, values)
    contiguous = kvspan.ContiguousKvCacheHandle([new_cache(name)])
    contiguous.append(0, keys, values)
    for handle, num_segments in [(paged, 2), (contiguous, 1)]:
        tensor = handle.value_cache(0)
        assert (tensor.dtype, tensor.num_segments) == (name, num_segments)
        assert tensor.numpy().dtype == DTYPES[name]
        stored = quantized(values)[0] if name == "int8" else values.astype(DTYPES[name])
        assert_array_equal(tensor.numpy(), stored)
        if name == "int8":
            assert_array_equal(np.concatenate(tensor.scales), quantized(values)[1])
        else:
            assert tensor.scales is None
        if name != "bfloat16":
            assert_array_equal(np.from_dlpack(tensor, copy=True), stored)
    assert contiguous.layer(0).dtype == name


def test_layers_of_one_handle_have_one_dtype():
    with pytest.raises(LayersDifferError, match="element type"):
        kvspan.ContiguousKvCacheHandle([new_cache("float16"), new_cache("bfloat16")])


def test_numbers_that_all_dtypes_hold_are_the_same_in_all():
    for name in DTYPES:
        manager = kvspan.KvCacheManager(8, block_size=4, num_kv_heads=1, head_dim=2, dtype=name)
        handle = manager.allocate([1, 2, 3])
        manager.write(handle, 0, 0, *rows_of([127, 64, 1]))
        assert read_numbers(manager, handle) == [127, 64, 1]


# A model's own keys and values


@pytest.mark.parametrize("layer", [0, 15])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(
    ("name", "called"),
    [("float16", "f16"), ("bfloat16", "bf16"), ("int8", "int8 sym per token+head")],
)
def test_errors_of_real_tokens_are_those_of_the_reference(name, called, side, layer, test_data):
    reference = json.loads((test_data / "kv_quant_reference.json").read_text())["sample_errors"]
    wanted = reference[f"{side} layer{layer} {called}"]
    with np.load(test_data / "smollm2_kv_sample.npz") as sample:
        given = sample[side][sample["layers"].tolist().index(layer)]
    cache = new_cache(name, *given.shape)
    cache.append(given, given)
    stored = np.zeros_like(given)
    cache.read_range_into(0, len(given), stored, stored.copy())
    error = stored.astype(np.float64) - given
    relative = np.sqrt((error**2).mean() / (given.astype(np.float64) ** 2).mean())
    assert np.abs(error).max() == pytest.approx(wanted["max_abs"], abs=6e-6)
    assert relative == pytest.approx(wanted["rel_rms"], abs=6e-7)


def on_import_of_ml_dtypes(monkeypatch, action):
    real = builtins.__import__

    def hooked(name, *args, **kwargs):
        if name == "ml_dtypes":
            action()
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hooked)


@isolated  # the package is imported once in a process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_room_that_shrinks_while_its_dtype_is_found_out_is_refused():
    cache = new_cache("bfloat16")
    cache.append(*(np.ones((2, HEADS, DIM), np.float32) for _ in "kv"))
    memory = np.zeros(4 * WIDTH, BFLOAT16)
    room = memory[: 2 * WIDTH]

    def shrink():
        room.dtype = np.uint8
        room.shape = (2, HEADS, DIM, 2)

    with pytest.MonkeyPatch.context() as monkeypatch:
        on_import_of_ml_dtypes(monkeypatch, shrink)
        with pytest.raises(InvalidInputError, match="uint8"):
            cache.read_range_into(0, 2, room, np.zeros(2 * WIDTH, BFLOAT16))
    assert not memory.view(np.uint16).any()


@isolated
def test_keys_that_shrink_while_the_dtype_of_the_values_is_found_out_are_refused():
    cache = new_cache("bfloat16")
    keys = np.ones((4, HEADS, DIM), np.float32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_import_of_ml_dtypes(monkeypatch, lambda: keys.resize((1, 1), refcheck=False))
        with pytest.raises(InvalidInputError, match="shape"):
            cache.append(keys, np.ones((4, HEADS, DIM), BFLOAT16))
    assert len(cache) == 0
