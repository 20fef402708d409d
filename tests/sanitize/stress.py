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
# A few blocks, of which a sequence can have some that are copied without the GIL.
SHAPE = {"block_size": 16, "num_layers": 2, "num_kv_heads": HEADS, "head_dim": DIM}
NUM_BLOCKS = 24
NAMES = ["a", "b", "c", "d", "e", None, None, None]
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
    errors.BlocksInUseError,
    errors.OutOfBlocksError,
    errors.RequestExistsError,
    errors.StaleHandleError,
    errors.TokenMismatchError,
    errors.UnknownRequestError,
    errors.WrongBlockStateError,
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


def attend(query, *context):
    """The elements of a value are equal, and so are those of what a head makes of values."""
    try:
        out = kvspan.attention(query, *context)
    except errors.InvalidInputError as error:
        # Somebody else may have given all tokens up.
        assert "no tokens" in str(error), error
    else:
        assert (out == out[..., :1]).all(), f"torn: {out}"


class Worker:
    """One thread's share of a round."""

    def __init__(self, seed, spans):
        self.random = random.Random(seed)
        self.spans = spans  # of all threads
        self.arrays = deque(maxlen=3)  # that outlive their spans
        self.keys_room, self.values_room = np.empty((2, MANY, HEADS, DIM), dtype=np.float32)
        self.done = Counter()

    def run(self, operations):
        ways = [way for name, way in vars(type(self)).items() if name.startswith("do_")]
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


class CacheWorker(Worker):
    """One that uses a layer cache."""

    def __init__(self, cache, seed, spans):
        super().__init__(seed, spans)
        self.cache = cache

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

    def do_attend(self):
        attend(np.ones((1, 2 * HEADS, DIM), np.float32), self.cache)

    def do_attend_to_any_span(self):
        with contextlib.suppress(IndexError):
            span = self.spans[self.random.randrange(3)]
            attend(np.ones((1, 2 * HEADS, DIM), np.float32), span)

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


class BlockWorker(Worker):
    """One that uses a manager and its handles."""

    def __init__(self, manager, seed, spans, handles):
        super().__init__(seed, spans)
        self.manager = manager
        self.handles = handles  # of all threads

    def handle(self):
        try:
            return self.random.choice(list(self.handles))
        except (IndexError, RuntimeError):
            # Another thread is about to change them.
            return self.manager.allocate([1])

    def some(self):
        return {self.handle(): None for _ in range(3)}

    def prompt(self):
        # Few beginnings, so that they are often shared.
        return [0] * self.few_or_many() + [self.random.randrange(2)]

    def at(self, handle):
        return self.random.randrange(handle.num_tokens + 1)

    def keep(self, handle):
        self.handles.append(handle)

    # Sequences

    def do_allocate(self):
        prompt = np.array(self.prompt(), np.int32)
        handle = self.manager.allocate(prompt, self.random.choice(NAMES))
        keys, _ = self.manager.read_range(handle, 0, handle.num_cached_tokens)
        assert not keys.any(), "a new owner finds zeros"
        self.keep(handle)

    def do_allocate_many(self):
        chain = self.manager.block_keys(self.prompt())
        for handle in self.manager.allocate_many([chain, self.prompt()], lookahead=2):
            self.keep(handle)

    def do_fork(self):
        self.keep(self.manager.fork(self.handle()))

    def do_extend(self):
        self.manager.extend(self.handle(), self.random.randrange(4))

    def do_extend_many(self):
        self.manager.extend_many(self.some())

    def do_truncate(self):
        handle = self.handle()
        self.manager.truncate(handle, self.at(handle))

    def do_commit(self):
        handle = self.handle()
        tokens = handle.tokens[handle.num_committed_tokens :]
        self.manager.commit(handle, tokens)

    def do_commit_many(self):
        some = self.some()
        self.manager.commit_many(some, np.zeros((len(some), 2), np.int64))

    def do_free_request(self):
        self.manager.free_request(self.random.choice(NAMES[:5]))

    def do_free(self):
        self.manager.free(self.handle())

    def do_free_many(self):
        if self.random.random() < 0.3:
            self.manager.free_many(self.some())

    def do_forget_handle(self):
        with contextlib.suppress(IndexError):
            self.handles.popleft()

    def do_end_by_with(self):
        with self.manager.allocate(self.prompt()) as handle:
            self.manager.write(handle, 1, 0, *self.tokens(1))

    # Content

    def do_write(self):
        handle = self.handle()
        length = handle.num_tokens  # which others change
        start = self.random.randrange(length + 1)
        rows = self.tokens(min(length - start, MANY))
        self.manager.write(handle, 0, start, *rows)

    def do_write_many(self):
        some = self.some()
        self.manager.write_many(1, some, [0] * len(some), *self.tokens(len(some)))

    def do_read(self):
        handle = self.handle()
        check(*self.manager.read_range(handle, 0))
        check(*self.manager.read_range(handle, 1, 0, 1))

    def do_read_into(self):
        handle = self.handle()
        end = min(handle.num_tokens, MANY)
        self.manager.read_range_into(handle, 0, 0, end, self.keys_room, self.values_room)
        check(self.keys_room[:end], self.values_room[:end])

    def do_read_tensors(self):
        keys, values = self.handle().kv_cache(1)
        # Not of one instant, so that they need not belong together.
        assert (keys.numpy() >= 0).all() and (values.numpy() <= 0).all()

    def do_attend(self):
        query = np.ones((1, 2 * HEADS, DIM), np.float32)
        attend(query, self.handle(), self.random.randrange(2))

    def do_attend_many(self):
        some = list(self.some())
        query = np.ones((len(some), 2 * HEADS, DIM), np.float32)
        attend(query, some, self.random.randrange(2))

    # Views

    def do_keep_span(self):
        handle = self.handle()
        self.spans.append(self.manager.view(handle, self.random.randrange(2)))

    def do_keep_arrays(self):
        for piece in self.manager.view(self.handle(), 0):
            self.arrays.append((piece.keys, piece.values))

    def do_forget_arrays(self):
        self.arrays.clear()

    def do_read_any_span(self):
        with contextlib.suppress(IndexError):
            for piece in self.spans[self.random.randrange(3)]:
                check(np.asarray(piece.key_view), np.from_dlpack(piece.value_view))

    def do_release_any_span(self):
        with contextlib.suppress(IndexError):
            self.spans[self.random.randrange(3)].release()

    def do_drop_any_span(self):
        with contextlib.suppress(IndexError):
            self.spans.popleft()

    # The manager itself

    def do_reset(self):
        self.manager.reset_prefix_cache()

    def do_ask(self):
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.num_free + stats.num_cached + stats.num_in_use == NUM_BLOCKS
        assert len(self.manager.inspect().blocks) == NUM_BLOCKS
        assert repr(self.manager) and repr(self.handle())
        assert len(self.manager.block_tables(self.some())) >= 1


