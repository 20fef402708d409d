"""Ctrl-C ends every wait, leaves the cache as it was, and never splits a write."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvspan
from kvspan.errors import InvalidInputError, PinnedError
from support import Threads, assert_holds, isolated, new_cache, new_filled_cache, token, tokens

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent as on Unix")

LONG = 600.0
WAITS = {
    "write_kv": lambda cache, timeout: cache.write_kv(0, *token(), timeout=timeout),
    "write_kv_batch": lambda cache, timeout: cache.write_kv_batch(
        [(7, *token()), (5, *token())], timeout=timeout
    ),
    "write_kv_batch of arrays": lambda cache, timeout: cache.write_kv_batch(
        [5, 0], *tokens(2), timeout=timeout
    ),
    "truncate": lambda cache, timeout: cache.truncate(3, timeout=timeout),
    "reset": lambda cache, timeout: cache.reset(timeout=timeout),
}
each_wait = pytest.mark.parametrize("wait", WAITS)


class Ctrl_C:  # noqa: N801
    """Sends the signal in a while, and remembers when."""

    def __init__(self, after=0.15, number=signal.SIGINT):
        self.sent = None
        self._after, self._number = after, number
        self._timer = threading.Thread(target=self._send, daemon=True)
        self._timer.start()

    def _send(self):
        threading.Event().wait(self._after)
        self.sent = time.monotonic()
        os.kill(os.getpid(), self._number)


@each_wait
@isolated
def test_ctrl_c_ends_a_wait_for_a_view(wait):
    for timeout in [LONG, float("inf")]:
        cache = new_filled_cache()
        span = cache.view()
        ctrl_c = Ctrl_C()
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](cache, timeout)
        assert time.monotonic() - ctrl_c.sent < 0.9
        assert_holds(cache, *tokens(6))
        assert np.array_equal(span.keys, tokens(6)[0])
        del span
        WAITS[wait](cache, timeout)


@isolated
def test_handler_s_own_exception_ends_the_wait():
    class MyError(Exception):
        pass

    def handler(*_):
        raise MyError

    signal.signal(signal.SIGUSR1, handler)
    cache = new_filled_cache()
    span = cache.view()
    ctrl_c = Ctrl_C(number=signal.SIGUSR1)
    with pytest.raises(MyError):
        cache.reset(timeout=LONG)
    assert time.monotonic() - ctrl_c.sent < 0.9
    assert_holds(cache, *tokens(6))
    assert len(span) == 6


@isolated
def test_handler_may_use_the_cache_and_the_wait_goes_on():
    cache = new_filled_cache()
    held, handled = [cache.view()], []

    def handler(*_):
        handled.append(len(cache.view()))
        cache.append(*token())
        held.clear()

    signal.signal(signal.SIGUSR1, handler)
    Ctrl_C(number=signal.SIGUSR1)
    cache.truncate(2, timeout=LONG)
    assert handled == [6]
    assert_holds(cache, *tokens(2))


@isolated
def test_ctrl_c_is_for_the_main_thread_and_others_wait_on():
    cache = new_filled_cache()
    held, handled = [cache.view()], []
    signal.signal(signal.SIGINT, lambda *_: handled.append(True))
    with Threads() as threads:
        threads.start(lambda: cache.reset(timeout=LONG))
        ctrl_c = Ctrl_C()
        while not handled:
            threading.Event().wait(0.01)
        assert time.monotonic() - ctrl_c.sent < 0.9
        assert len(cache) == 6
        held.clear()
    assert len(cache) == 0


@isolated
def test_ctrl_c_does_not_split_a_long_copy():
    count = 8 * 1024
    rows = np.ones((2, count, 16, 128), np.float32)  # 128 MiB
    cache = new_cache(count, 16, 128)
    for number in range(20):
        cache.reset()
        with contextlib.suppress(KeyboardInterrupt):
            Ctrl_C(after=number * 0.001)
            cache.append(*rows)
            threading.Event().wait(1)
        assert len(cache) in (0, count)
        with cache.view() as span:
            assert span.keys[::64].all()
            assert span.values[::64].all()


@isolated
def test_ctrl_c_ends_the_reading_of_endless_input():
    manager = kvspan.KvCacheManager(4)
    handle = manager.allocate([1])
    rows = np.ones((1, 4, 64), np.float32)
    for call in [
        lambda: manager.allocate(range(2**32)),
        lambda: manager.write_many(0, itertools.repeat(handle), [0], rows, rows),
        lambda: manager.write_many(0, [handle], itertools.repeat(0), rows, rows),
        lambda: manager.allocate([1], extra_keys={0: itertools.repeat(b"")}),
        lambda: kvspan.attention(rows, [handle], 0, query_lens=itertools.repeat(1)),
    ]:
        # Sent by another process, since no thread of this one gets a turn meanwhile.
        command = f"sleep 1; date +%s.%N; kill -INT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as sender:
            with pytest.raises(KeyboardInterrupt):
                call()
            assert time.time() - float(sender.stdout.read()) < 0.9


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["cache", "handle"])
@isolated
def test_ctrl_c_ends_attention_and_leaves_no_trace(kind, num_threads):
    # Some seconds in a release build, and most of an hour in a debug build, of which Ctrl-C waits for
    # the task that is being computed: one query token here.
    num_queries, num_q_heads, num_tokens, dim = 4096, 129, 2048, 8
    rows = np.ones((num_tokens, 1, dim), np.float32)
    if kind == "cache":
        cache = new_cache(num_tokens, 1, dim)
        cache.append(rows, rows)
        context = (cache,)

        def is_pinned():
            try:
                cache.write_kv(0, rows[0], rows[0])
            except PinnedError:
                return True
            return False

    else:
        manager = kvspan.KvCacheManager(num_tokens // 16, num_kv_heads=1, head_dim=dim)
        handle = manager.allocate(range(num_tokens))
        manager.write(handle, 0, 0, rows, rows)
        context = (handle, 0)

        def is_pinned():
            return bool(manager.leak_report().pinned_blocks)

    def press_once_pinned():
        while not is_pinned():
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    pool = kvspan.AttentionPool(num_threads)
    query = np.ones((num_queries, num_q_heads, dim), np.float32)
    out = np.full(query.shape, -1, np.float32)
    with Threads() as threads:
        threads.start(press_once_pinned)
        with pytest.raises(KeyboardInterrupt):
            kvspan.attention(query, *context, causal=False, out=out, pool=pool)
    # Of a call that had gone on to its end the interrupt would come as well, but after this.
    assert (out == -1).all()
    assert not is_pinned()
    assert (kvspan.attention(query[:1], *context, pool=pool) == 1).all()


@isolated
def test_ctrl_c_in_a_callback_passes_through():
    cache = new_filled_cache()

    def callback(*_):
        signal.raise_signal(signal.SIGINT)

    for call in [
        lambda: cache.with_read_kv(0, callback),
        lambda: cache.with_read_range(0, 6, callback),
    ]:
        with pytest.raises(KeyboardInterrupt):
            call()
    assert_holds(cache, *tokens(6))


@isolated
def test_ctrl_c_in_a_reservation_s_block_discards_it():
    cache = new_filled_cache()
    with pytest.raises(KeyboardInterrupt), cache.reserve(3) as rows:
        rows.keys[...] = 1
        signal.raise_signal(signal.SIGINT)
    assert_holds(cache, *tokens(6))
    cache.reset()


@isolated
def test_what_a_handler_takes_away_is_not_written_to():
    cache = new_cache(1000, heads=2, dim=64)
    cache.initialize(1000)
    query = np.zeros((20, 16, 64), np.float32)
    start = time.perf_counter()
    kvspan.attention(query, cache, causal=False)
    # So many that a call looks for signals several times, however fast this build is.
    query = query.repeat(max(1, round(0.5 / (time.perf_counter() - start))), axis=0)
    out, calls, taken = np.empty_like(query), 0, []

    def take(*_):
        out.resize(1, refcheck=False)
        taken.append(calls)

    signal.signal(signal.SIGUSR1, take)
    Ctrl_C(number=signal.SIGUSR1)
    with pytest.raises(InvalidInputError, match="out"):
        while True:
            calls += 1
            kvspan.attention(query, cache, causal=False, out=out)
    assert taken == [calls]  # it was taken away during the call that noticed
