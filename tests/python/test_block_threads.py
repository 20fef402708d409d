"""Managers and handles between threads, finalizers, signals and forks: nothing hangs, tears or leaks."""

import contextlib
import gc
import os
import random
import sys
import threading
import time

import numpy as np
import pytest

import kvspan
from blocks import (
    assert_holds,
    assert_nothing_leaks,
    compute,
    new_manager,
    read,
    right,
    rows_of,
    start,
)
from kvspan.errors import ForkedError, OutOfBlocksError, StaleHandleError, UnknownRequestError
from support import SOON, Threads, isolated
from test_fork import in_a_child
from test_interrupts import Ctrl_C

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


# Threads


def test_threads_that_share_a_prefix_read_what_they_computed():
    manager, gate = new_manager(64), threading.Barrier(4, timeout=SOON)

    def serve(seed):
        choose = random.Random(seed)
        gate.wait()
        for _ in range(60):
            tokens = PROMPT[: choose.randrange(5, 9)] + [choose.randrange(3) for _ in range(6)]
            with manager.allocate(tokens) as handle:
                compute(manager, handle, tokens, handle.num_cached_tokens)
                fork = manager.fork(handle)
                manager.extend(fork, 2)
                manager.write(fork, 0, len(tokens), *rows_of([seed, seed]))
                span = manager.view(handle, 0)
                manager.truncate(handle, 3)
                assert read(manager, handle) == right(tokens)[:3]
                assert read(manager, fork) == [*right(tokens), seed, seed]
                found = [number for segment in span for number in segment.keys[:, 0, 0].tolist()]
                assert found == right(tokens)

    with Threads() as threads:
        for seed in range(1, 5):
            threads.start(serve, seed)
    assert_nothing_leaks(manager)


def test_one_handle_can_be_used_from_many_threads():
    manager = new_manager(64, block_size=4)
    handle = manager.allocate([])
    gate = threading.Barrier(4, timeout=SOON)

    def grow(number):
        gate.wait()
        for _ in range(30):
            manager.extend(handle)
            manager.write(handle, 1, 0, *rows_of([number]))
            assert read(manager, handle, 1)[0] in range(1, 5)
            handle.num_tokens, handle.block_table, repr(handle), handle.stats()

    with Threads() as threads:
        for number in range(1, 5):
            threads.start(grow, number)
    assert handle.num_tokens == 120
    manager.check_integrity()


def test_many_handles_in_any_order_do_not_wait_in_a_circle():
    manager = new_manager(16)
    handles = [start(manager, [number, 2, 3]) for number in range(6)]
    gate = threading.Barrier(4, timeout=SOON)

    def write(seed):
        choose = random.Random(seed)
        gate.wait()
        for _ in range(200):
            some = choose.sample(handles, 4)
            manager.write_many(0, some, [choose.randrange(3)] * 4, *rows_of([seed] * 4))

    with Threads() as threads:
        for seed in range(1, 5):
            threads.start(write, seed)
    manager.check_integrity()


def test_freeing_waits_for_nobody_for_long_and_nobody_reads_what_is_not_theirs():
    manager = kvspan.KvCacheManager(8, block_size=64, num_kv_heads=4, head_dim=64)
    rows = np.ones((256, 4, 64), np.float32)
    gate, over = threading.Barrier(3, timeout=SOON), threading.Event()

    def serve(number):
        gate.wait()
        while not over.is_set():
            with (
                contextlib.suppress(StaleHandleError, OutOfBlocksError),
                manager.allocate([number] * 256, f"request-{number}") as handle,
            ):
                manager.write(handle, 0, 0, rows * number, rows * -number)
                keys, values = manager.read_range(handle, 0)
                assert (keys == number).all() and (values == -number).all()

    def cancel():
        gate.wait()
        cancelled, end = 0, time.monotonic() + SOON
        while cancelled < 40 and time.monotonic() < end:
            with contextlib.suppress(UnknownRequestError):
                manager.free_request(f"request-{1 + cancelled % 2}")
                cancelled += 1
        over.set()
        assert cancelled == 40

    with Threads() as threads:
        threads.start(cancel)
        for number in [1, 2]:
            threads.start(serve, number)
    assert_nothing_leaks(manager)


def test_views_that_end_on_other_threads_give_their_blocks_back():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    views = [manager.view(handle, 0).segments for _ in range(50)]
    views += [handle.key_cache(0).segments for _ in range(50)]
    del handle
    with Threads() as threads:
        for _ in range(4):
            threads.start(lambda: [views.pop() for _ in range(25)] and None)
    assert_nothing_leaks(manager)


# Finalizers


