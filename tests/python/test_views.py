"""`KVSpan`: arrays over the cache's own memory, which do not change while they live."""

import copy
import gc
import weakref

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from kvspan import TensorView
from kvspan.errors import OutOfRangeError, PinnedError, ReleasedError, ViewsAliveError
from support import (
    CAPACITY,
    DIM,
    HEADS,
    WIDTH,
    address,
    assert_holds,
    new_filled_cache,
    refused,
    token,
    tokens,
)

ROW_BYTES = WIDTH * 4


# What a view shows


def test_view_is_of_all_tokens_unless_told_otherwise(filled):
    for span, start, end in [
        (filled.view(), 0, 6),
        (filled.view(2), 2, 6),
        (filled.view(end=4), 0, 4),
        (filled.view(2, 4), 2, 4),
        (filled.view(start=2, end=None), 2, 6),
        (filled.view(6), 6, 6),
    ]:
        assert (span.start, span.end, len(span)) == (start, end, end - start)
        assert (span.num_heads, span.head_dim, span.released) == (HEADS, DIM, False)
        assert span.keys.shape == span.values.shape == (end - start, HEADS, DIM)
        assert_array_equal((span.keys, span.values), tokens(end - start, first=start + 1))


@pytest.mark.parametrize("view", [(7,), (0, 7), (3, 2), (7, 7), (2**64 - 1,)])
def test_view_of_tokens_that_are_not_there_is_refused(view, filled):
    error = refused(filled, OutOfRangeError, filled.view, *view)
    assert error.start == view[0]


def test_view_shows_the_tokens_where_they_lie(filled):
    whole, part = filled.view(), filled.view(2, 5)
    assert address(part.keys) == address(whole.keys) + 2 * ROW_BYTES
    assert address(part.values) == address(whole.values) + 2 * ROW_BYTES
    assert np.shares_memory(part.keys, whole.keys[2:5])
    assert not np.shares_memory(whole.keys, whole.values)


def test_planes_begin_on_a_cache_line(filled):
    span = filled.view()
    assert address(span.keys) % 64 == 0
    assert address(span.values) % 64 == 0


@pytest.mark.parametrize(
    "consume",
    [
        lambda span: span.keys,
        lambda span: span.keys[...],
        lambda span: np.asarray(span.keys),
        lambda span: np.asarray(span.key_view),
        lambda span: np.frombuffer(span.key_view, np.float32),
        lambda span: np.ndarray((6, HEADS, DIM), np.float32, buffer=span.key_view),
        lambda span: np.asarray(memoryview(span.key_view)),
        lambda span: np.asarray(memoryview(span.key_view).cast("B").cast("f")),
        lambda span: np.from_dlpack(span.key_view),
        lambda span: np.from_dlpack(span.keys),
        lambda span: np.lib.stride_tricks.as_strided(span.keys, writeable=False),
    ],
)
def test_every_way_to_an_array_is_free_of_copies_and_read_only(consume, filled):
    array = consume(filled.view())
    assert address(array) == address(filled.view().keys)
    assert not array.flags.writeable
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert not array.flags.owndata
    assert_array_equal(array.ravel(), tokens(6)[0].ravel())
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array.setflags(write=True)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0


def test_callback_s_arrays_are_free_of_copies(filled):
    whole = filled.view()
    keys, values = filled.with_read_kv(3, lambda keys, values: (keys, values))
    assert address(keys) == address(whole.keys[3])
    assert address(values) == address(whole.values[3])
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        keys.setflags(write=True)


def test_two_sides_have_their_own_exporters(filled):
    span = filled.view()
    assert type(span.key_view) is type(span.value_view) is TensorView
    assert_array_equal(np.asarray(span.key_view), tokens(6)[0])
    assert_array_equal(np.asarray(span.value_view), tokens(6)[1])


def test_empty_view_has_the_shape_of_no_tokens(cache, filled):
    for span in [cache.view(), filled.view(3, 3)]:
        for array in [span.keys, np.asarray(span.key_view), np.from_dlpack(span.key_view)]:
            assert array.shape == (0, HEADS, DIM)
        assert memoryview(span.values).nbytes == memoryview(span.value_view).nbytes == 0


