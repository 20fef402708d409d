"""DLPack: what is in the capsule, what is refused, and who keeps the memory."""

import ctypes
import gc
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from kvspan.errors import InvalidInputError, PinnedError, ReservedError
from support import DIM, HEADS, SOON, WIDTH, address, refused, token, tokens

TOKENS = 3
VERSION_1 = (1, 0)
READ_ONLY, IS_COPIED = 1, 2
CPU = (1, 0)
FLOAT32 = (2, 32, 1)
# Code and bits.
DATA_TYPES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int8": (0, 8)}


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


class Legacy(ctypes.Structure):
    """`DLManagedTensor`, of before version 1."""

    _fields_ = (
        ("tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.argtypes = [ctypes.py_object]
capsule_name.restype = ctypes.c_char_p
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
capsule_pointer.restype = ctypes.c_void_p
capsule_set_name = ctypes.pythonapi.PyCapsule_SetName
capsule_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
new_capsule.restype = ctypes.py_object


def opened(capsule):
    """What is in a capsule: the managed tensor, for as long as the capsule lives."""
    name = capsule_name(capsule)
    managed = {b"dltensor_versioned": Versioned, b"dltensor": Legacy}[name]
    return managed.from_address(capsule_pointer(capsule, name))


@pytest.fixture
def span(cache):
    cache.append(*tokens(TOKENS))
    return cache.view()


@pytest.fixture
def rows(cache):
    reserved = cache.reserve(TOKENS)
    reserved.keys[...], reserved.values[...] = tokens(TOKENS)
    return reserved


@pytest.mark.parametrize("version", [VERSION_1, (1, 1), (1, 99), (2, 0)])
def test_view_is_exported_read_only(version, span):
    capsule = span.key_view.__dlpack__(max_version=version)
    managed = opened(capsule)
    assert type(managed) is Versioned
    assert managed.major == 1
    assert managed.flags == READ_ONLY
    assert managed.tensor.data + managed.tensor.byte_offset == address(span.keys)
    assert_describes_the_tokens(managed.tensor)


def assert_describes_the_tokens(tensor):
    assert tuple(tensor.device) == CPU
    assert (tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes) == FLOAT32
    assert tuple(tensor.shape[: tensor.ndim]) == (TOKENS, HEADS, DIM)
    if tensor.strides:
        assert tuple(tensor.strides[: tensor.ndim]) == (WIDTH, DIM, 1)


@pytest.mark.parametrize("version", [None, (0, 8), (0, 0)])
def test_view_is_not_exported_to_who_can_not_know_that_it_is_read_only(version, span):
    for exporter in [span.key_view, span.value_view]:
        with pytest.raises(BufferError, match="copy=True"):
            exporter.__dlpack__(max_version=version)
        with pytest.raises(BufferError, match="copy=True"):
            exporter.__dlpack__(max_version=version, copy=False)
    with pytest.raises(BufferError, match="copy=True"):
        span.key_view.__dlpack__()
    del exporter
    span.release()


@pytest.mark.parametrize("version", [None, (0, 8), VERSION_1])
def test_copy_is_the_consumer_s_own(version, cache, span):
    capsule = span.value_view.__dlpack__(max_version=version, copy=True)
    managed = opened(capsule)
    assert type(managed) is (Versioned if version == VERSION_1 else Legacy)
    if version == VERSION_1:
        assert managed.flags == IS_COPIED
    assert managed.tensor.data != address(span.values)
    assert_describes_the_tokens(managed.tensor)
    span.release()
    cache.reset()
    copied = (ctypes.c_float * (TOKENS * WIDTH)).from_address(managed.tensor.data)
    assert_array_equal(copied, tokens(TOKENS)[1].ravel())


@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("version", [None, (0, 8), VERSION_1])
def test_reserved_rows_are_exported_writable(version, copy, rows):
    capsule = rows.key_view.__dlpack__(max_version=version, copy=copy)
    managed = opened(capsule)
    assert type(managed) is (Versioned if version == VERSION_1 else Legacy)
    if version == VERSION_1:
        assert managed.flags == 0
    assert managed.tensor.data == address(rows.keys)
    assert_describes_the_tokens(managed.tensor)


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_dtype_has_its_code(dtype):
    config = kvspan.KVCacheConfig(TOKENS, HEADS, DIM, dtype)
    cache = kvspan.LayerKvCache(config)
    with cache.reserve(TOKENS) as reserved:
        exporter = reserved.value_view
        for version, kind in [(None, Legacy), (VERSION_1, Versioned)]:
            capsule = exporter.__dlpack__(max_version=version)
            assert type(opened(capsule)) is kind
            assert_is(opened(capsule).tensor, dtype)
        del exporter, capsule
    span = cache.view()
    capsule = span.key_view.__dlpack__(max_version=VERSION_1)
    assert opened(capsule).flags == READ_ONLY
    assert_is(opened(capsule).tensor, dtype)
    held = memoryview(span.key_view)
    assert opened(capsule).tensor.data == np.frombuffer(held, np.uint8).ctypes.data
    copied = span.key_view.__dlpack__(copy=True)
    assert_is(opened(copied).tensor, dtype)
    with pytest.raises(BufferError, match="copy=True"):
        span.key_view.__dlpack__()


def assert_is(tensor, dtype):
    assert (tensor.dtype_code, tensor.dtype_bits) == DATA_TYPES[dtype]
    assert (tensor.dtype_lanes, tensor.byte_offset) == (1, 0)
    assert tuple(tensor.shape[: tensor.ndim]) == (TOKENS, HEADS, DIM)
    assert tuple(tensor.strides[: tensor.ndim]) == (WIDTH, DIM, 1)


def test_device_is_the_cpu(span, rows):
    assert span.key_view.__dlpack_device__() == rows.value_view.__dlpack_device__() == CPU


def test_export_to_the_cpu_can_be_asked_for(span):
    capsule = span.key_view.__dlpack__(max_version=VERSION_1, dl_device=CPU, stream=None)
    assert opened(capsule).tensor.data == address(span.keys)


@pytest.mark.parametrize("device", [(2, 0), (1, 1), (0, 0), (-1, -1)])
@pytest.mark.parametrize("copy", [None, True])
def test_export_to_another_device_is_refused(device, copy, span):
    with pytest.raises(BufferError, match="CPU"):
        span.key_view.__dlpack__(max_version=VERSION_1, dl_device=device, copy=copy)
    span.release()


@pytest.mark.parametrize("stream", [-1, 0, 1, 2, object()])
def test_memory_of_the_cpu_has_no_stream(stream, span):
    with pytest.raises(BufferError, match="stream"):
        span.key_view.__dlpack__(max_version=VERSION_1, stream=stream)


@pytest.mark.parametrize(
    "options",
    [
        {"max_version": 1},
        {"max_version": (1,)},
        {"max_version": "1.0"},
        {"dl_device": "cpu"},
        {"copy": 1},
        {"unknown": None},
    ],
)
def test_options_of_another_type_are_refused(options, span):
    with pytest.raises((TypeError, ValueError)):
        span.key_view.__dlpack__(**options)
    with pytest.raises(TypeError):
        span.key_view.__dlpack__(None, VERSION_1)
    span.release()


# Who keeps the memory


def test_unused_capsule_holds_the_pin_and_gives_it_back(filled):
    capsule = filled.view().key_view.__dlpack__(max_version=VERSION_1)
    gc.collect()
    refused(filled, PinnedError, filled.reset)
    del capsule
    filled.reset()


def test_consumed_capsule_gives_the_pin_to_the_consumer(filled):
    part = np.from_dlpack(filled.view().key_view)[1:, 0]
    gc.collect()
    refused(filled, PinnedError, filled.write_kv, 0, *token())
    assert_array_equal(part, tokens(6)[0][1:, 0])
    del part
    filled.reset()


def test_copies_hold_no_pin(cache, span):
    copied = np.from_dlpack(span.key_view, copy=True)
    span.release()
    cache.reset()
    copied += 1
    assert_array_equal(copied, tokens(TOKENS)[0] + 1)


def test_each_export_is_one_view_more(span):
    exporter = span.key_view
    capsules = [exporter.__dlpack__(max_version=VERSION_1) for _ in range(3)]
    arrays = [np.from_dlpack(exporter) for _ in range(3)]
    with pytest.raises(BufferError, match="7 view"):
        span.release()
    del capsules, arrays, exporter
    span.release()


def test_capsule_keeps_a_reservation_open(cache, rows):
    capsule = rows.key_view.__dlpack__(max_version=VERSION_1)
    with pytest.raises(BufferError, match="1 view"):
        rows.commit()
    refused(cache, ReservedError, cache.append, *token())
    del capsule
    rows.commit()
    assert_array_equal(cache.read_range(0, TOKENS), tokens(TOKENS))


def delete(managed):
    """What a consumer does when it is done with what it took out of a capsule."""
    kind = type(managed)
    ctypes.CFUNCTYPE(None, ctypes.POINTER(kind))(managed.deleter)(ctypes.byref(managed))


def taken(capsule, name):
    """The managed tensor of a capsule, for which the caller now answers."""
    managed = opened(capsule)
    capsule_set_name(capsule, name)
    return managed


@pytest.mark.parametrize("attached", [True, False])
def test_consumer_may_be_done_on_any_thread(attached, filled):
    capsule = filled.view().key_view.__dlpack__(max_version=VERSION_1)
    managed = taken(capsule, b"used_dltensor_versioned")
    del capsule
    gc.collect()
    refused(filled, PinnedError, filled.reset)
    if attached:
        # ctypes would let go of the interpreter before the call.
        call = ctypes.PYFUNCTYPE(None, ctypes.POINTER(Versioned))(managed.deleter)
        thread = threading.Thread(target=call, args=(ctypes.byref(managed),))
    else:
        thread = threading.Thread(target=delete, args=(managed,))
    thread.start()
    thread.join(SOON)
    filled.reset()


def test_consumer_may_never_be_done(filled):
    # As one that is killed: nothing but its tokens is kept.
    managed = taken(filled.view().key_view.__dlpack__(max_version=VERSION_1), b"used")
    gc.collect()
    refused(filled, PinnedError, filled.reset)
    delete(managed)


# What other exporters put in a capsule


class Tensor:
    """An exporter of another library, with a capsule to the letter."""

    def __init__(self, data, shape, *, dtype=(4, 16), strides=None, offset=0, device=1, **options):
        self.data = data
        self.options = {"lanes": 1, "kind": Versioned, "major": 1, "flags": 0, **options}
        self.deleted = 0
        self.calls = []
        # What the capsules point to.
        axes = ctypes.c_int64 * len(shape)
        self.kept = [axes(*shape), strides and axes(*strides)]
        lanes = self.options["lanes"]
        self.tensor = DLTensor(
            data.ctypes.data, (device, 0), len(shape), *dtype, lanes, *self.kept, offset
        )

    def __dlpack_device__(self):
        return (self.tensor.device[0], 0)

    def __dlpack__(self, *, max_version=None):
        self.calls.append(max_version)
        kind = self.options["kind"]
        deleter = self.options.get("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.delete))
        address = deleter and ctypes.cast(deleter, ctypes.c_void_p).value
        if kind is Versioned:
            major, flags = self.options["major"], self.options["flags"]
            managed = Versioned(major, 7, None, address, flags, self.tensor)
        else:
            managed = Legacy(self.tensor, None, address)
        name = {Versioned: b"dltensor_versioned", Legacy: b"dltensor"}[kind]
        name = self.options.get("name", name)
        self.kept += [deleter, managed, name]
        return new_capsule(ctypes.addressof(managed), name, None)

    def delete(self, _):
        self.deleted += 1


class OlderTensor(Tensor):
    """From before there were versions."""

    def __dlpack__(self):
        return super().__dlpack__()


def bfloat16_cache():
    return kvspan.LayerKvCache(kvspan.KVCacheConfig(16, HEADS, DIM, "bfloat16"))


BITS = np.arange(0x3F80, 0x3F80 + 2 * WIDTH, dtype=np.uint16)


@pytest.mark.parametrize("tensor", [Tensor, OlderTensor])
@pytest.mark.parametrize("kind", [Versioned, Legacy])
@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((2, HEADS, DIM), None, 0),
        ((2, HEADS, DIM), (WIDTH, DIM, 1), 0),
        ((1, HEADS, DIM), (-7, DIM, 1), 0),
        ((1, WIDTH), (1, 1), 2 * WIDTH),
        ((WIDTH,), (1,), 0),
    ],
)
def test_bfloat16_comes_in_and_is_given_back(shape, strides, offset, kind, tensor):
    cache = bfloat16_cache()
    given = tensor(BITS, shape, strides=strides, offset=offset, kind=kind)
    cache.append(given, given)
    count = int(np.prod(shape))
    stored = np.frombuffer(cache.view().value_view, np.uint16)
    assert_array_equal(stored, BITS[offset // 2 :][:count])
    assert given.deleted == 2
    # One who does not know of versions is asked a second time.
    assert given.calls == ([None, None] if tensor is OlderTensor else [(1, 0), (1, 0)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": (2, 64)}, "float64"),
        ({"dtype": (0, 16)}, "int16"),
        ({"dtype": (1, 16)}, "uint16"),
        ({"dtype": (6, 8)}, "bool"),
        ({"dtype": (5, 64)}, "complex64"),
        ({"dtype": (10, 8)}, "DLPack type 10 of 8 bits"),
        ({"lanes": 2}, "bfloat16 x 2"),
        ({"strides": (2 * WIDTH, DIM, 1)}, "C-contiguous"),
        ({"strides": (WIDTH, 1, HEADS)}, "C-contiguous"),
        ({"strides": (0, DIM, 1)}, "C-contiguous"),
        ({"strides": (-WIDTH, DIM, 1)}, "C-contiguous"),
        ({"offset": 1}, "aligned"),
        ({"shape": (2, HEADS, DIM + 1)}, "shape (2, 2, 5)"),
        ({"shape": ()}, "shape ()"),
        ({"device": 2}, "device (2, 0)"),
        ({"major": 2}, "version is 2.7"),
        ({"name": b"another"}, "another name"),
        ({"shape": (-1, HEADS, DIM)}, "negative"),
        ({"shape": (2**62, HEADS, DIM)}, "too large"),
    ],
)
def test_other_tensors_are_refused_and_given_back(options, said):
    cache = bfloat16_cache()
    given = Tensor(BITS, **{"shape": (2, HEADS, DIM), **options})
    error = refused(cache, InvalidInputError, cache.append, given, given)
    assert said in str(error)
    # What was never taken is not given back.
    untouched = {"device", "major", "name"} & options.keys()
    assert given.deleted == (0 if untouched else len(given.calls))


@pytest.mark.parametrize("deleter", [None])
def test_a_tensor_without_a_deleter_needs_none(deleter):
    cache = bfloat16_cache()
    given = Tensor(BITS, (2, HEADS, DIM), deleter=deleter)
    cache.append(given, given)
    assert len(cache) == 2 and given.deleted == 0


@pytest.mark.parametrize(
    ("kind", "flags"), [(Versioned, READ_ONLY), (Versioned, IS_COPIED), (Legacy, 0)]
)
def test_what_is_read_only_or_may_be_or_is_a_copy_is_no_room(kind, flags):
    cache = bfloat16_cache()
    cache.append(*(side.astype(np.float32) for side in tokens(2)))
    room = Tensor(BITS.copy(), (2, HEADS, DIM), kind=kind, flags=flags)
    error = refused(cache, InvalidInputError, cache.read_range_into, 0, 2, room, room)
    assert "read-only" in str(error)
    assert_array_equal(room.data, BITS)


def test_bfloat16_goes_out_into_a_tensor():
    cache = bfloat16_cache()
    cache.append(*tokens(2))
    keys, values = (Tensor(np.zeros_like(BITS), (2, HEADS, DIM)) for _ in range(2))
    cache.read_range_into(0, 2, keys, values)
    assert_array_equal(values.data, np.frombuffer(cache.view().value_view, np.uint16))
    assert keys.deleted == values.deleted == 1


# Through NumPy


def test_numpy_reads_a_view_in_place(span):
    array = np.from_dlpack(span.value_view)
    assert address(array) == address(span.values)
    assert not array.flags.writeable
    assert_array_equal(array, tokens(TOKENS)[1])


def test_numpy_writes_to_reserved_rows_in_place(cache, rows):
    np.from_dlpack(rows.key_view)[...] = 5
    rows.commit()
    assert np.all(cache.read_range(0, TOKENS)[0] == 5)


def test_arrays_of_a_view_are_read_only_in_their_own_exports(span):
    assert opened(span.keys.__dlpack__(max_version=VERSION_1)).flags == READ_ONLY
    with pytest.raises(BufferError):
        span.keys.__dlpack__()


def test_tokens_come_in_through_dlpack(cache, span):
    cache.append(np.from_dlpack(span.key_view), span.value_view)
    assert_array_equal(cache.read_range(TOKENS, 2 * TOKENS), tokens(TOKENS))