@isolated
def test_handles_in_cycles_are_freed_by_the_collector_while_calls_go_on():
    manager = new_manager(64)
    over = threading.Event()

    class Request:
        handle = None

        def __init__(self, number):
            self.itself = self
            self.handle = start(manager, [number % 7, *PROMPT[:5]])
            self.view = manager.view(self.handle, 0)

        def __del__(self):
            # A finalizer runs wherever the collector does, also in the middle of other calls.
            manager.stats()
            if self.handle is not None:
                self.handle.close()

    def serve(seed):
        number = seed
        while not over.is_set():
            with contextlib.suppress(OutOfBlocksError):
                Request(number)
            number += 1

    gc.set_threshold(5, 2, 2)
    with Threads() as threads:
        for seed in range(3):
            threads.start(serve, seed)
        for _ in range(200):
            gc.collect()
            manager.inspect()
        over.set()
    assert_nothing_leaks(manager)


@isolated
def test_everything_can_be_dropped_at_exit():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    kept = [handle, manager.view(handle, 0), handle.key_cache(1), manager]
    kept.append(kept)
    sys.modules["kept"] = kept


# Signals


@isolated
def test_ctrl_c_is_heard_while_a_handle_is_busy():
    manager = kvspan.KvCacheManager(3, block_size=16 * 1024, num_kv_heads=4, head_dim=256)
    rows = np.ones((2, 16 * 1024, 4, 256), np.float32)
    handle = manager.allocate([0])
    manager.extend(handle, 16 * 1024 - 1)
    over = threading.Event()

    def occupy():
        while not over.is_set():
            manager.write(handle, 0, 0, *rows)

    with Threads() as threads:
        for _ in range(2):
            threads.start(occupy)
        ctrl_c = Ctrl_C()
        with pytest.raises(KeyboardInterrupt):
            while True:
                manager.write_many(0, [handle], [0], rows[0, :1], rows[1, :1])
        assert time.monotonic() - ctrl_c.sent < SOON / 2
        over.set()
    manager.check_integrity()


# Forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

ROOM = np.zeros((1, 1, 2), np.float32)
MANAGER_USES = {
    "allocate": lambda manager, handle: manager.allocate(PROMPT),
    "probe": lambda manager, handle: manager.probe(PROMPT),
    "extend": lambda manager, handle: manager.extend(handle),
    "truncate": lambda manager, handle: manager.truncate(handle, 1),
    "fork": lambda manager, handle: manager.fork(handle),
    "free": lambda manager, handle: manager.free(handle),
    "free_request": lambda manager, handle: manager.free_request("chat"),
    "write": lambda manager, handle: manager.write(handle, 0, 0, ROOM, ROOM),
    "write_many": lambda manager, handle: manager.write_many(0, [handle], [0], ROOM, ROOM),
    "prepare_write": lambda manager, handle: manager.prepare_write(handle, 0, 1),
    "view": lambda manager, handle: manager.view(handle, 0),
    "read_range": lambda manager, handle: manager.read_range(handle, 0),
    "read_range_into": lambda manager, handle: manager.read_range_into(handle, 0, 0, 1, ROOM, ROOM),
    "commit": lambda manager, handle: manager.commit(handle, []),
    "block_keys": lambda manager, handle: manager.block_keys(PROMPT),
    "allocate_many": lambda manager, handle: manager.allocate_many([PROMPT]),
    "extend_many": lambda manager, handle: manager.extend_many([handle]),
    "commit_many": lambda manager, handle: manager.commit_many([handle], [[]]),
    "free_many": lambda manager, handle: manager.free_many([handle]),
    "block_tables": lambda manager, handle: manager.block_tables([handle]),
    "slot_mappings": lambda manager, handle: manager.slot_mappings([handle], 0),
    "num_cached_tokens": lambda manager, handle: manager.num_cached_tokens([handle]),
    "epoch": lambda manager, handle: manager.epoch,
    "advance_epoch": lambda manager, handle: manager.advance_epoch(),
    "reset_prefix_cache": lambda manager, handle: manager.reset_prefix_cache(),
    "stats": lambda manager, handle: manager.stats(),
    "inspect": lambda manager, handle: manager.inspect(),
    "leak_report": lambda manager, handle: manager.leak_report(),
    "check_integrity": lambda manager, handle: manager.check_integrity(),
}
HANDLE_USES = {
    "num_tokens": lambda handle: handle.num_tokens,
    "is_valid": lambda handle: handle.is_valid,
    "block_table": lambda handle: handle.block_table,
    "key_cache": lambda handle: handle.key_cache(0),
    "value_cache": lambda handle: handle.value_cache(0),
    "kv_cache": lambda handle: handle.kv_cache(0),
    "clone_handle": lambda handle: handle.clone_handle(),
    "stats": lambda handle: handle.stats(),
    "close": lambda handle: handle.close(),
}
PAGED_USES = {
    **HANDLE_USES,
    "num_cached_tokens": lambda handle: handle.num_cached_tokens,
    "num_committed_tokens": lambda handle: handle.num_committed_tokens,
    "tokens": lambda handle: handle.tokens,
}
CONTIGUOUS_USES = {
    **HANDLE_USES,
    "append": lambda handle: handle.append(0, ROOM, ROOM),
    "layer": lambda handle: handle.layer(0),
}
SHAPE = {"device", "cache_id", "num_layers", "num_heads", "head_dim", "manager"}