# What a view keeps


def overwrite(cache):
    cache.write_kv(3, *token(9))


def overwrite_in_a_batch(cache):
    cache.write_kv_batch([(0, *token(9)), (3, *token(9))])


def overwrite_by_arrays(cache):
    cache.write_kv_batch([8, 3], *tokens(2))


def truncate(cache):
    cache.truncate(3)


def reset(cache):
    cache.reset()


CHANGES = [overwrite, overwrite_in_a_batch, overwrite_by_arrays, truncate, reset]


@pytest.mark.parametrize("change", CHANGES)
def test_pinned_tokens_can_not_change(change, filled):
    span = filled.view(3, 5)
    error = refused(filled, PinnedError, change, filled)
    assert error.pins == 1
    assert error.start <= 3 < error.end <= 6
    assert not span.released
    del span
    change(filled)


def test_each_view_of_a_token_is_a_pin(filled):
    spans = [filled.view(0, 4), filled.view(3), filled.view(0, 3), filled.view(3, 4)]
    assert refused(filled, PinnedError, overwrite, filled).pins == 3
    assert refused(filled, PinnedError, reset, filled).pins == len(spans)
    assert refused(filled, PinnedError, reset, copy.copy(filled)).pins == len(spans)


def test_tokens_beside_a_view_can_change(filled):
    span = filled.view(1, 3)
    filled.write_kv(0, *token(9))
    filled.write_kv(3, *token(9))
    filled.write_kv_batch([(5, *token(9)), (7, *token(9))])
    filled.append(*tokens(3))
    filled.initialize(CAPACITY)
    filled.truncate(3)
    assert_array_equal((span.keys, span.values), tokens(2, first=2))


def test_empty_view_pins_nothing(filled):
    spans = filled.view(3, 3), filled.view(6), filled.view(0, 0)
    filled.reset()
    assert [len(span) for span in spans] == [0, 0, 0]


def test_truncating_to_the_present_length_is_no_change(filled):
    span = filled.view()
    filled.truncate(6)
    assert_array_equal(span.keys, tokens(6)[0])


def drop_export_at_once(exporter):
    """As several libraries do: takes the address, gives the export back, and keeps the object."""
    return np.ndarray((6, HEADS, DIM), np.float32, buffer=exporter)


