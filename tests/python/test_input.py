"""Memory that does not fit is refused with the exact exception, and the cache stays as it was."""

import array
import ctypes

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan.errors import CapacityExceededError, InvalidInputError, PinnedError, ReservedError
from support import CAPACITY, DIM, HEADS, WIDTH, refused, said, token, tokens

KEYS, VALUES = token(9)


def misaligned(exported):
    raw = np.zeros(exported.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(exported.tobytes(), np.uint8)
    return raw.view(np.float32).reshape(exported.shape)


def released(exported):
    view = memoryview(exported.copy())
    view.release()
    return view


class Raising:
    """Fails to export its memory."""

    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **_):
        raise self.error

    def __dlpack_device__(self):
        return (1, 0)


class NoDevice:
    """Only half of an exporter."""

    def __dlpack__(self, **_):
        return None


class NoCapsule(NoDevice):
    """Exports what is no tensor."""

    def __dlpack_device__(self):
        return (1, 0)


class OnGpu(NoCapsule):
    """Exports memory of another device."""

    def __dlpack_device__(self):
        return (2, 0)


# What is wrong with a token, and what the message must say.
WRONG_MEMORY = {
    "float64": (KEYS.astype(np.float64), "float64"),
    "float16": (KEYS.astype(np.float16), "float16"),
    "int32": (KEYS.astype(np.int32), "int32"),
    "bool": (KEYS.astype(bool), "bool"),
    "complex64": (KEYS.astype(np.complex64), "complex64"),
    "big-endian": (KEYS.astype(">f4"), ">f4"),
    "object": (KEYS.astype(object), "object"),
    "str": (KEYS.astype(str), "<U"),
    "record": (np.zeros((HEADS, DIM), [("x", "f4")]), "x"),
    "datetime64": (np.zeros((HEADS, DIM), "M8[s]"), "datetime64"),
    "buffer of doubles": (array.array("d", KEYS.ravel()), "'d'"),
    "buffer of ints": (memoryview(array.array("i", range(WIDTH))), "'i'"),
    "bytes": (KEYS.tobytes(), "'B'"),
    "bytearray": (bytearray(KEYS), "'B'"),
    "memoryview of bytes": (memoryview(KEYS.tobytes()), "'B'"),
    "big-endian ctypes": ((ctypes.c_float.__ctype_be__ * WIDTH)(), "'>f'"),
    "strided": (np.zeros((HEADS, 2 * DIM), np.float32)[:, ::2], "C-contiguous"),
    "negative strides": (KEYS[::-1], "C-contiguous"),
    "negative strides, flat": (KEYS.ravel()[::-1], "C-contiguous"),
    "Fortran order": (np.asfortranarray(KEYS), "C-contiguous"),
    "transposed": (np.zeros((DIM, HEADS), np.float32).T, "C-contiguous"),
    "broadcast": (np.broadcast_to(np.float32(1), (HEADS, DIM)), "C-contiguous"),
    "strided memoryview": (memoryview(np.zeros(2 * WIDTH, np.float32))[::2], "C-contiguous"),
    "misaligned": (misaligned(KEYS), "aligned"),
    "misaligned memoryview": (memoryview(misaligned(KEYS)), "aligned"),
    "no axes": (np.array(1, np.float32), "()"),
    "four axes": (KEYS[None, None], "(1, 1, 2, 4)"),
    "too few heads": (KEYS[:1], "(1, 4)"),
    "too small a head": (KEYS[:, :-1].copy(), "(2, 3)"),
    "too long": (np.zeros(WIDTH + 1, np.float32), "(9,)"),
    "swapped axes": (KEYS.T.copy(), "(4, 2)"),
    "no elements": (np.zeros(0, np.float32), "(0,)"),
    "memoryview of another shape": (memoryview(bytes(8)).cast("f"), "(2,)"),
    "float of NumPy": (np.float32(1), "()"),
    "float of ctypes": (ctypes.c_float(1), "()"),
    "released memoryview": (released(KEYS), "can not be read"),
    "failing exporter": (Raising(RuntimeError("mine")), "mine"),
    "exporter without a device": (NoDevice(), "DLPack"),
    "exporter without a capsule": (NoCapsule(), "DLPack"),
    "exporter of another device": (OnGpu(), "DLPack"),
}
NO_MEMORY = {
    "None": None,
    "list": KEYS.tolist(),
    "flat list": KEYS.ravel().tolist(),
    "tuple": tuple(KEYS.ravel().tolist()),
    "float": 1.0,
    "str": "keys",
    "type": float,
    "object": object(),
    "dict": {},
    "iterator": iter(KEYS),
}


