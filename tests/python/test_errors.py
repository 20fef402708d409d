"""Every exception: its family, its numbers, and a real call that raises it."""

import builtins
import copy
import importlib
import os
import pickle
import re
import traceback
from unittest.mock import ANY

import numpy as np
import pytest

import kvspan
from blocks import new_manager, start
from kvspan import errors
from kvspan.errors import (
    BlockIndexError,
    BlocksInUseError,
    CapacityExceededError,
    DuplicateBlockError,
    ForeignHandleError,
    InconsistentTableError,
    InvalidConfigError,
    InvalidInputError,
    KvCacheError,
    KvTimeoutError,
    LayerOutOfRangeError,
    LayersDifferError,
    NoStorageError,
    NoThreadsError,
    NotInitializedError,
    OutOfBlocksError,
    OutOfMemoryError,
    OutOfRangeError,
    PinnedError,
    ReleasedError,
    RequestExistsError,
    ReservedError,
    SlotOverflowError,
    StaleHandleError,
    TokenMismatchError,
    UnknownBlockError,
    UnknownRequestError,
    ViewsAliveError,
    WrongBlockStateError,
)
from support import CAPACITY, new_cache, new_filled_cache, run_python, token, tokens

CLASSES = [getattr(errors, name) for name in errors.__all__]
BUILT_INS = {
    "BlockIndexError": IndexError,
    "BlocksInUseError": RuntimeError,
    "CapacityExceededError": IndexError,
    "CorruptedError": RuntimeError,
    "DuplicateBlockError": ValueError,
    "ForeignHandleError": ValueError,
    "ForkedError": RuntimeError,
    "InconsistentTableError": ValueError,
    "InvalidConfigError": ValueError,
    "InvalidInputError": ValueError,
    "KvCacheError": Exception,
    "KvTimeoutError": TimeoutError,
    "LayerOutOfRangeError": IndexError,
    "LayersDifferError": ValueError,
    "NoStorageError": RuntimeError,
    "NoThreadsError": RuntimeError,
    "NotInitializedError": RuntimeError,
    "OutOfBlocksError": MemoryError,
    "OutOfMemoryError": MemoryError,
    "OutOfRangeError": IndexError,
    "PinnedError": BufferError,
    "ReleasedError": ValueError,
    "RequestExistsError": ValueError,
    "ReservedError": BufferError,
    "SlotOverflowError": OverflowError,
    "StaleHandleError": ValueError,
    "TokenMismatchError": ValueError,
    "UnknownBlockError": IndexError,
    "UnknownRequestError": KeyError,
    "ViewsAliveError": BufferError,
    "WouldDeadlockError": RuntimeError,
    "WrongBlockStateError": RuntimeError,
}


# More than the address space of today's machines has.
TOO_MUCH = 2**56


