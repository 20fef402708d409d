"""DLPack: what is in the capsule, what is refused, and who keeps the memory."""

import ctypes
import gc

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan.errors import PinnedError, ReservedError
from support import DIM, HEADS, WIDTH, address, refused, token, tokens

TOKENS = 3
VERSION_1 = (1, 0)
READ_ONLY, IS_COPIED = 1, 2
CPU = (1, 0)
FLOAT32 = (2, 32, 1)


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
