"""`TensorView` and the buffer protocol: what each kind of request gets, and what is refused."""

import ctypes
import hashlib
import io
import sys

import numpy as np
import pytest

from support import DIM, HEADS, WIDTH, run_python, tokens

TOKENS = 3
SHAPE = (TOKENS, HEADS, DIM)
STRIDES = (WIDTH * 4, DIM * 4, 4)
NBYTES = TOKENS * WIDTH * 4


class PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


get_buffer = ctypes.pythonapi.PyObject_GetBuffer
get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int]
release_buffer = ctypes.pythonapi.PyBuffer_Release
release_buffer.argtypes = [ctypes.POINTER(PyBuffer)]
release_buffer.restype = None

WRITABLE, FORMAT, ND = 0x1, 0x4, 0x8
STRIDED = 0x10 | ND
C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS = 0x20 | STRIDED, 0x40 | STRIDED, 0x80 | STRIDED
INDIRECT = 0x100 | STRIDED

ANSWERED = {
    "SIMPLE": 0,
    "FORMAT": FORMAT,
    "ND": ND,
    "STRIDES": STRIDED,
    "C_CONTIGUOUS": C_CONTIGUOUS,
    "ANY_CONTIGUOUS": ANY_CONTIGUOUS,
    "INDIRECT": INDIRECT,
    "RECORDS_RO": STRIDED | FORMAT,
    "FULL_RO": INDIRECT | FORMAT,
}


@pytest.fixture
def span(cache):
    cache.append(*tokens(TOKENS))
    return cache.view()


@pytest.fixture
def rows(cache):
    return cache.reserve(TOKENS)


@pytest.mark.parametrize("flags", ANSWERED.values(), ids=ANSWERED)
@pytest.mark.parametrize("kind", ["span", "rows"])
def test_request_is_answered_with_what_it_asks_for(kind, flags, request):
    owner = request.getfixturevalue(kind)
    exporter, buffer = owner.key_view, PyBuffer()
    references = sys.getrefcount(exporter)
    get_buffer(exporter, buffer, flags)
    assert sys.getrefcount(exporter) == references + 1
    assert buffer.obj == id(exporter)
    assert buffer.buf == owner.keys.ctypes.data
    assert (buffer.len, buffer.itemsize) == (NBYTES, 4)
    # Whoever does not ask for a shape gets a flat run of bytes, and may rely on that.
    assert buffer.ndim == (3 if flags & ND else 1)
    assert buffer.readonly == (kind == "span")
    assert buffer.format == (b"f" if flags & FORMAT else None)
    assert bool(buffer.shape) == (flags & ND == ND)
    assert bool(buffer.strides) == (flags & STRIDED == STRIDED)
    assert not buffer.suboffsets
    if buffer.shape:
        assert tuple(buffer.shape[:3]) == SHAPE
    if buffer.strides:
        assert tuple(buffer.strides[:3]) == STRIDES
    release_buffer(buffer)
    assert sys.getrefcount(exporter) == references


@pytest.mark.parametrize("flags", ANSWERED.values(), ids=ANSWERED)
def test_writable_memory_is_for_reserved_rows_only(flags, span, rows):
    buffer = PyBuffer()
    get_buffer(rows.key_view, buffer, flags | WRITABLE)
    assert not buffer.readonly
    release_buffer(buffer)
    assert_refused(span.key_view, flags | WRITABLE)


def test_fortran_order_is_refused(span, rows):
    assert_refused(span.key_view, F_CONTIGUOUS)
    assert_refused(rows.key_view, F_CONTIGUOUS)


def assert_refused(exporter, flags):
    buffer = PyBuffer(obj=1)
    references = sys.getrefcount(exporter)
    with pytest.raises(BufferError):
        get_buffer(exporter, buffer, flags)
    assert buffer.obj is None
    assert sys.getrefcount(exporter) == references


def test_request_without_a_place_for_the_answer_is_refused(span):
    with pytest.raises(BufferError):
        get_buffer(span.key_view, None, 0)