def larger_than_any_memory():
    return kvspan.LayerKvCache(kvspan.KVCacheConfig(TOO_MUCH // 64, 2, 4))


def with_view(call):
    cache = new_filled_cache()
    span = cache.view(1, 4)
    call(cache, span)


def with_reservation(call):
    cache = new_filled_cache()
    call(cache, cache.reserve(3))


def released(span):
    span.release()
    return span


def with_sequence(call, **options):
    """Calls `call` with a manager and a sequence of five tokens."""
    manager = new_manager(**options)
    call(manager, start(manager, [1, 2, 3, 4, 5], "chat"))


def freed(manager, handle):
    manager.free(handle)
    return handle


def committed_twice(manager, _):
    one = manager.allocate([9])
    manager.extend(one, 3)
    other = manager.fork(one)
    manager.commit(one, [9, 7, 7, 7])
    manager.commit(other, [9, 8, 8, 8])


def set_table(handle, blocks):
    handle.block_table = kvspan.BlockTable(4, blocks, 5)


def used_in_a_child():
    """Raises in this process what a call raises in a forked child."""
    code = """if True:
        import os, pickle, warnings, kvspan
        warnings.simplefilter("ignore")  # that other threads' locks stay locked in a child
        cache = kvspan.LayerKvCache()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                len(cache)
            except kvspan.errors.ForkedError as error:
                os.write(write, pickle.dumps(error))
            os._exit(0)
        os.waitpid(child, 0)
        print(os.read(read, 10_000).hex())
    """
    raise pickle.loads(bytes.fromhex(run_python(code)))


def numbers_of(error):
    return {field: getattr(error, field) for field in error._fields}


# What raises each exception, and the numbers that it then has.
RAISED = [
    (
        CapacityExceededError,
        lambda: new_filled_cache().append(*tokens(11)),
        {"start": 6, "end": 17, "capacity": CAPACITY},
    ),
    (
        CapacityExceededError,
        lambda: new_filled_cache().write_kv(CAPACITY, *token()),
        {"start": CAPACITY, "end": CAPACITY + 1, "capacity": CAPACITY},
    ),
    (
        CapacityExceededError,
        lambda: new_filled_cache().write_kv_batch([0, 20], *tokens(2)),
        {"start": 20, "end": 21, "capacity": CAPACITY},
    ),
    (
        CapacityExceededError,
        lambda: new_filled_cache().reserve(11),
        {"start": 6, "end": 17, "capacity": CAPACITY},
    ),
    (InvalidConfigError, lambda: kvspan.KVCacheConfig(num_heads=0), {}),
    (InvalidConfigError, lambda: kvspan.KVCacheConfig(2**40, 2**40), {}),
    (InvalidInputError, lambda: new_cache().initialize(0), {}),
    (InvalidInputError, lambda: new_cache().append(np.ones(3), np.ones(3)), {}),
    (
        KvTimeoutError,
        lambda: with_view(lambda cache, _: cache.truncate(3, timeout=0)),
        {"start": 3, "end": 6, "pins": 1},
    ),
    (
        KvTimeoutError,
        lambda: with_view(lambda cache, _: cache.write_kv(1, *token(), timeout=0.01)),
        {"start": 1, "end": 2, "pins": 1},
    ),
    (NoThreadsError, lambda: kvspan.AttentionPool(10**6), {"num_threads": 10**6}),
    (NotInitializedError, lambda: new_cache().write_kv(0, *token()), {}),
    (OutOfMemoryError, lambda: larger_than_any_memory().initialize(1), {"bytes": TOO_MUCH}),
    (OutOfMemoryError, lambda: larger_than_any_memory().append(*token()), {"bytes": TOO_MUCH}),
    (OutOfMemoryError, lambda: larger_than_any_memory().reserve(1), {"bytes": TOO_MUCH}),
    (OutOfMemoryError, lambda: larger_than_any_memory().prefault(), {"bytes": TOO_MUCH}),
    (
        OutOfRangeError,
        lambda: new_filled_cache().view(2, 9),
        {"start": 2, "end": 9, "len": 6},
    ),
    (
        OutOfRangeError,
        lambda: new_filled_cache().read_kv(6),
        {"start": 6, "end": 7, "len": 6},
    ),
    (
        OutOfRangeError,
        lambda: new_filled_cache().read_range(4, 2),
        {"start": 4, "end": 2, "len": None},
    ),
    (
        OutOfRangeError,
        lambda: new_filled_cache().truncate(-1),
        {"start": None, "end": None, "len": None},
    ),
    (
        PinnedError,
        lambda: with_view(lambda cache, _: cache.write_kv(3, *token())),
        {"start": 3, "end": 4, "pins": 1},
    ),
    (
        PinnedError,
        lambda: with_view(lambda cache, _: cache.reset()),
        {"start": 0, "end": 6, "pins": 1},
    ),
    (ReleasedError, lambda: released(new_filled_cache().view()).keys, {}),
    (
        ReservedError,
        lambda: with_reservation(lambda cache, _: cache.append(*token())),
        {"start": 6, "end": 9},
    ),
    (
        ViewsAliveError,
        lambda: with_view(lambda _, span: (span.keys, span.values, span.release())),
        {"views": 2},
    ),
    (
        OutOfBlocksError,
        lambda: with_sequence(lambda manager, _: manager.allocate(range(100, 140))),
        {"needed": 10, "free": 6, "evictable": 0, "pinned": 0},
    ),
    (
        StaleHandleError,
        lambda: with_sequence(lambda manager, handle: manager.free(freed(manager, handle))),
        {"cache_id": ANY},
    ),
    (
        ForeignHandleError,
        lambda: with_sequence(lambda _, handle: new_manager().extend(handle)),
        {"cache_id": ANY},
    ),
    (
        RequestExistsError,
        lambda: with_sequence(lambda manager, _: manager.allocate([1], "chat")),
        {"request_id": "chat"},
    ),
    (
        UnknownRequestError,
        lambda: with_sequence(lambda manager, _: manager.free_request("talk")),
        {"request_id": "talk"},
    ),
    (
        TokenMismatchError,
        lambda: with_sequence(
            lambda manager, _: manager.commit(manager.allocate([7, 8, 9]), [7, 9])
        ),
        {"token": 1},
    ),
    (
        LayerOutOfRangeError,
        lambda: with_sequence(lambda manager, handle: manager.view(handle, 2)),
        {"layer": 2, "num_layers": 2},
    ),
    (
        LayerOutOfRangeError,
        lambda: with_sequence(lambda manager, handle: manager.view(handle, -1)),
        {"layer": None, "num_layers": None},
    ),
    (
        NoStorageError,
        lambda: with_sequence(lambda manager, handle: manager.view(handle, 0), storage=False),
        {},
    ),
    (
        BlocksInUseError,
        lambda: with_sequence(lambda manager, _: manager.reset_prefix_cache()),
        {"in_use": 2},
    ),
    (
        WrongBlockStateError,
        lambda: with_sequence(committed_twice),
        {"block": 3, "state": "committed under another key", "wanted": "uncommitted"},
    ),
    (
        InconsistentTableError,
        lambda: with_sequence(lambda _, handle: set_table(handle, [1, 3])),
        {"reason": "it names blocks that the sequence does not have there"},
    ),
    (
        DuplicateBlockError,
        lambda: kvspan.BlockTable(4, [1, 2]).add_blocks([3, 2]),
        {"block": 2},
    ),
    (
        UnknownBlockError,
        lambda: kvspan.BlockTable(4, [1, 0]),
        {"block": 0, "num_blocks": None},
    ),
    (
        BlockIndexError,
        lambda: kvspan.BlockTable(4, [1, 2]).replace_block(2, 3),
        {"block_index": 2, "num_blocks": 2},
    ),
    (
        SlotOverflowError,
        lambda: kvspan.BlockTable(2**62, [1, 5]).slot_mapping(2**62 - 1, 2**62 + 1),
        {"token": 2**62},
    ),
    (
        LayersDifferError,
        lambda: kvspan.ContiguousKvCacheHandle([new_cache(), new_cache(capacity=17)]),
        {"layer": 1},
    ),
    (InvalidConfigError, lambda: kvspan.ContiguousKvCacheHandle([]), {}),
    (InvalidConfigError, lambda: new_manager(block_size=2**40, storage=False), {}),
    (InvalidInputError, lambda: new_manager().allocate([1, -1]), {}),
]
each_raised = pytest.mark.parametrize(("error", "call", "numbers"), RAISED)


@each_raised
def test_call_raises_its_exception_with_its_numbers(error, call, numbers):
    with pytest.raises(error) as caught:
        call()
    raised = caught.value
    assert type(raised) is error
    assert numbers_of(raised) == numbers
    assert raised.args == (str(raised), *(n for n in numbers.values() if n is not None))
    assert "\n" not in str(raised)
    assert str(raised) == str(raised).strip(". ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_use_in_a_child_raises_its_exception():
    with pytest.raises(errors.ForkedError, match="before fork"):
        used_in_a_child()


def test_every_exception_has_a_call_that_raises_it():
    raised = {error for error, _, _ in RAISED} | {errors.ForkedError}
    assert set(CLASSES) - raised == {
        KvCacheError,
        errors.CorruptedError,
        errors.WouldDeadlockError,
    }


@each_raised
def test_raised_exceptions_pickle(error, call, numbers):
    with pytest.raises(error) as caught:
        call()
    raised = caught.value
    for same in [
        *(pickle.loads(pickle.dumps(raised, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(raised),
        copy.deepcopy(raised),
    ]:
        assert type(same) is error
        assert (str(same), same.args, numbers_of(same)) == (str(raised), raised.args, numbers)


def test_memory_that_can_not_be_had_leaves_the_cache_empty():
    cache = larger_than_any_memory()
    with pytest.raises(MemoryError):
        cache.initialize(1)
    assert (len(cache), cache.nbytes, cache.is_empty()) == (0, 0, True)
    assert len(copy.deepcopy(cache)) == 0


def test_list_of_exceptions_is_complete():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__) == set(BUILT_INS)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("error", CLASSES)
def test_exception_is_of_two_families(error):
    built_in = BUILT_INS[error.__name__]
    assert issubclass(error, KvCacheError)
    assert issubclass(error, built_in)
    families = [c for c in error.__mro__ if vars(builtins).get(c.__name__) is c]
    assert families[0] is built_in


@pytest.mark.parametrize("error", CLASSES)
def test_exception_is_found_where_it_says(error):
    module = importlib.import_module(error.__module__)
    assert error.__module__ == "kvspan.errors"
    assert getattr(module, error.__qualname__) is error


@pytest.mark.parametrize("error", CLASSES)
def test_exception_is_documented(error):
    summary = error.__dict__["__doc__"].splitlines()[0]
    assert summary.endswith(".")
    for field in error._fields:
        assert re.search(rf"``.*{field}.*``", error.__doc__)


@pytest.mark.parametrize("error", CLASSES)
def test_exception_can_be_made_by_hand(error):
    numbers = range(7, 7 + len(error._fields))
    made = error("message", *numbers)
    assert str(made) == "message"
    assert made.args == ("message", *numbers)
    assert numbers_of(made) == dict(zip(error._fields, numbers, strict=True))
    assert numbers_of(error("message")) == dict.fromkeys(error._fields)
    assert str(error()) == ""
    assert pickle.loads(pickle.dumps(made)).args == made.args
    assert traceback.format_exception_only(made) == [f"kvspan.errors.{error.__name__}: message\n"]


def test_timeout_is_no_error_of_the_operating_system():
    error = KvTimeoutError("message", 0, 1, 2)
    assert isinstance(error, OSError)
    assert error.errno is error.strerror is error.filename is None


def test_base_is_at_the_top_of_the_package():
    assert kvspan.KvCacheError is KvCacheError
    assert kvspan.errors is errors
