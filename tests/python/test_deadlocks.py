"""Nothing hangs: not callbacks, finalizers, nested readers, busy interpreters, or the exit."""

import contextlib
import copy
import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from kvspan.errors import KvTimeoutError, PinnedError
from support import SOON, Threads, isolated, new_cache, new_filled_cache, token, tokens

ROOM = np.zeros(100, np.float32)


def use_everything(cache):
    """Calls each method once, but for changes of the tokens 0..6, which are refused if pinned."""
    cache.initialize(1)
    cache.append(*token())
    cache.append(*tokens(2))
    last = len(cache) - 1
    cache.write_kv(last, *token())
    cache.write_kv_batch([(last, *token()), (last - 1, *token())])
    cache.write_kv_batch([last], *tokens(1))
    with cache.reserve(1) as rows:
        rows.keys[...] = 1
    cache.reserve(1).discard()
    cache.truncate(len(cache) - 4)
    cache.prefault()
    with cache.view() as span:
        assert span.keys.shape == span.values.shape
        memoryview(span.key_view).release()
        np.from_dlpack(span.value_view)
    cache.with_read_kv(0, lambda keys, values: keys + values)
    cache.with_read_range(0, 2, lambda span: span.keys.sum())
    cache.read_range_into(0, 1, ROOM, ROOM)
    cache.read_kv(0)
    cache.read_range(0, 2)
    copy.deepcopy(copy.copy(cache))
    repr(cache), len(cache), cache.is_empty(), cache.nbytes, cache.capacity, cache.config


def change_pinned_tokens(cache):
    for change in [cache.reset, lambda: cache.truncate(0), lambda: cache.write_kv(0, *token())]:
        with pytest.raises(PinnedError):
            change()
    with pytest.raises(KvTimeoutError):
        cache.reset(timeout=0.01)


CALLBACKS = {
    "with_read_kv": lambda cache, f: cache.with_read_kv(0, f),
    "with_read_range": lambda cache, f: cache.with_read_range(0, 6, f),
}
each_callback = pytest.mark.parametrize("with_read", CALLBACKS)


@each_callback
@isolated
def test_callback_may_use_the_cache(with_read):
    cache = new_filled_cache()

    def callback(*_):
        use_everything(cache)
        change_pinned_tokens(cache)
        CALLBACKS[with_read](cache, lambda *_: use_everything(cache))

    CALLBACKS[with_read](cache, callback)
    cache.reset()


@each_callback
@isolated
def test_callback_may_wait_for_threads_that_use_the_cache(with_read):
    cache = new_filled_cache()

    def callback(*_):
        with Threads() as threads:
            threads.start(use_everything, cache)
            threads.start(change_pinned_tokens, cache)

    CALLBACKS[with_read](cache, callback)
    cache.reset()


@each_callback
@isolated
def test_callback_may_raise_collect_and_keep(with_read):
    cache, kept = new_filled_cache(), []

    def callback(*arguments):
        gc.collect()
        kept.append(arguments)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CALLBACKS[with_read](cache, callback)
    use_everything(cache)
    change_pinned_tokens(cache)
    kept.clear()
    gc.collect()
    cache.reset()


@isolated
def test_callbacks_of_two_caches_may_nest_both_ways():
    one, other = new_filled_cache(), new_filled_cache()
    inside = threading.Barrier(2, timeout=SOON)

    def nest(outer, inner):
        def callback(*_):
            inside.wait()
            inner.with_read_kv(1, lambda *_: inside.wait())
            inner.append(*token())
            outer.append(*token())
            with pytest.raises(PinnedError):
                inner.reset()
            inside.wait()

        outer.with_read_kv(0, callback)

    with Threads() as threads:
        threads.start(nest, one, other)
        threads.start(nest, other, one)
    assert len(one) == len(other) == 8


@isolated
def test_reader_inside_a_reader_passes_a_waiting_writer():
    cache = new_filled_cache()
    writing = threading.Event()

    def writer():
        writing.set()
        cache.reset(timeout=SOON)

    def callback(*_):
        threads.start(writer)
        assert writing.wait(SOON)
        # Time and again, so that the writer waits in some of the readers.
        for _ in range(1_000):
            cache.with_read_range(0, 6, lambda span: span.keys[0, 0, 0])
            cache.read_kv(3)

    with Threads() as threads:
        cache.with_read_kv(0, callback)
    assert len(cache) == 0


