"""Whatever a server does and wherever it is interrupted: every block comes back, and no byte of a
former owner is seen."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import pytest

import kvspan
from blocks import assert_nothing_leaks, compute, new_manager, read, right, rows_of, start
from kvspan.errors import ForkedError, OutOfBlocksError, StaleHandleError, UnknownRequestError
from support import Threads, isolated
from test_fork import in_a_child

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def manager():
    manager = new_manager(16)
    yield manager
    assert_nothing_leaks(manager)


def serve(manager, tokens, name=None):
    """A request with a bit of everything."""
    with manager.allocate(tokens, name, lookahead=2) as handle:
        compute(manager, handle, tokens, handle.num_cached_tokens)
        span = manager.view(handle, 0)
        arrays = [segment.keys for segment in span]
        fork = manager.fork(handle)
        manager.extend(fork, 3)
        manager.write_many(1, [handle, fork], [0, 1], *rows_of([5, 6]))
        manager.truncate(fork, 2)
        tensor = handle.value_cache(1)
        assert len(span) == len(tokens) == len(tensor.numpy())
        assert sum(map(len, arrays)) == len(tokens)
        del fork
        manager.probe(tokens)


# Where it ends


class Broken(Sequence):
    """A sequence that fails in the middle."""

    def __init__(self, good):
        self.good = good

    def __len__(self):
        return len(self.good) + 2

    def __getitem__(self, index):
        if index < len(self.good):
            return self.good[index]
        raise ZeroDivisionError


def test_arguments_that_fail_in_the_middle_leave_nothing_behind(manager):
    handle = start(manager, PROMPT)
    before = manager.inspect()

    def names():
        yield 0, ["cat"]
        raise ZeroDivisionError

    def handles():
        yield handle
        raise ZeroDivisionError

    for call in [
        lambda: manager.allocate(Broken([1, 2, 3])),
        lambda: manager.allocate([1, 2, 3], extra_keys=names()),
        lambda: manager.probe(Broken([1])),
        lambda: manager.commit(handle, Broken([])),
        lambda: manager.write_many(0, handles(), [0], *rows_of([1])),
        lambda: manager.write_many(0, [handle], Broken([]), *rows_of([1])),
    ]:
        with pytest.raises(ZeroDivisionError):
            call()
        assert manager.inspect() == before
        assert handle.num_tokens == len(PROMPT)
        assert read(manager, handle) == right(PROMPT)


def test_a_generator_that_is_closed_in_the_middle_gives_its_blocks_back(manager):
    def decode():
        handle = start(manager, PROMPT)
        span = manager.view(handle, 0)
        try:
            for token in range(100):
                yield token, span.segments[0].keys
                with suppress(OutOfBlocksError):
                    manager.extend(handle)
        finally:
            assert handle.is_valid

    for steps in range(4):
        tokens = decode()
        for _ in range(steps):
            next(tokens)
        assert (manager.stats().num_in_use > 0) == (steps > 0)
        tokens.close()
        assert_nothing_leaks(manager)


def test_exceptions_give_everything_back_as_they_unwind(manager):
    def fail(depth, parent):
        fork = manager.fork(parent)
        with suppress(OutOfBlocksError):
            manager.extend(fork, 1)
        view = manager.view(fork, 0)
        if depth == 0:
            raise ZeroDivisionError
        fail(depth - 1, fork)
        del view

    with ExitStack() as stack:
        handle = stack.enter_context(start(manager, PROMPT))
        with pytest.raises(ZeroDivisionError):
            fail(6, handle)
        # What was raised has the frames, and these have the forks.
        gc.collect()
        assert manager.stats().num_sequences == 1
    assert not handle.is_valid


def test_what_a_thread_had_comes_back_when_it_ends(manager):
    local = threading.local()

    def work(number, fails):
        local.handle = start(manager, [number, *PROMPT])
        local.kept = [manager.view(local.handle, 0).segments, local.handle.key_cache(1)]
        local.itself = local.kept
        local.kept.append(local.kept)
        if fails:
            raise ZeroDivisionError

    for number in range(6):
        with suppress(ZeroDivisionError), Threads() as threads:
            threads.start(work, number, number % 2)
        # The thread is done before its last words are.
        del threads
        gc.collect()
        assert manager.stats().num_pinned <= 6
    assert_nothing_leaks(manager)


def test_cycles_of_everything_are_collected(manager):
    class Node:
        pass

    for _ in range(10):
        node = Node()
        node.handle = start(manager, PROMPT)
        node.span = manager.view(node.handle, 0)
        node.segment = node.span.segments[1]
        node.array = node.segment.keys[1:].view()
        node.tensor = node.handle.key_cache(0)
        node.capsule = node.segment.value_view.__dlpack__(max_version=(1, 0))
        node.iterator = iter(node.span)
        node.bound = node.handle.close
        node.itself = node
        del node
        gc.collect()
        assert_nothing_leaks(manager)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such timers")
@isolated
def test_an_exception_out_of_nowhere_leaks_nothing_wherever_it_strikes():
    class Cancelled(BaseException):
        pass

    def cancel(*_):
        raise Cancelled

    manager, choose = new_manager(32), random.Random(1)
    signal.signal(signal.SIGALRM, cancel)
    start_time = time.monotonic()
    serve(manager, PROMPT)
    length = time.monotonic() - start_time
    cancelled = 0
    for number in range(300):
        tokens = [number % 3, *PROMPT]
        try:
            signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, length))
            serve(manager, tokens, f"request-{number}")
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Cancelled:
            cancelled += 1
        except (ValueError, TypeError) as error:
            # The interpreter may blame the call that the exception came out of.
            assert isinstance(error.__cause__ or error.__context__, Cancelled), error
        assert_nothing_leaks(manager)
        assert serve(manager, tokens, f"request-{number}") is None
    assert cancelled > 30


# What is left behind


def test_no_stale_byte_is_seen_in_a_recycled_block():
    """A former owner leaves NaN everywhere it can. 10,000 blocks change hands."""
    manager = kvspan.KvCacheManager(
        40, block_size=4, num_layers=2, num_kv_heads=2, head_dim=8, merge_duplicates=False
    )
    choose = random.Random(2)
    canary = np.full((12, 2, 8), np.nan, np.float32)
    handles, recycled = [], 0

    def check_zero(handle, start):
        for layer in range(2):
            span = manager.view(handle, layer, start)
            for segment in span:
                assert not segment.keys.any() and not segment.values.any()
            for tensor in handle.kv_cache(layer):
                assert not tensor.numpy()[start:].any()

    def spoil(handle):
        for layer in range(2):
            for at in range(0, handle.num_tokens, 12):
                rows = canary[: handle.num_tokens - at]
                with suppress(OutOfBlocksError):
                    manager.write(handle, layer, at, rows, rows)

    while recycled < 10_000:
        length = choose.randrange(1, 40)
        try:
            handle = manager.allocate([choose.randrange(9)] * length, lookahead=choose.randrange(9))
        except OutOfBlocksError:
            del handles[choose.randrange(len(handles))]
            continue
        recycled += handle.block_table.num_blocks
        check_zero(handle, handle.num_cached_tokens)
        spoil(handle)
        with suppress(OutOfBlocksError):
            fork = manager.fork(handle)
            keep = choose.randrange(length + 1)
            manager.truncate(fork, keep)
            manager.extend(fork, 7)
            check_zero(fork, keep)
            spoil(fork)
            recycled += 1
            if choose.random() < 0.3:
                handles.append(fork)
        fork = None
        handles.append(handle)
        if choose.random() < 0.5:
            # So that blocks come from the tail of the queue as well.
            tokens = handle.tokens[handle.num_committed_tokens :]
            manager.commit(handle, tokens)
            manager.truncate(handle, choose.randrange(handle.num_tokens + 1))
        del handle
    handles.clear()
    assert_nothing_leaks(manager)


# Many at once


def hammer(manager, seconds, in_between=lambda: None):
    """Threads that do everything at once, with views held; what is read must be what was written."""
    over = threading.Event()

    def work(seed):
        choose, held = random.Random(seed), []
        while not over.is_set():
            tokens = PROMPT[: choose.randrange(1, 10)] + [choose.randrange(3)] * choose.randrange(6)
            name = f"request-{choose.randrange(12)}" if choose.random() < 0.5 else None
            try:
                handle = manager.allocate(tokens, name)
                compute(manager, handle, tokens, handle.num_cached_tokens)
                span = manager.view(handle, 1)
                expected = right(tokens, 1)
                held.append((span.segments if choose.random() < 0.5 else [*span], expected))
                fork = manager.fork(handle)
                manager.extend(fork, 2)
                manager.write(fork, 1, 0, *rows_of([seed + 1]))
                assert read(manager, fork, 1) == [seed + 1, *expected[1:], 0, 0]
                assert read(manager, handle, 1) == expected
            except OutOfBlocksError:
                held.clear()
            except (StaleHandleError, kvspan.errors.RequestExistsError):
                pass
            for segments, numbers in held:
                found = [
                    number for segment in segments for number in segment.keys[:, 0, 0].tolist()
                ]
                assert found == numbers, "a view changed"
            del held[:-3]
            with suppress(UnknownRequestError):
                manager.free_request(f"request-{choose.randrange(12)}")

    with Threads() as threads:
        for seed in range(4):
            threads.start(work, seed)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            in_between()
            manager.check_integrity()
            stats = manager.stats()
            used = stats.num_in_use + stats.num_cached + stats.num_free
            assert (used, stats.hit_tokens + stats.miss_tokens) == (
                stats.num_blocks,
                stats.query_tokens,
            )
        over.set()
    gc.collect()


def test_threads_that_do_everything_at_once_leak_nothing():
    manager = new_manager(48)
    hammer(manager, 2.0)
    assert_nothing_leaks(manager)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@isolated
def test_children_that_are_forked_in_the_middle_neither_hang_nor_harm():
    manager = new_manager(48)
    handle = start(manager, PROMPT)
    kept = [handle, manager.view(handle, 0)]
    del handle

    def child():
        for use in [
            lambda: manager.stats(),
            lambda: manager.allocate([1]),
            lambda: manager.free(kept[0]),
            lambda: kept[0].close(),
            lambda: kept[1].segments,
        ]:
            with pytest.raises(ForkedError):
                use()
        gc.collect()

    def fork():
        in_a_child(child)
        assert read(manager, kept[0]) == right(PROMPT)

    hammer(manager, 2.0, fork)
    kept.clear()
    assert_nothing_leaks(manager)