def write(cache, keys, values):
    cache.write_kv(0, keys, values)


def write_past_the_end(cache, keys, values):
    cache.write_kv(10, keys, values)


def write_batch(cache, keys, values):
    cache.write_kv_batch([(0, KEYS, VALUES), (8, keys, values)])


def append(cache, keys, values):
    cache.append(keys, values)


def read_into(cache, keys, values):
    cache.read_range_into(0, 1, keys, values)


WRITES = [write, write_past_the_end, write_batch, append]


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize(("wrong", "named"), WRONG_MEMORY.values(), ids=WRONG_MEMORY)
def test_wrong_memory_is_refused(call, wrong, named, filled):
    assert named in str(refused(filled, InvalidInputError, call, filled, wrong, VALUES))
    error = refused(filled, InvalidInputError, call, filled, KEYS, wrong)
    assert named in str(error)
    assert "values" in str(error)


@pytest.mark.parametrize("call", [*WRITES, read_into])
@pytest.mark.parametrize("wrong", NO_MEMORY.values(), ids=NO_MEMORY)
def test_what_is_no_memory_is_a_type_error(call, wrong, filled):
    assert "keys" in str(refused(filled, TypeError, call, filled, wrong, VALUES.copy()))
    assert "values" in str(refused(filled, TypeError, call, filled, KEYS.copy(), wrong))


FLAT = {"no elements", "too long", "memoryview of another shape"}


@pytest.mark.parametrize("name", WRONG_MEMORY.keys() - FLAT)
def test_wrong_room_is_refused(name, filled):
    wrong, _ = WRONG_MEMORY[name]
    room = np.zeros((HEADS, DIM), np.float32)
    assert "keys" in str(refused(filled, InvalidInputError, read_into, filled, wrong, room))
    assert "values" in str(refused(filled, InvalidInputError, read_into, filled, room, wrong))
    assert not room.any()


def read_only(exported):
    copied = exported.copy()
    copied.setflags(write=False)
    return copied


@pytest.mark.parametrize(
    "room",
    [
        read_only,
        lambda keys: memoryview(keys.tobytes()).cast("f"),
        lambda keys: memoryview(keys).toreadonly(),
        lambda keys: np.frombuffer(keys.tobytes(), np.float32),
    ],
)
def test_read_only_room_is_refused(room, filled):
    enough = np.zeros((HEADS, DIM), np.float32)
    for arguments in [(room(KEYS), enough), (enough, room(KEYS))]:
        error = refused(filled, InvalidInputError, read_into, filled, *arguments)
        assert "read-only" in str(error)
    assert not enough.any()


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, HEADS, DIM), (3, HEADS, DIM)), ((HEADS, DIM), (2, WIDTH)), ((0, WIDTH), (1, WIDTH))],
)
def test_keys_and_values_must_be_as_many(keys, values, filled):
    for shapes in [(keys, values), (values, keys)]:
        sides = [np.ones(shape, np.float32) for shape in shapes]
        refused(filled, InvalidInputError, append, filled, *sides)


@pytest.mark.parametrize(
    "shape", [(3, HEADS, DIM + 1), (3, DIM, HEADS), (3, WIDTH - 1), (3 * WIDTH,), (3, 2, 2, 2)]
)
def test_tokens_of_another_shape_are_refused(shape, filled):
    wrong = np.ones(shape, np.float32)
    refused(filled, InvalidInputError, append, filled, wrong, wrong)
    refused(filled, InvalidInputError, filled.write_kv_batch, [0, 1, 2], wrong, wrong)


@pytest.mark.parametrize("shape", [(1, HEADS, DIM), (1, WIDTH)])
def test_many_tokens_are_not_one(shape, filled):
    row = np.ones(shape, np.float32)
    refused(filled, InvalidInputError, write, filled, row, row)
    refused(filled, InvalidInputError, write_batch, filled, row, row)
    refused(filled, InvalidInputError, filled.write_kv_batch, [0], KEYS, VALUES)


# Batches


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_batch_says_which_entry_is_wrong_and_writes_none(bad, filled):
    for wrong, error in [
        ((0, KEYS, VALUES[:1]), InvalidInputError),
        ((0, KEYS, None), TypeError),
        ((CAPACITY, KEYS, VALUES), CapacityExceededError),
        ((0, KEYS.astype(float), VALUES), InvalidInputError),
        (("0", KEYS, VALUES), TypeError),
        ((0, KEYS), InvalidInputError),
        ((0, KEYS, VALUES, 1), InvalidInputError),
        (None, TypeError),
    ]:
        entries = [(number, KEYS, VALUES) for number in range(3)]
        entries[bad] = wrong
        raised = refused(filled, error, filled.write_kv_batch, entries)
        assert f"entry {bad} of the batch" in said(raised)