@isolated
def test_writer_gets_what_another_thread_lets_go_of():
    for change in [
        lambda cache: cache.write_kv(0, *token(9), timeout=SOON),
        lambda cache: cache.write_kv_batch([(0, *token(9))], timeout=float("inf")),
        lambda cache: cache.truncate(3, timeout=SOON),
        lambda cache: cache.reset(timeout=float("inf")),
    ]:
        cache = new_filled_cache()
        held, ended = [cache.view().keys, memoryview(cache.view().key_view)], []

        def drop(held=held, ended=ended):
            # In time for the writer to wait; it would pass without, and prove less.
            while held:
                threading.Event().wait(0.1)
                ended.append(time.monotonic())
                held.pop()

        with Threads() as threads:
            threads.start(drop)
            change(cache)
            assert time.monotonic() >= ended[-1]
            assert len(ended) == 2


@isolated
def test_waiting_writer_keeps_nobody_from_reading_and_appending():
    cache = new_filled_cache()
    held, waiting = [cache.view()], threading.Event()

    def writer():
        waiting.set()
        cache.truncate(0, timeout=SOON)

    with Threads() as threads:
        threads.start(writer)
        assert waiting.wait(SOON)
        for number in range(200):
            cache.append(*token())
            cache.view(number % 6)
            cache.read_range(0, len(cache))
            cache.with_read_kv(0, lambda keys, _: keys.sum())
            if len(cache) == 16:
                cache.truncate(6)
        held.clear()
    assert len(cache) == 0


# Finalizers


class UsesTheCache:
    """In a cycle, so that only the garbage collector ends it; then it uses the cache."""

    ended = 0

    def __init__(self, cache):
        self.cache, self.itself = cache, self

    def __del__(self):
        if sys.is_finalizing():
            return
        type(self).ended += 1
        self.cache.append(*token())
        self.cache.truncate(len(self.cache) - 1)
        self.cache.view().keys.sum()
        with contextlib.suppress(PinnedError):
            self.cache.write_kv(0, *token())


@isolated
def test_finalizers_may_use_the_cache_in_the_middle_of_its_calls():
    cache = new_filled_cache()
    gc.set_threshold(1)  # at every opportunity
    try:
        for _ in range(200):
            UsesTheCache(cache)
            use_everything(cache)
    finally:
        gc.set_threshold(700)
    assert UsesTheCache.ended > 100


@isolated
def test_finalizers_of_many_threads_may_use_the_cache():
    cache = new_cache(capacity=1_000)
    cache.append(*tokens(6))

    def work():
        for _ in range(300):
            UsesTheCacheToRead(cache)
            cache.append(*token())
            cache.view().values.sum()
            cache.read_range(0, 6)

    gc.set_threshold(1)
    with Threads() as threads:
        for _ in range(3):
            threads.start(work)
    gc.set_threshold(700)
    assert len(cache) == 906


class UsesTheCacheToRead:
    def __init__(self, cache):
        self.cache, self.itself = cache, self

    def __del__(self):
        self.cache.view().keys.sum()
        self.cache.read_kv(0)


@isolated
def test_weak_references_may_use_the_cache_when_they_end():
    cache, called = new_filled_cache(), []

    def callback(_):
        called.append(True)
        use_everything(cache)
        with contextlib.suppress(PinnedError):  # the pin may end just before or after
            cache.write_kv(0, *token())

    for make in [cache.view, lambda: cache.view().key_view, lambda: cache.view().keys]:
        made = make()
        reference = weakref.ref(made, callback)
        del made
        assert reference() is None
        assert called.pop()


@isolated
def test_object_that_ends_with_a_callback_s_result_may_use_the_cache():
    cache = new_filled_cache()

    class Kept:
        def __del__(self):
            cache.reset()
            cache.append(*tokens(6))

    assert isinstance(cache.with_read_kv(0, lambda *_: Kept()), Kept)
    cache.with_read_range(0, 6, lambda _: Kept())
    assert len(cache) == 6


# The interpreter


@isolated
def test_work_goes_on_beside_a_thread_that_hogs_the_interpreter():
    cache = new_cache(4_000, 4, 256)
    rows = np.ones((2, 2_000, 4, 256), np.float32)
    over, done = threading.Event(), []

    def hog():
        while not over.is_set():
            sum(range(10_000))

    def work():
        for number in range(50):
            cache.append(*rows)
            cache.write_kv_batch(range(2_000), *rows, timeout=SOON)
            cache.read_range_into(0, 2_000, *rows)
            cache.truncate(0, timeout=SOON)
            done.append(number)

    with Threads() as hogs:
        hogs.start(hog)
        hogs.start(hog)
        try:
            with Threads() as threads:
                threads.start(work)
        finally:
            over.set()
    assert len(done) == 50


@isolated
def test_exit_ends_a_daemon_thread_that_waits_for_a_view():
    cache = new_filled_cache()
    span, waiting = cache.view(), threading.Event()

    def wait():
        waiting.set()
        cache.truncate(0, timeout=float("inf"))

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(SOON)
    threading.Event().wait(0.1)
    sys.modules["kept until the exit"] = span
