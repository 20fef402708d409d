"""Long calls let other threads run."""

import copy
import threading
import time

import numpy as np
import pytest

import kvspan
from support import SOON, Threads, new_cache

# 128 MiB of keys and values: long enough for every call to be seen, small enough for any machine.
COUNT, HEADS, DIM = 16 * 1024, 4, 256


@pytest.fixture(scope="module")
def rows():
    return np.ones((2, COUNT, HEADS, DIM), np.float32)


@pytest.fixture
def cache(rows):
    full = new_cache(COUNT, HEADS, DIM)
    full.append(*rows)
    return full


def append(cache, rows):
    cache.reset()
    return lambda: cache.append(*rows)


def write_kv_batch(cache, rows):
    indices = np.arange(COUNT)
    return lambda: cache.write_kv_batch(indices, *rows)


def read_range(cache, rows):
    return lambda: cache.read_range(0, COUNT)


def read_range_into(cache, rows):
    return lambda: cache.read_range_into(0, COUNT, *rows)


def deepcopy(cache, rows):
    return lambda: copy.deepcopy(cache)


def initialize_over_what_was_left_behind(cache, rows):
    cache.reset()
    return lambda: cache.initialize(COUNT)


def reserve_over_what_was_left_behind(cache, rows):
    cache.reset()
    return lambda: cache.reserve(COUNT)


def write_kv_far_past_what_was_left_behind(cache, rows):
    cache.reset()
    return lambda: cache.write_kv(COUNT - 1, rows[0, 0], rows[1, 0])


def prefault(cache, rows):
    fresh = new_cache(COUNT, HEADS, DIM)
    return fresh.prefault


def new_sequence(rows, num_blocks=2):
    """A manager, and a sequence of one block as large as the cache."""
    manager = kvspan.KvCacheManager(num_blocks, block_size=COUNT, num_kv_heads=HEADS, head_dim=DIM)
    handle = manager.allocate(range(COUNT))
    manager.write(handle, 0, 0, *rows)
    return manager, handle


def write_to_blocks(_, rows):
    manager, handle = new_sequence(rows)
    return lambda: manager.write(handle, 0, 0, *rows)


def read_range_of_blocks(_, rows):
    manager, handle = new_sequence(rows)
    return lambda: manager.read_range_into(handle, 0, 0, COUNT, *rows.copy())


def copy_a_block_on_write(_, rows):
    manager, handle = new_sequence(rows)
    fork = manager.fork(handle)
    return lambda: (handle, manager.write(fork, 0, 0, rows[0, 0], rows[1, 0]))


def zero_a_block_for_its_new_owner(_, rows):
    manager, handle = new_sequence(rows, num_blocks=1)
    manager.free(handle)
    return lambda: manager.allocate(range(COUNT))


def hash_a_long_salt(_, rows):
    manager = kvspan.KvCacheManager(1, storage=False)
    return lambda: manager.probe([1], cache_salt="s" * 20_000_000)


def make_a_large_pool(_, rows):
    return lambda: kvspan.KvCacheManager(2_000_000, storage=False)


def count_all_blocks(_, rows):
    manager = kvspan.KvCacheManager(1_000_000, storage=False)
    return manager.check_integrity


def drop_the_last_handle(_, rows):
    manager = kvspan.KvCacheManager(2_000_000, block_size=1, storage=False)
    held = [manager.allocate([], lookahead=2_000_000)]
    return held.clear


def drop_the_last_array(_, rows):
    manager = kvspan.KvCacheManager(200_000, block_size=1, num_kv_heads=1, head_dim=1)
    handle = manager.allocate([])
    manager.extend(handle, 200_000)
    held = [manager.view(handle, 0).segments[0].keys]
    return held.clear


CALLS = [
    append,
    write_kv_batch,
    read_range,
    read_range_into,
    deepcopy,
    initialize_over_what_was_left_behind,
    reserve_over_what_was_left_behind,
    write_kv_far_past_what_was_left_behind,
    prefault,
    write_to_blocks,
    read_range_of_blocks,
    copy_a_block_on_write,
    zero_a_block_for_its_new_owner,
    hash_a_long_salt,
    make_a_large_pool,
    count_all_blocks,
    drop_the_last_handle,
    drop_the_last_array,
]


@pytest.mark.parametrize("prepare", CALLS)
def test_other_threads_run_meanwhile(prepare, cache, rows):
    assert_runs_on(lambda: longest_pause_of_this_thread(prepare(cache, rows)))


@pytest.mark.parametrize("end", ["commit", "discard", "drop"])
def test_reservation_ends_without_waiting_for_the_pages(end):
    def longest_pause():
        fresh = new_cache(COUNT, HEADS, DIM)
        reserved = [fresh.reserve(1)]
        meanwhile = reserved.clear if end == "drop" else getattr(reserved[0], end)
        return longest_pause_of_this_thread(fresh.prefault, meanwhile)

    assert_runs_on(longest_pause)


def assert_runs_on(longest_pause):
    shares = []
    # On a busy machine this thread may get no time for reasons of its own.
    for _ in range(10):
        shares.append(round(longest_pause(), 2))
        if shares[-1] < 0.5:
            return
    pytest.fail(f"this thread stood still for these shares of the call: {shares}")


def longest_pause_of_this_thread(call, meanwhile=None):
    """How long this thread does not run while another makes `call`, as a share of the call.

    What happens `meanwhile` is no pause unless it takes long.
    """
    about_to_call, span, results = threading.Event(), [], []

    def caller():
        about_to_call.set()
        begin = time.perf_counter()
        results.append(call())
        span.extend([begin, time.perf_counter()])

    ticks = []
    with Threads() as threads:
        threads.start(caller)
        assert about_to_call.wait(SOON)
        while not span:
            ticks.append(time.perf_counter())
            if meanwhile is not None and len(ticks) == 2:
                meanwhile()
            # Lets go of the interpreter, so that the caller does not have to wait for it.
            time.sleep(0.0002)
    begin, end = span
    inside = [begin, *(tick for tick in ticks if begin < tick < end), end]
    return float(max(np.diff(inside)) / (end - begin))
