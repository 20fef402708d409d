"""Many threads on one cache: nothing is torn or lost, and the test would see it if it were."""

import contextlib
import itertools
import random
import threading
import time

import numpy as np
import pytest

from kvspan.errors import CapacityExceededError, KvTimeoutError, PinnedError, ReservedError
from support import DIM, HEADS, SOON, Threads, new_cache, tokens

# Rows so large that copying one takes longer than many a look at it.
LARGE_HEADS, LARGE_DIM = 4, 64 * 1024
LARGE = (LARGE_HEADS, LARGE_DIM)


def filled_row(value):
    return np.full(LARGE, value, np.float32)


def is_whole(row):
    return row.min() == row.max()


def assert_whole(keys, values):
    """Each token is of one write, keys and values alike."""
    for token_keys, token_values in zip(keys, values, strict=True):
        assert is_whole(token_keys)
        assert is_whole(token_values)
        assert token_keys[0, 0] == -token_values[0, 0]


def test_tokens_that_are_read_are_never_torn():
    torn, reads = looks_at_a_plain_array()
    assert torn > 0, f"the control was whole in {reads} reads: this test sees nothing"

    cache = new_cache(8, *LARGE)
    cache.append(np.zeros((4, *LARGE), np.float32), np.zeros((4, *LARGE), np.float32))
    start, over, written = threading.Barrier(6, timeout=SOON), threading.Event(), []
    deadline = time.monotonic() + SOON

    def rounds():
        """At least so many, and more until the writers had their share."""
        for number in itertools.count():
            if number >= 30 and (len(written) > 50 or time.monotonic() > deadline):
                return
            yield number

    def overwriter(seed):
        choose = random.Random(seed)
        start.wait()
        for value in range(seed, 10**6):
            if over.is_set():
                return
            row, timeout = filled_row(value), choose.choice([None, 0.001, 1.0])
            with contextlib.suppress(PinnedError, KvTimeoutError):
                if choose.random() < 0.5:
                    cache.write_kv(choose.randrange(4), row, -row, timeout=timeout)
                else:
                    batch = [(at, row, -row) for at in choose.sample(range(4), 2)]
                    cache.write_kv_batch(batch, timeout=timeout)
                written.append(value)

    def appender():
        start.wait()
        for value in range(10**6):
            if over.is_set():
                return
            row = filled_row(value)
            try:
                cache.append(row, -row)
            except CapacityExceededError:
                with contextlib.suppress(PinnedError, KvTimeoutError):
                    cache.truncate(4, timeout=0.01)

    def reader():
        start.wait()
        into = np.zeros((2, 4, *LARGE), np.float32)
        for number in rounds():
            assert_whole(*cache.read_range(0, 4))
            cache.read_range_into(0, 4, *into)
            assert_whole(*into)
            cache.with_read_kv(number % 4, lambda keys, values: assert_whole([keys], [values]))

    def view_holder(seed):
        choose = random.Random(seed)
        start.wait()
        for _ in rounds():
            first = choose.randrange(4)
            with cache.view(first) as span:
                keys, values = span.keys, span.values
                assert_whole(keys, values)
                seen = keys[:, 0, 0].copy()
            # Nothing but the arrays pins the tokens now.
            assert_whole(keys, values)
            assert np.array_equal(seen, keys[:, 0, 0])
            del keys, values

    with Threads() as writers:
        for seed in [1, 2]:
            writers.start(overwriter, seed)
        writers.start(appender)
        try:
            with Threads() as readers:
                readers.start(reader)
                readers.start(view_holder, 3)
                readers.start(view_holder, 4)
        finally:
            over.set()
    assert len(written) > 50, "the writers hardly got to write"
    cache.reset()


def looks_at_a_plain_array(most_seconds=20.0):
    """Torn rows, and all rows read, of an array that nobody guards: how the detector is tested."""
    row, sources = filled_row(0), [filled_row(value) for value in range(2)]
    over = threading.Event()

    def overwriter():
        while not over.is_set():
            for source in sources:
                np.copyto(row, source)

    torn = reads = 0
    with Threads() as threads:
        threads.start(overwriter)
        deadline = time.monotonic() + most_seconds
        while torn < 3 and time.monotonic() < deadline:
            torn += not is_whole(row)
            reads += 1
        over.set()
    return torn, reads