def test_exports_can_end_in_any_order(span):
    exporter, buffers = span.key_view, [PyBuffer() for _ in range(3)]
    for buffer in buffers:
        get_buffer(exporter, buffer, INDIRECT | FORMAT)
    del exporter
    for number in [1, 0, 2]:
        release_buffer(buffers[number])
    span.release()


def test_memoryview_describes_the_tensor(span, rows):
    for exporter, readonly in [(span.value_view, True), (rows.value_view, False)]:
        view = memoryview(exporter)
        assert (view.format, view.itemsize, view.nbytes) == ("f", 4, NBYTES)
        assert (view.shape, view.strides, view.suboffsets) == (SHAPE, STRIDES, ())
        assert (view.readonly, view.c_contiguous, len(view)) == (readonly, True, TOKENS)
        assert view.obj is exporter


def test_exporter_describes_itself(span, rows):
    for exporter, readonly in [(span.value_view, True), (rows.value_view, False)]:
        assert (exporter.shape, exporter.strides, len(exporter)) == (SHAPE, STRIDES, TOKENS)
        assert (exporter.dtype, exporter.nbytes, exporter.readonly) == ("float32", NBYTES, readonly)


def test_memoryview_reads_the_tokens(span):
    keys, _ = tokens(TOKENS)
    view = memoryview(span.key_view)
    assert view[2, 1, 3] == keys[2, 1, 3]
    assert view.tolist() == keys.tolist()
    assert view.tobytes() == keys.tobytes()
    assert view == memoryview(keys)
    flat = view.cast("B").cast("f")
    assert flat[WIDTH:].tolist() == keys[1:].ravel().tolist()
    assert flat[::-1][0] == keys[-1, -1, -1]


@pytest.mark.parametrize(
    "write",
    [
        lambda exporter: memoryview(exporter).__setitem__((0, 0, 0), 1.0),
        lambda exporter: (ctypes.c_float * 4).from_buffer(exporter),
        lambda exporter: io.BytesIO(b"x" * NBYTES).readinto(exporter),
        lambda exporter: np.copyto(np.asarray(exporter), 0),
        lambda exporter: np.asarray(exporter).sort(),
        lambda exporter: np.asarray(exporter).byteswap(inplace=True),
        lambda exporter: np.add(np.asarray(exporter), 1, out=np.asarray(exporter)),
    ],
)
def test_writing_to_a_view_is_refused(write, span):
    with pytest.raises((TypeError, ValueError, BufferError)):
        write(span.key_view)
    assert np.array_equal(span.keys, tokens(TOKENS)[0])


def test_consumers_of_bytes_take_the_memory(span):
    expected = tokens(TOKENS)[0].tobytes()
    assert bytes(span.key_view) == bytearray(span.key_view) == expected
    assert (
        hashlib.sha256(memoryview(span.key_view).cast("B")).digest()
        == hashlib.sha256(expected).digest()
    )
    stream = io.BytesIO()
    assert stream.write(span.key_view) == NBYTES
    assert stream.getvalue() == expected
    span.release()


# In a process of its own: Python trusts the answer so far that a wrong one can crash it.
BUFFER_METHOD = """
import collections.abc, numpy as np, kvspan
cache = kvspan.LayerKvCache()
cache.initialize(3)
exporter = cache.view().key_view
assert isinstance(exporter, collections.abc.Buffer)
for flags in range(0x100):
    try:
        view = exporter.__buffer__(flags)
    except BufferError:
        assert flags & 1 or flags & 0x58 == 0x58
    else:
        assert view.readonly and view.nbytes == exporter.nbytes
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python shows the protocol from 3.12 on")
def test_python_can_make_any_request():
    run_python(BUFFER_METHOD)


def test_array_method_is_free_of_copies_unless_asked(span):
    exporter = span.key_view
    same = exporter.__array__()
    assert same.ctypes.data == exporter.__array__(None, copy=False).ctypes.data
    assert same.ctypes.data == span.keys.ctypes.data
    assert not same.flags.writeable
    for copied in [exporter.__array__(copy=True), exporter.__array__(np.float64)]:
        assert copied.flags.owndata
        assert np.array_equal(copied, tokens(TOKENS)[0])
    with pytest.raises(ValueError, match="copy"):
        exporter.__array__(np.float64, copy=False)
