"""A forked child can use nothing of its parent's but what it already sees, and hangs on nothing."""

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import time
import traceback
import warnings

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from kvspan.errors import ForkedError
from support import SOON, Threads, isolated, new_cache, new_filled_cache, token, tokens

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

ROOM = np.zeros(100, np.float32)


@contextlib.contextmanager
def no_hang(child):
    """Ends a child that hangs, and fails."""
    timer = threading.Timer(SOON / 2, os.kill, (child, 9))
    timer.start()
    yield
    timer.cancel()
    timer.join()


def in_a_child(check):
    """Runs `check` in a forked child, which must end by itself and well."""
    with warnings.catch_warnings():
        # From Python 3.12 on: that other threads' locks stay locked is what is tested here.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    with no_hang(child):
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


USES = {
    "len": len,
    "is_empty": lambda cache: cache.is_empty(),
    "nbytes": lambda cache: cache.nbytes,
    "initialize": lambda cache: cache.initialize(1),
    "write_kv": lambda cache: cache.write_kv(0, *token()),
    "write_kv with a timeout": lambda cache: cache.write_kv(0, *token(), timeout=1),
    "write_kv_batch": lambda cache: cache.write_kv_batch([(0, *token())]),
    "write_kv_batch of arrays": lambda cache: cache.write_kv_batch([0], *tokens(1)),
    "append": lambda cache: cache.append(*token()),
    "reserve": lambda cache: cache.reserve(1),
    "truncate": lambda cache: cache.truncate(0),
    "reset": lambda cache: cache.reset(timeout=1),
    "view": lambda cache: cache.view(),
    "with_read_kv": lambda cache: cache.with_read_kv(0, print),
    "with_read_range": lambda cache: cache.with_read_range(0, 1, print),
    "read_range_into": lambda cache: cache.read_range_into(0, 1, ROOM, ROOM),
    "read_kv": lambda cache: cache.read_kv(0),
    "read_range": lambda cache: cache.read_range(0, 1),
    "prefault": lambda cache: cache.prefault(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@isolated
def test_cache_can_not_be_used_in_a_child():
    cache = new_filled_cache()

    def check():
        for name, use in USES.items():
            with pytest.raises(ForkedError):
                use(cache)
                pytest.fail(f"{name} worked")
        with pytest.raises(TypeError):
            pickle.dumps(cache)
        assert (cache.capacity, cache.config) == (16, new_cache().config)
        assert repr(cache) == "LayerKvCache(made before fork())"

    in_a_child(check)
    assert_array_equal(cache.read_range(0, 6), tokens(6))


def test_every_method_is_tried_in_a_child():
    methods = {name for name in dir(kvspan.LayerKvCache) if not name.startswith("_")}
    assert methods - {name.split()[0] for name in USES} == {
        "capacity",
        "config",
        "dtype",
        "head_dim",
        "num_heads",
    }


@isolated
def test_views_give_no_memory_in_a_child():
    cache = new_filled_cache()
    span, rows = cache.view(), cache.reserve(2)
    exporters = span.key_view, rows.value_view

    def check():
        for owner in [span, rows]:
            for attribute in ["keys", "values", "key_view", "value_view"]:
                with pytest.raises(ForkedError):
                    getattr(owner, attribute)
            with pytest.raises(ForkedError):
                owner.__enter__()
            assert "Span(start=" in repr(owner)
        for exporter in exporters:
            for consume in [memoryview, np.frombuffer, np.from_dlpack, bytes]:
                with pytest.raises(ForkedError):
                    consume(exporter)
            with pytest.raises(ForkedError):
                new_filled_cache().append(exporter, exporter)
            assert exporter.shape[1:] == (2, 4)

    in_a_child(check)
    rows.value_view.__dlpack__()


@isolated
def test_numpy_makes_no_array_of_objects_in_a_child():
    exporter = new_filled_cache().view().key_view

    def check():
        with pytest.raises(ForkedError):
            np.asarray(exporter)

    in_a_child(check)


@isolated
def test_views_and_reservations_can_not_end_in_a_child():
    cache = new_filled_cache()
    span, rows = cache.view(), cache.reserve(2)

    def check():
        for end in [rows.commit, rows.discard, span.release] * 2:
            with pytest.raises(ForkedError):
                end()

    in_a_child(check)
    assert rows.commit() == range(6, 8)
    span.release()


@isolated
def test_arrays_stay_readable_in_a_child():
    cache = new_filled_cache()
    span = cache.view()
    arrays = span.keys, np.asarray(span.key_view), np.from_dlpack(span.key_view)
    view = memoryview(span.key_view)

    def check():
        for array in arrays:
            assert_array_equal(array, tokens(6)[0])
            assert_array_equal(array[1:].copy(), tokens(6)[0][1:])
        assert view[5, 1, 3] == tokens(6)[0][5, 1, 3]

    in_a_child(check)


@isolated
def test_child_can_drop_everything():
    everything = [new_filled_cache(), copy.copy(new_cache())]
    cache = new_filled_cache()
    span, rows = cache.view(), cache.reserve(2)
    everything += [cache, span, span.keys, span.key_view, memoryview(span.key_view), span.values.T]
    everything += [rows, rows.values, np.from_dlpack(span.value_view)]
    everything += [span.key_view.__dlpack__(max_version=(1, 0))]

    def check():
        nonlocal cache, span, rows
        everything.clear()
        cache = span = rows = None
        gc.collect()

    in_a_child(check)
    everything.clear()


def refuses_len(cache):
    with pytest.raises(ForkedError):
        len(cache)


@isolated
def test_new_caches_work_in_a_child():
    parent = new_filled_cache()
    span = parent.view()

    def check():
        cache = new_filled_cache()
        held = [cache.view()]
        with Threads() as threads:
            threads.start(lambda: cache.reset(timeout=SOON))
            threading.Event().wait(0.05)
            held.clear()
        cache.append(span_keys, span_keys)
        assert_array_equal(cache.read_range(0, 6)[0], tokens(6)[0])
        with cache.reserve(2) as rows:
            rows.keys[...] = 1
        in_a_child(lambda: refuses_len(cache))

    span_keys = span.keys
    in_a_child(check)
    assert len(span) == len(parent) == 6


@isolated
def test_child_does_not_hang_on_what_other_threads_held():
    count = 4096  # more than is copied with the interpreter held
    cache = new_cache(4 * count)
    cache.append(*tokens(3 * count))
    rows, over = tokens(count), threading.Event()

    def overwrite():
        while not over.is_set():
            cache.write_kv_batch(range(count), *rows, timeout=SOON)

    def append():
        while not over.is_set():
            cache.truncate(3 * count, timeout=SOON)
            cache.append(*rows)

    def read():
        while not over.is_set():
            cache.view(0, 2 * count).keys.sum()
            cache.read_range(0, 2 * count)

    def check():
        nonlocal cache, span
        for use in USES.values():
            with pytest.raises(ForkedError):
                use(cache)
        with pytest.raises(ForkedError):
            span.release()
        cache = span = None
        gc.collect()
        # Those threads may have held what all locks share, so there are no new ones either.
        with pytest.raises(ForkedError, match="other threads"):
            new_cache()

    with Threads() as threads:
        for work in [overwrite, overwrite, append, read]:
            threads.start(work)
        span = cache.view(2 * count, 3 * count)
        for _ in range(20):
            in_a_child(check)
        over.set()
        span = None


@isolated
def test_child_ends_normally_with_inherited_objects():
    kept = [new_filled_cache(), new_filled_cache().view().keys, new_cache().reserve(1)]
    code = f"{len(kept)} objects"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        sys.exit(code != "3 objects")
    begin = time.monotonic()
    with no_hang(child):
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert time.monotonic() - begin < SOON / 2


@isolated
def test_fork_inside_a_callback():
    cache = new_filled_cache()

    def callback(keys, values):
        def check():
            assert_array_equal((keys, values), token(2))
            with pytest.raises(ForkedError):
                cache.read_kv(0)

        in_a_child(check)
        cache.append(*token())
        return len(cache)

    assert cache.with_read_kv(1, callback) == 7


def spawned(numbers, answers):
    cache = new_filled_cache()
    answers.put((len(cache), numbers))


@isolated
def test_other_ways_to_start_a_process_work():
    import multiprocessing

    for method in ["spawn", "forkserver"]:
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        process = context.Process(target=spawned, args=(kvspan.KVCacheConfig(), answers))
        process.start()
        assert answers.get(timeout=SOON) == (6, kvspan.KVCacheConfig())
        process.join(SOON)
        assert process.exitcode == 0