@pytest.mark.parametrize("form", ["entries", "arrays"])
def test_batches_are_seen_whole(form):
    # More than is copied with the interpreter held.
    dim = 512
    cache = new_cache(64, 1, dim)
    cache.initialize(64)
    over, written = threading.Event(), []

    def overwriter():
        indices = list(range(64))
        value = 0
        while not over.is_set():
            value += 1
            rows = np.full((64, 1, dim), value, np.float32)
            random.shuffle(indices)
            if form == "arrays":
                cache.write_kv_batch(indices, rows, rows, timeout=SOON)
            else:
                batch = [(at, rows[at], rows[at]) for at in indices]
                cache.write_kv_batch(batch, timeout=SOON)
            written.append(value)

    def reader():
        into = np.zeros((2, 64 * dim), np.float32)
        deadline = time.monotonic() + SOON
        for number in itertools.count():
            if number >= 300 and (len(written) > 20 or time.monotonic() > deadline):
                return
            keys, values = cache.read_range(0, 64)
            assert keys.min() == keys.max() == values.min() == values.max()
            cache.read_range_into(0, 64, *into)
            assert into.min() == into.max()
            with cache.view() as span:
                assert span.keys.min() == span.values.max()
            assert cache.with_read_range(0, 64, lambda span: np.ptp(span.keys)) == 0

    with Threads() as writers:
        writers.start(overwriter)
        try:
            with Threads() as readers:
                readers.start(reader)
                readers.start(reader)
        finally:
            over.set()
    assert len(written) > 20, "the writer hardly got to write"


def test_appends_of_all_threads_are_there_once_and_in_order():
    threads, appends = 4, 300
    cache = new_cache(capacity=threads * appends * 2)
    start = threading.Barrier(threads + 1, timeout=SOON)

    def appender(number):
        start.wait()
        for count in range(appends):
            rows = np.empty((1 + count % 2, HEADS, DIM), np.float32)
            rows[...] = number * 10_000 + count + 1
            positions = cache.append(rows, -rows)
            keys, values = cache.read_range(positions.start, positions.stop)
            assert np.array_equal((keys, values), (rows, -rows))

    def reader():
        start.wait()
        seen = 0
        while seen < threads * appends * 3 // 2:
            length = len(cache)
            assert length >= seen
            keys, values = cache.read_range(seen, length)
            assert np.all(keys != 0)
            assert np.array_equal(keys, -values)
            seen = length

    with Threads() as all_threads:
        for number in range(threads):
            all_threads.start(appender, number)
        all_threads.start(reader)
    labels = cache.read_range(0, len(cache))[0][:, 0, 0].astype(int)
    assert len(labels) == threads * appends * 3 // 2
    for number in range(threads):
        own = labels[labels // 10_000 == number] % 10_000
        expected = [count + 1 for count in range(appends) for _ in range(1 + count % 2)]
        assert own.tolist() == expected


@pytest.mark.parametrize(
    "first", [lambda c: c.append(*tokens(1)), lambda c: c.initialize(1), lambda c: c.prefault()]
)
def test_buffer_is_allocated_once(first):
    for _ in range(20):
        cache, start = new_cache(), threading.Barrier(4, timeout=SOON)

        def call(cache=cache, start=start):
            start.wait()
            first(cache)

        with Threads() as threads:
            for _ in range(4):
                threads.start(call)
        assert len(cache) in (0, 1, 4)
        cache.truncate(0)
        cache.append(*tokens(16))
        assert np.array_equal(cache.read_range(0, 16), tokens(16))


def test_one_reservation_wins():
    for _ in range(20):
        cache, start, won = new_cache(), threading.Barrier(4, timeout=SOON), []

        def call(cache=cache, start=start, won=won):
            start.wait()
            with contextlib.suppress(ReservedError):
                won.append(cache.reserve(2))

        with Threads() as threads:
            for _ in range(4):
                threads.start(call)
        assert len(won) == 1
        assert won.pop().commit() == range(2)


def test_views_end_on_any_thread():
    cache = new_cache()
    cache.append(*tokens(6))
    for _ in range(50):
        views = [cache.view() for _ in range(8)] + [cache.view().keys for _ in range(8)]
        random.shuffle(views)
        with Threads() as threads:
            for part in range(4):
                threads.start(views[part::4].clear)
            threads.start(views.clear)
    cache.reset()