HOLDERS = [
    lambda span: span,
    lambda span: span.keys,
    lambda span: span.values[4, 1],
    lambda span: span.keys.T,
    lambda span: span.keys.reshape(-1),
    lambda span: span.keys.view(np.uint32),
    lambda span: span.keys.base,
    lambda span: span.keys.data,
    lambda span: span.key_view,
    lambda span: memoryview(span.key_view),
    lambda span: memoryview(span.value_view)[4:],
    lambda span: memoryview(span.key_view).cast("B"),
    lambda span: memoryview(span.keys),
    lambda span: np.asarray(span.key_view),
    lambda span: np.frombuffer(span.key_view, np.float32)[40:],
    lambda span: drop_export_at_once(span.key_view),
    lambda span: drop_export_at_once(memoryview(span.key_view)),
    lambda span: np.from_dlpack(span.key_view),
    lambda span: np.from_dlpack(span.keys),
    lambda span: span.key_view.__dlpack__(max_version=(1, 0)),
    lambda span: iter(span.keys),
    lambda span: np.nditer(span.values),
    lambda span: {"kept": [span.keys]},
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_whatever_leads_to_the_memory_pins_it(hold, filled):
    held = hold(filled.view())
    gc.collect()
    for change in CHANGES:
        refused(filled, PinnedError, change, filled)
    del held
    reset(filled)


@pytest.mark.parametrize("copied", [np.copy, bytes, np.ndarray.tolist, lambda keys: keys + 0])
def test_copies_pin_nothing(copied, filled):
    kept = copied(filled.view().keys)
    reset(filled)
    assert len(kept) > 0


@pytest.mark.parametrize("hold", HOLDERS)
def test_memory_outlives_the_cache(hold):
    cache = new_filled_cache()
    whole = cache.view()
    held = hold(cache.view())
    whole_keys = whole.keys
    gone = weakref.ref(cache)
    del cache, whole
    gc.collect()
    assert gone() is None
    assert_array_equal(whole_keys, tokens(6)[0])
    del whole_keys
    gc.collect()
    if isinstance(held, np.ndarray):
        assert set(held.view(np.float32).ravel()) <= set(np.ravel(tokens(6)))


def test_array_is_the_only_one_left_and_still_reads(filled):
    array = new_filled_cache().view().keys
    gc.collect()
    assert_array_equal(array, tokens(6)[0])
    assert_holds(filled, *tokens(6))


# release() and `with`


def test_release_ends_the_pin(filled):
    span = filled.view()
    assert span.release() is None
    assert span.released
    reset(filled)
    span.release()


@pytest.mark.parametrize("hold", HOLDERS[1:])
def test_release_is_refused_while_anything_else_holds_the_memory(hold, filled):
    span = filled.view()
    held = hold(span)
    with pytest.raises(ViewsAliveError) as caught:
        span.release()
    assert caught.value.views >= 1
    assert not span.released
    refused(filled, PinnedError, reset, filled)
    assert_array_equal(span.keys, tokens(6)[0])
    del held
    span.release()
    reset(filled)


def test_release_counts_the_views(filled):
    span = filled.view()
    held = [span.keys, span.values, span.key_view]
    with pytest.raises(ViewsAliveError, match=r"3 view\(s\) over the rows are alive") as caught:
        span.release()
    assert caught.value.views == len(held)


def test_released_memoryview_holds_no_longer(filled):
    span = filled.view()
    with memoryview(span.key_view):
        pass
    span.release()
    assert span.released


@pytest.mark.parametrize("attribute", ["keys", "values", "key_view", "value_view"])
def test_released_span_gives_no_memory(attribute, filled):
    span = filled.view(2, 4)
    span.release()
    with pytest.raises(ReleasedError):
        getattr(span, attribute)
    assert (span.start, span.end, len(span)) == (2, 4, 2)
    assert (span.num_heads, span.head_dim) == (HEADS, DIM)


def test_with_block_ends_the_pin(filled):
    span = filled.view()
    with span as same:
        assert same is span
        assert_array_equal(span.keys, tokens(6)[0])
    assert span.released
    reset(filled)
    with pytest.raises(ReleasedError), span:
        pytest.fail("a released span was entered")


def test_arrays_outlive_the_with_block(filled):
    with filled.view() as span:
        keys = span.keys
    assert span.released
    refused(filled, PinnedError, reset, filled)
    assert_array_equal(keys, tokens(6)[0])
    del keys
    reset(filled)


def test_with_block_lets_exceptions_through(filled):
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, filled.view() as span:
        raise error
    assert caught.value is error
    assert span.released


# The objects


def test_views_can_be_referred_to_weakly(filled):
    span = filled.view()
    exporter = span.key_view
    references = [weakref.ref(viewed) for viewed in (filled, span, exporter)]
    assert [reference() for reference in references] == [filled, span, exporter]
    del span, exporter
    assert [reference() for reference in references] == [filled, None, None]


def test_a_view_of_an_exporter_outlives_the_span(filled):
    exporter = filled.view().key_view
    assert_array_equal(np.asarray(exporter), tokens(6)[0])


def test_reprs_say_the_shape_and_not_the_data(filled):
    span = filled.view(2, 5)
    assert repr(span) == "KVSpan(start=2, end=5, num_heads=2, head_dim=4, dtype='float32')"
    shown = "TensorView(shape=(3, 2, 4), dtype='float32', readonly=True)"
    assert repr(span.key_view) == shown
    span.release()
    assert repr(span).endswith("dtype='float32', released)")


@pytest.mark.parametrize("made_by_the_cache", [kvspan.KVSpan, kvspan.ReservedSpan, TensorView])
def test_only_the_cache_makes_views(made_by_the_cache):
    with pytest.raises(TypeError, match="cannot create"):
        made_by_the_cache()
