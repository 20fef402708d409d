"""Views of blocks: they do not change, they keep their blocks, and they end when they should."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from blocks import (
    DIM,
    HEADS,
    assert_holds,
    assert_nothing_leaks,
    computed,
    new_manager,
    numbers_in,
    read,
    right,
    rows_of,
    start,
)
from kvspan.errors import OutOfBlocksError, ReleasedError, ViewsAliveError
from support import address, isolated
from test_lifetimes import growth

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def manager():
    manager = new_manager(8)
    yield manager
    assert_nothing_leaks(manager)


def numbers(span):
    return [number for segment in span for number in numbers_in(segment.keys, segment.values)]


def pins(manager):
    return dict(manager.leak_report().pinned_blocks)


# What a view is


def test_view_is_one_segment_a_block(manager):
    handle = start(manager, PROMPT)
    for layer in range(2):
        span = manager.view(handle, layer)
        assert (span.start, span.end, len(span), span.num_segments) == (0, 10, 10, 3)
        assert (span.num_heads, span.head_dim, span.released) == (HEADS, DIM, False)
        assert [(segment.start, segment.end) for segment in span] == [(0, 4), (4, 8), (8, 10)]
        assert [type(segment) for segment in span.segments] == [kvspan.KVSpan] * 3
        assert numbers(span) == right(PROMPT, layer)
        assert repr(span) == (
            "PagedSpan(start=0, end=10, num_heads=1, head_dim=2, dtype='float32', num_segments=3)"
        )


@pytest.mark.parametrize(
    ("start_at", "end", "segments"),
    [
        (0, 0, []),
        (10, 10, []),
        (4, 4, []),
        (3, 5, [(3, 4), (4, 5)]),
        (4, 8, [(4, 8)]),
        (9, None, [(9, 10)]),
        (5, 6, [(5, 6)]),
    ],
)
def test_view_of_a_range_has_the_blocks_of_that_range(manager, start_at, end, segments):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 1, start_at, end)
    assert [(segment.start, segment.end) for segment in span] == segments
    assert numbers(span) == right(PROMPT, 1)[start_at:end]
    assert len(pins(manager)) == len(segments)


def test_view_by_keyword(manager):
    handle = start(manager, PROMPT)
    assert len(manager.view(handle=handle, layer=0, end=7, start=3)) == 4


def test_arrays_lie_in_the_blocks_and_are_read_only(manager):
    handle = start(manager, PROMPT)
    one, other = manager.view(handle, 0), manager.view(handle, 0)
    for segment, same in zip(one, other):
        for array, again in [(segment.keys, same.keys), (segment.values, same.values)]:
            assert address(array) == address(again)
            assert (array.dtype, array.flags.c_contiguous, array.flags.writeable) == (
                np.float32,
                True,
                False,
            )
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                array.flags.writeable = True


def test_segments_go_to_other_libraries_without_a_copy(manager):
    handle = start(manager, PROMPT)
    segment = manager.view(handle, 0).segments[1]
    for consumed in [
        np.asarray(segment.key_view),
        np.from_dlpack(segment.key_view),
        memoryview(segment.key_view),
    ]:
        assert np.asarray(consumed).shape == (4, HEADS, DIM)
        assert address(np.asarray(consumed)) == address(segment.keys)
    assert segment.value_view.readonly


# What it is safe from


def test_nothing_that_happens_to_the_sequence_changes_a_view(manager):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0)
    arrays = [(segment.keys, segment.values) for segment in span]
    manager.write(handle, 0, 0, *rows_of([501] * 10))
    manager.extend(handle, 3)
    manager.truncate(handle, 1)
    manager.free(handle)
    del handle
    other = manager.allocate(range(100, 108))
    manager.write(other, 0, 0, *rows_of([502] * 8))
    assert numbers(span) == right(PROMPT)
    assert [n for keys, values in arrays for n in numbers_in(keys, values)] == right(PROMPT)
    del other


def test_a_write_under_a_view_copies_the_block_and_reads_as_written(manager):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0, 4, 8)
    before = handle.block_table.physical_blocks
    manager.write(handle, 0, 5, *rows_of([77]))
    after = handle.block_table.physical_blocks
    assert [a == b for a, b in zip(before, after)] == [True, False, True]
    assert read(manager, handle) == [*right(PROMPT)[:5], 77, *right(PROMPT)[6:]]
    assert numbers(span) == right(PROMPT)[4:8]
    # Nobody else is in the way of the next one.
    manager.write(handle, 0, 4, *rows_of([78]))
    assert handle.block_table.physical_blocks == after


def test_freed_blocks_wait_for_their_views():
    manager = new_manager(3)
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0, 0, 5)
    manager.free(handle)
    assert manager.stats().num_pinned == 2
    with pytest.raises(OutOfBlocksError) as caught:
        manager.allocate(range(100, 108))
    assert caught.value.pinned == 2
    # They can be found all the same.
    hit = manager.allocate(PROMPT)
    assert hit.num_cached_tokens == 8
    assert_array_equal(numbers(span), right(PROMPT)[:5])
    del hit
    span.release()
    assert manager.stats().num_pinned == 0
    handle = manager.allocate(range(100, 108))
    assert read(manager, handle) == [0] * 8
    del handle
    assert_nothing_leaks(manager)


def test_a_view_keeps_the_memory_when_everything_else_is_gone():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    span = manager.view(handle, 1)
    tensor = handle.value_cache(1)
    keys = span.segments[0].keys
    gone = weakref.ref(manager), weakref.ref(handle)
    del manager, handle
    assert [one() for one in gone] == [None, None]
    assert numbers(span) == right(PROMPT, 1)
    assert_array_equal(tensor.numpy(), rows_of(right(PROMPT, 1))[1])
    del span, tensor
    gc.collect()
    assert keys[:, 0, 0].tolist() == right(PROMPT, 1)[:4]


# When it ends


HOLDERS = {
    "the span": lambda span: span,
    "its segments": lambda span: span.segments,
    "one segment": lambda span: span.segments[0],
    "an iterator": iter,
    "an array": lambda span: span.segments[0].keys,
    "a part of an array": lambda span: span.segments[0].values[1:2, :, 0].T,
    "an exporter": lambda span: span.segments[0].key_view,
    "a memoryview": lambda span: memoryview(span.segments[0].key_view),
    "an array of DLPack": lambda span: np.from_dlpack(span.segments[0].value_view),
    "a capsule": lambda span: span.segments[0].key_view.__dlpack__(max_version=(1, 0)),
    "a bare array": lambda span: np.ndarray((2, 1, 2), np.float32, span.segments[0].key_view),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_blocks_are_pinned_until_the_last_holder_is_gone(manager, holder):
    handle = start(manager, PROMPT)
    held = HOLDERS[holder](manager.view(handle, 0))
    del handle
    assert pins(manager) == {1: 1, 2: 1, 3: 1}
    assert manager.stats().num_pinned == 3
    del held
    assert pins(manager) == {}
    assert_nothing_leaks(manager)


def test_release_ends_a_view(manager):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0)
    span.release()
    assert span.released and pins(manager) == {}
    span.release()
    assert repr(span).endswith(", num_segments=3, released)")
    assert (len(span), span.start, span.end, span.num_segments) == (10, 0, 10, 3)
    for use in [lambda: span.segments, lambda: iter(span), span.__enter__]:
        with pytest.raises(ReleasedError):
            use()
    empty = manager.view(handle, 0, 3, 3)
    assert empty.segments == []
    empty.release()
    with pytest.raises(ReleasedError):
        empty.segments


@pytest.mark.parametrize(
    ("hold", "views"),
    [
        (lambda span: span.segments, 3),
        (lambda span: span.segments[0], 1),
        (lambda span: [span.segments[0].keys, span.segments[0].keys, span.segments[2].values], 3),
        (lambda span: [span.segments[0].key_view], 1),
    ],
)
def test_release_is_refused_while_others_hold_the_view(manager, hold, views):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0)
    held = hold(span)
    with pytest.raises(ViewsAliveError) as caught:
        span.release()
    assert caught.value.views == views
    assert str(caught.value).startswith(
        f"{views} view(s) over the rows are alive, so that they are"
    )
    assert not span.released
    assert numbers(span) == right(PROMPT)
    del held
    span.release()
    assert pins(manager) == {}


def test_a_segment_can_be_released_when_its_own_arrays_are_gone(manager):
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0)
    segment, other = span.segments[:2]
    keys = segment.keys
    with pytest.raises(ViewsAliveError):
        segment.release()
    del keys
    segment.release()
    assert segment.released and not other.released and not span.released
    with pytest.raises(ReleasedError):
        segment.keys
    assert other.keys.shape == (4, HEADS, DIM)
    # A segment keeps the whole view.
    del span
    assert pins(manager) == {1: 1, 2: 1, 3: 1}
    other.release()
    assert pins(manager) == {}


def test_with_block_gives_up_its_own_share(manager):
    handle = start(manager, PROMPT)
    with manager.view(handle, 0) as span:
        kept = span.segments[0].keys
        assert numbers(span) == right(PROMPT)
    assert span.released
    assert kept[0, 0, 0] == computed(PROMPT[:1], 0)
    assert pins(manager) == {1: 1, 2: 1, 3: 1}
    del kept
    assert pins(manager) == {}
    with pytest.raises(ZeroDivisionError), manager.view(handle, 0) as span:
        1 / 0
    assert span.released and pins(manager) == {}
    with manager.view(handle, 0) as span, span.segments[1] as segment:
        assert segment.keys.shape == (4, HEADS, DIM)
    assert pins(manager) == {}


def test_copies_pin_nothing(manager):
    handle = start(manager, PROMPT)
    manager.read_range(handle, 0)
    handle.key_cache(0).numpy()
    kept = np.asarray(handle.key_cache(0))
    assert pins(manager) == {} and kept.shape == (10, HEADS, DIM)


def test_arrays_in_a_cycle_are_found_by_the_collector(manager):
    handle = start(manager, PROMPT)
    cycle = [manager.view(handle, 0).segments[0].keys, handle.key_cache(1), handle]
    cycle.append(cycle)
    del handle, cycle
    assert manager.leak_report()
    gc.collect()
    assert_nothing_leaks(manager)


@isolated
def test_views_of_managers_that_are_kept_until_the_end_do_no_harm():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    builtins = __import__("builtins")
    builtins.kept = [manager.view(handle, 0), handle.key_cache(0).segments, handle, manager]
    builtins.kept.append(builtins.kept)


def use_everything(manager):
    """Everything that makes objects, once."""
    with start(manager, PROMPT, "chat", cache_salt="salt", extra_keys={1: ["a"]}) as handle:
        fork = manager.fork(handle, "fork")
        clone = fork.clone_handle()
        manager.extend(fork, 3)
        manager.write_many(0, [fork, handle], [0, 0], *rows_of([1, 2]))
        manager.truncate(fork, 5)
        with manager.view(handle, 0) as span:
            [(segment.keys, segment.value_view) for segment in span]
        keys, values = handle.kv_cache(1)
        keys.segments, values.numpy(), np.asarray(keys)
        handle.block_table = handle.block_table
        handle.tokens, handle.stats(), repr(handle), repr(span), repr(keys), clone.block_table
        manager.read_range(fork, 0)
        manager.stats(), manager.inspect().blocks, manager.leak_report().sequences, repr(manager)
        manager.free_request("fork")
    caches = [kvspan.LayerKvCache(kvspan.KVCacheConfig(4, HEADS, DIM)) for _ in range(2)]
    with kvspan.ContiguousKvCacheHandle(caches) as handle:
        handle.append(0, *rows_of([1]))
        other = handle.clone_handle()
        other.append(1, *rows_of([1]))
        handle.layer(0), handle.block_table, handle.key_cache(0).numpy(), handle.stats()


def fail_everywhere(manager):
    """Everything that raises, once."""
    handle = start(manager, PROMPT, "chat")
    span = manager.view(handle, 0)
    for call, arguments in [
        (manager.allocate, (range(100),)),
        (manager.allocate, (PROMPT, "chat")),
        (manager.allocate, ([1, -1],)),
        (manager.allocate, (np.array([1.0]),)),
        (manager.probe, ("abc",)),
        (manager.free_request, ("talk",)),
        (manager.view, (handle, 3)),
        (manager.write, (handle, 0, 9, *rows_of([1, 2]))),
        (manager.write, (handle, 0, 0, PROMPT, None)),
        (manager.write_many, (0, [handle, handle], [0, 0], *rows_of([1, 2]))),
        (manager.write_many, (0, [handle, None], [0, 0], *rows_of([1, 2]))),
        (manager.commit, (handle, [1])),
        (manager.free, (None,)),
        (new_manager(1).free, (handle,)),
        (manager.read_range, (handle, 0, 3, 2)),
        (setattr, (handle, "block_table", kvspan.BlockTable(4, [9], 1))),
        (setattr, (handle, "block_table", None)),
        (lambda segments: span.release(), (span.segments,)),
        (kvspan.BlockTable, (4, [1, 1])),
        (kvspan.ContiguousKvCacheHandle, ([None],)),
    ]:
        with contextlib.suppress(Exception):
            call(*arguments)
            pytest.fail(f"{call} worked with {arguments}")


@isolated
def test_number_of_objects_does_not_grow():
    manager = new_manager(8)
    for once in [use_everything, fail_everywhere]:
        # A leak grows in every round, what Python keeps for itself in the first few.
        assert min(growth(once, manager) for _ in range(8)) < 50
        assert_nothing_leaks(manager)


def test_many_segments_are_seen_in_order():
    manager = kvspan.KvCacheManager(600, block_size=1, num_kv_heads=1, head_dim=1)
    tokens = list(range(500))
    handle = manager.allocate(tokens)
    rows = np.arange(500, dtype=np.float32).reshape(500, 1, 1)
    manager.write(handle, 0, 0, rows, -rows)
    span = manager.view(handle, 0)
    assert span.num_segments == 500
    assert [segment.keys.item() for segment in span] == tokens
    assert_array_equal(handle.value_cache(0).numpy(), -rows)
    del span, handle
    assert_nothing_leaks(manager)


def test_forks_under_views_stay_apart(manager):
    handle = start(manager, PROMPT[:6])
    fork = manager.fork(handle)
    span = manager.view(fork, 0)
    manager.write_many(0, [handle, fork], [5, 5], *rows_of([7, 8]))
    assert numbers(span) == right(PROMPT[:6])
    assert (read(manager, handle)[5], read(manager, fork)[5]) == (7, 8)
    del handle
    manager.write(fork, 0, 5, *rows_of([computed(PROMPT[:6], 0)]))
    assert_holds(manager, fork, PROMPT[:6])
