"""Every exception: its family, its numbers, and a real call that raises it."""

import builtins
import copy
import importlib
import os
import pickle
import re
import traceback

import numpy as np
import pytest

import kvspan
from kvspan import errors
from kvspan.errors import (
    CapacityExceededError,
    InvalidConfigError,
    InvalidInputError,
    KvCacheError,
    KvTimeoutError,
    NotInitializedError,
    OutOfMemoryError,
    OutOfRangeError,
    PinnedError,
    ReleasedError,
    ReservedError,
    ViewsAliveError,
)
from support import CAPACITY, new_cache, new_filled_cache, run_python, token, tokens

CLASSES = [getattr(errors, name) for name in errors.__all__]
BUILT_INS = {
    "CapacityExceededError": IndexError,
    "ForkedError": RuntimeError,
    "InvalidConfigError": ValueError,
    "InvalidInputError": ValueError,
    "KvCacheError": Exception,
    "KvTimeoutError": TimeoutError,
    "NotInitializedError": RuntimeError,
    "OutOfMemoryError": MemoryError,
    "OutOfRangeError": IndexError,
    "PinnedError": BufferError,
    "ReleasedError": ValueError,
    "ReservedError": BufferError,
    "ViewsAliveError": BufferError,
    "WouldDeadlockError": RuntimeError,
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
    assert set(CLASSES) - raised == {KvCacheError, errors.WouldDeadlockError}


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