@pytest.mark.parametrize("count", [1, 2, 4, 0])
def test_batch_of_arrays_must_have_as_many_indices(count, filled):
    error = refused(filled, InvalidInputError, filled.write_kv_batch, range(count), *tokens(3))
    assert f"{count} token indices were given with 3 rows" in str(error)


@pytest.mark.parametrize("batch", [3, None, 1.0, object(), np.float32(1)])
def test_batch_must_be_iterable(batch, filled):
    refused(filled, TypeError, filled.write_kv_batch, batch)


def test_batch_takes_one_argument_or_three(filled):
    keys, values = tokens(1)
    refused(filled, TypeError, filled.write_kv_batch)
    refused(filled, TypeError, filled.write_kv_batch, [0], keys)
    refused(filled, TypeError, filled.write_kv_batch, [0], values=values)
    refused(filled, TypeError, filled.write_kv_batch, [0], keys, values, 1.0)


def test_exception_of_an_iterator_passes_unchanged(filled):
    error = ZeroDivisionError("mine")

    def entries():
        yield 0, KEYS, VALUES
        raise error

    assert refused(filled, ZeroDivisionError, filled.write_kv_batch, entries()) is error


# Exporters that fail


def test_cause_of_a_refusal_is_kept(filled):
    error = RuntimeError("mine")
    for call in [write, append, write_batch]:
        raised = refused(filled, InvalidInputError, call, filled, Raising(error), VALUES)
        assert raised.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("call", [*WRITES, read_into])
def test_what_is_not_an_error_of_the_exporter_passes_unchanged(call, error, filled):
    raised = refused(filled, type(error), call, filled, Raising(error), VALUES.copy())
    assert raised.args == error.args


class Meddling(Raising):
    """Does something to another argument while its own memory is asked for."""

    def __init__(self, meddle):
        self.meddle = meddle

    def __dlpack__(self, **options):
        self.meddle()
        return VALUES.__dlpack__(**options)


@pytest.mark.parametrize("call", [*WRITES, read_into])
def test_exporter_may_take_the_memory_of_another_argument_away(call, filled):
    keys = np.ones((HEADS, DIM), np.float32)
    shrinks = Meddling(lambda: keys.resize((0,), refcheck=False))
    refused(filled, InvalidInputError, call, filled, keys, shrinks)


def test_iterator_may_take_the_memory_of_earlier_entries_away(filled):
    keys = np.ones((HEADS, DIM), np.float32)

    def entries():
        yield 0, keys, VALUES
        keys.resize((0,), refcheck=False)
        yield 1, KEYS, VALUES

    refused(filled, InvalidInputError, filled.write_kv_batch, entries())


def test_exporter_may_use_the_cache(filled):
    filled.append(KEYS, Meddling(lambda: filled.truncate(2)))
    assert len(filled) == 3
    filled.write_kv(5, KEYS, Meddling(filled.reset))
    assert len(filled) == 6


# The cache's own memory


def test_own_view_is_no_room(filled):
    span = filled.view(0, 1)
    refused(filled, InvalidInputError, read_into, filled, span.keys, span.values)
    refused(filled, InvalidInputError, read_into, filled, span.key_view, span.value_view)


def test_own_view_can_not_be_written_over_itself(filled):
    span = filled.view()
    error = refused(filled, PinnedError, write, filled, span.keys[1], span.values[1])
    assert (error.start, error.end, error.pins) == (0, 1, 1)


def test_own_tokens_can_be_written_elsewhere(filled):
    span = filled.view(4, 6)
    filled.write_kv_batch([1, 0], span.keys, span.values)
    filled.write_kv(6, span.keys[0], span.values[0])
    for at, number in [(0, 6), (1, 5), (6, 5)]:
        assert_array_equal(filled.read_kv(at), token(number))


def test_reserved_rows_are_ordinary_memory(filled):
    rows = filled.reserve(2)
    rows.keys[...], rows.values[...] = tokens(2, first=40)
    refused(filled, ReservedError, append, filled, rows.keys, rows.values)
    filled.write_kv(0, rows.keys[1], rows.values[1])
    filled.read_range_into(2, 4, rows.key_view, rows.value_view)
    assert_array_equal((rows.keys, rows.values), tokens(2, first=3))
    assert_array_equal(filled.read_kv(0), token(41))
