"""All operations of the extension at once, from several threads, for ThreadSanitizer to watch.

NumPy and the interpreter are not instrumented. What ThreadSanitizer sees of them are their locks,
the GIL first of all, and their memory copies. So every view is read by copying it, which NumPy does
without the GIL, and some writes are so long that the extension makes them without the GIL, too.
"""

import argparse
import contextlib
import copy
import random
import sys
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import kvspan
from kvspan import _kvspan, errors

CAPACITY, HEADS, DIM = 128, 4, 64
# Not bfloat16, which goes the same ways, and of which NumPy has no arrays.
DTYPES = ["float32", "float16", "int8"]
# Their keys and values are 96 KiB. Up to 64 KiB the extension copies with the GIL held.
MANY = 48
THREADS = 4
# After so many operations of each thread the cache is given up, while views of it live on.
OPERATIONS_OF_A_ROUND = 500

# What a call may say of what the other threads do meanwhile.
REFUSALS = (
    errors.CapacityExceededError,
    errors.KvTimeoutError,
    errors.OutOfRangeError,
    errors.PinnedError,
    errors.ReleasedError,
    errors.ReservedError,
    errors.ViewsAliveError,
)


def check_instrumented():
    """Without this, an extension that is not instrumented would pass as free of races."""
    file = Path(_kvspan.__file__)
    if b"__tsan_init" not in file.read_bytes():
        sys.exit(f"{file} is not instrumented")
    if "libclang_rt.tsan" not in Path("/proc/self/maps").read_text(encoding="utf-8"):
        sys.exit("the runtime of ThreadSanitizer is not loaded")
    print(f"loaded: {file}", flush=True)


def check(keys, values):
    """Tokens were written with all keys equal, and the values their negatives."""
    keys, values = keys.copy(), values.copy()
    assert (keys == keys[..., :1, :1]).all(), f"torn keys: {keys}"
    assert (values == -keys).all(), f"{keys} with {values}"


class Worker:
    """One thread's share of a round."""

    def __init__(self, cache, seed, spans):
        self.cache, self.random = cache, random.Random(seed)
        self.spans = spans  # of all threads
        self.arrays = deque(maxlen=3)  # that outlive their spans
        self.keys_room, self.values_room = np.empty((2, MANY, HEADS, DIM), dtype=np.float32)
        self.done = Counter()

    def run(self, operations):
        ways = [way for name, way in vars(Worker).items() if name.startswith("do_")]
        for _ in range(operations):
            way = self.random.choice(ways)
            try:
                way(self)
                self.done["succeeded"] += 1
            except REFUSALS:
                self.done["refused"] += 1
            for keys, values in self.arrays:
                check(keys, values)
        return self.done, self.arrays

    def tokens(self, count):
        keys = np.empty((count, HEADS, DIM), dtype=np.float32)
        keys[:] = np.float32(self.random.randrange(60_000))
        return keys, -keys

    def few_or_many(self):
        return self.random.choice([1, 2, 3, MANY])

    def position(self):
        return self.random.randrange(CAPACITY)

    def timeout(self):
        return self.random.choice([None, 0, 0.0002])

    def range(self):
        length = len(self.cache)
        start = self.random.randrange(length) if length else 0
        return start, min(start + self.few_or_many(), length)

    # Writing

    def do_append(self):
        self.cache.append(*self.tokens(self.few_or_many()))

    def do_append_flat(self):
        keys, values = self.tokens(1)
        self.cache.append(keys.ravel(), memoryview(values[0]))

    def do_write(self):
        keys, values = self.tokens(1)
        self.cache.write_kv(self.position(), keys[0], values[0], timeout=self.timeout())

    def do_write_entries(self):
        keys, values = self.tokens(3)
        entries = [(self.position(), k, v) for k, v in zip(keys, values, strict=True)]
        self.cache.write_kv_batch(entries, timeout=self.timeout())

    def do_write_arrays(self):
        count = self.few_or_many()
        positions = self.random.sample(range(CAPACITY), count)
        self.cache.write_kv_batch(positions, *self.tokens(count), timeout=self.timeout())

    def do_reserve(self):
        keys, values = self.tokens(self.few_or_many())
        with self.cache.reserve(len(keys)) as rows:
            rows.keys[...] = keys
            np.asarray(rows.value_view)[...] = values
            check(rows.keys, rows.values)

    def do_discard(self):
        rows = self.cache.reserve(2)
        rows.keys.fill(1 if rows.dtype == "int8" else np.nan)
        rows.discard()

    def do_truncate(self):
        self.cache.truncate(self.random.randrange(len(self.cache) + 1), timeout=self.timeout())

    def do_reset(self):
        if self.random.random() < 0.2:
            self.cache.reset(timeout=self.timeout())
        self.cache.initialize(self.random.randrange(1, CAPACITY))

    # Reading

    def do_keep_span(self):
        self.spans.append(self.cache.view(*self.range()))

    def do_keep_arrays(self):
        span = self.cache.view(*self.range())
        self.arrays.append((span.keys, span.values))

    def do_forget_arrays(self):
        self.arrays.clear()

    def do_read_any_span(self):
        with contextlib.suppress(IndexError):
            span = self.spans[self.random.randrange(3)]
            check(np.asarray(span.key_view), np.from_dlpack(span.value_view))

    def do_release_any_span(self):
        with contextlib.suppress(IndexError):
            self.spans[self.random.randrange(3)].release()

    def do_drop_any_span(self):
        with contextlib.suppress(IndexError):
            self.spans.popleft()

    def do_read_in_callback(self):
        start, end = self.range()
        self.cache.with_read_range(start, end, lambda span: check(span.keys, span.values))
        self.cache.with_read_kv(start, check)

    def do_read_into(self):
        start, end = self.range()
        self.cache.read_range_into(start, end, self.keys_room, self.values_room)
        check(self.keys_room[: end - start], self.values_room[: end - start])

    def do_read_copies(self):
        check(*self.cache.read_range(*self.range()))
        check(*self.cache.read_kv(self.position()))

    # The cache itself

    def do_copy(self):
        self.cache = copy.copy(self.cache)
        copy.deepcopy(self.cache).reset()

    def do_ask(self):
        assert 0 <= len(self.cache) <= CAPACITY
        assert repr(self.cache)
        assert self.cache.is_empty() in (False, True)
        self.cache.prefault()


def one_round(pool, number, operations):
    """Runs all threads on one cache, and reads what is left of it when the cache is gone."""
    spans = deque(maxlen=3)
    dtype = DTYPES[number % len(DTYPES)]
    cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(CAPACITY, HEADS, DIM, dtype))
    cache.initialize(1)
    workers = [
        Worker(copy.copy(cache), number * THREADS + thread, spans) for thread in range(THREADS)
    ]
    results = list(pool.map(lambda worker: worker.run(operations), workers))
    with cache.view() as span:
        check(span.keys, span.values)
    del cache, span, workers
    for _, arrays in results:
        for keys, values in arrays:
            check(keys, values)
    return sum((done for done, _ in results), Counter())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", type=int, help="of each thread")
    operations = parser.parse_args().operations
    check_instrumented()
    sys.setswitchinterval(1e-4)
    done = Counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(-(-operations // OPERATIONS_OF_A_ROUND)):
            done += one_round(pool, number, min(operations, OPERATIONS_OF_A_ROUND))
    refused = f"{done['refused']} of them refused"
    print(f"{done.total()} operations of {THREADS} threads, {refused}, no token torn")


if __name__ == "__main__":
    main()