def members(one):
    return {name for name in dir(one) if not name.startswith("_")}


def test_every_use_is_tried_in_a_child():
    shape = {"num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "dtype"}
    shape |= {"has_storage", "prefix_caching", "namespace", "nbytes"}
    # A plot is made of what inspect tells.
    assert members(kvspan.KvCacheManager) - {"plot"} == MANAGER_USES.keys() | shape
    assert members(kvspan.PagedKvCacheHandle) - SHAPE == PAGED_USES.keys()
    assert members(kvspan.ContiguousKvCacheHandle) - SHAPE == CONTIGUOUS_USES.keys()


def new_contiguous():
    caches = [kvspan.LayerKvCache(kvspan.KVCacheConfig(4, 1, 2)) for _ in range(2)]
    return kvspan.ContiguousKvCacheHandle(caches)


@isolated
def test_managers_and_handles_can_not_be_used_in_a_child():
    manager = new_manager(8)
    handle, contiguous = start(manager, PROMPT, "chat"), new_contiguous()
    span, tensor = manager.view(handle, 0), handle.key_cache(0)
    segment = span.segments[0]
    array = segment.keys

    def check():
        uses = [(name, lambda use=use: use(manager, handle)) for name, use in MANAGER_USES.items()]
        uses += [(name, lambda use=use: use(handle)) for name, use in PAGED_USES.items()]
        uses += [(name, lambda use=use: use(contiguous)) for name, use in CONTIGUOUS_USES.items()]
        uses += [
            (repr(one), one)
            for one in [handle.__enter__, span.release, span.__enter__, tensor.release]
        ]
        uses += [
            ("segments", lambda: span.segments),
            ("segments of a tensor", lambda: tensor.segments),
        ]
        uses += [("numpy", tensor.numpy), ("keys", lambda: segment.keys), ("end", segment.release)]
        uses += [("table", lambda: setattr(handle, "block_table", kvspan.BlockTable(4)))]
        for name, use in uses:
            with pytest.raises(ForkedError):
                use()
                pytest.fail(f"{name} worked")
        assert (manager.num_blocks, handle.num_layers, contiguous.head_dim) == (8, 2, 2)
        assert repr(manager) == "KvCacheManager(made before fork())"
        assert repr(handle) == f"PagedKvCacheHandle({handle.cache_id}, made before fork())"
        assert "made before fork()" in repr(contiguous)
        assert repr(span).startswith("PagedSpan(start=0") and repr(tensor).startswith(
            "CacheTensor("
        )
        # What is seen already stays to be seen.
        assert array[:, 0, 0].tolist() == right(PROMPT)[:4]

    in_a_child(check)
    assert_holds(manager, handle, PROMPT)
    assert manager.leak_report().pinned_blocks == [(1, 2), (2, 2), (3, 2)]


@isolated
def test_a_child_can_drop_everything_and_make_its_own():
    manager = new_manager(8)
    everything = [manager, start(manager, PROMPT), new_contiguous()]
    everything += [manager.view(everything[1], 0), everything[1].key_cache(0)]
    everything += [everything[3].segments, everything[4].segments]

    def check():
        nonlocal manager
        everything.clear()
        manager = None
        gc.collect()
        own = new_manager(8)
        handle = start(own, PROMPT)
        assert_holds(own, handle, PROMPT)
        del handle
        assert_nothing_leaks(own)

    in_a_child(check)
    everything.clear()
    assert_nothing_leaks(manager)


@isolated
def test_a_child_does_not_hang_on_what_other_threads_held():
    manager = kvspan.KvCacheManager(100_000, block_size=1, storage=False)
    handle, over = manager.allocate(range(1000)), threading.Event()

    def work():
        while not over.is_set():
            manager.allocate(range(20_000)).close()
            manager.inspect()
            manager.check_integrity()
            handle.clone_handle()

    def check():
        nonlocal manager, handle
        for use in MANAGER_USES.values():
            with pytest.raises(ForkedError):
                use(manager, handle)
        manager = handle = None
        gc.collect()
        # Those threads may have held what all locks share, so there are no new ones either.
        for make in [new_manager, new_contiguous]:
            with pytest.raises(ForkedError, match="other threads"):
                make()

    with Threads() as threads:
        for _ in range(3):
            threads.start(work)
        for _ in range(10):
            in_a_child(check)
        over.set()