def run_all(pool, workers, operations):
    results = list(pool.map(lambda worker: worker.run(operations), workers))
    workers.clear()
    return results


def check_arrays(results):
    """Arrays that are left when everything else is gone; counts what was done."""
    for _, arrays in results:
        for keys, values in arrays:
            check(keys, values)
    return sum((done for done, _ in results), Counter())


def round_of_caches(pool, number, operations):
    """Runs all threads on one cache, and reads what is left of it when the cache is gone."""
    spans = deque(maxlen=3)
    dtype = DTYPES[number % len(DTYPES)]
    cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(CAPACITY, HEADS, DIM, dtype))
    cache.initialize(1)
    workers = [
        CacheWorker(copy.copy(cache), number * THREADS + thread, spans) for thread in range(THREADS)
    ]
    results = run_all(pool, workers, operations)
    with cache.view() as span:
        check(span.keys, span.values)
    del cache, span
    return check_arrays(results)


def round_of_blocks(pool, number, operations):
    """Runs all threads on one manager, and reads what is left of it when the manager is gone."""
    spans, handles = deque(maxlen=3), deque(maxlen=8)
    dtype = DTYPES[number % len(DTYPES)]
    manager = kvspan.KvCacheManager(NUM_BLOCKS, **SHAPE, dtype=dtype)
    workers = [
        BlockWorker(manager, number * THREADS + thread, spans, handles) for thread in range(THREADS)
    ]
    results = run_all(pool, workers, operations)
    handles.clear()
    spans.clear()
    assert not manager.leak_report().sequences
    manager.check_integrity()
    del manager
    return check_arrays(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", type=int, help="of each thread")
    operations = parser.parse_args().operations
    check_instrumented()
    sys.setswitchinterval(1e-4)
    # What the processor can do is found out once, in a way that ThreadSanitizer does not see.
    kvspan.AttentionPool(1)
    done = Counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(-(-operations // OPERATIONS_OF_A_ROUND)):
            one_round = [round_of_caches, round_of_blocks][number % 2]
            done += one_round(pool, number, min(operations, OPERATIONS_OF_A_ROUND))
    refused = f"{done['refused']} of them refused"
    print(f"{done.total()} operations of {THREADS} threads, {refused}, no token torn")


if __name__ == "__main__":
    main()
