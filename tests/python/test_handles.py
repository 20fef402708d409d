"""Handles of both kinds keep one contract, and so must what is derived from the abstract class."""

import abc
import copy
import inspect
import time
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from blocks import DIM, HEADS, new_manager, read, right, rows_of, start
from blocks import assert_holds as manager_holds
from kvspan import BlockTable, KvCacheHandle
from kvspan.errors import (
    CapacityExceededError,
    InconsistentTableError,
    InvalidInputError,
    LayerOutOfRangeError,
    OutOfBlocksError,
    StaleHandleError,
    ViewsAliveError,
)

PROMPT = [11, 12, 13, 14, 15, 16]


def layer_caches(num_layers=2, capacity=16, heads=HEADS, dim=DIM):
    config = kvspan.KVCacheConfig(capacity, heads, dim)
    return [kvspan.LayerKvCache(config) for _ in range(num_layers)]


def new_contiguous(tokens=PROMPT):
    handle = kvspan.ContiguousKvCacheHandle(layer_caches())
    for layer in range(2):
        handle.append(layer, *rows_of(right(tokens, layer)))
    return handle


def new_paged(tokens=PROMPT):
    return start(new_manager(8), tokens)


class Borrowed(KvCacheHandle):
    """The smallest handle there can be: lists of arrays."""

    num_layers, num_heads, head_dim, device = 2, HEADS, DIM, "cpu"

    def __init__(self, tokens=PROMPT):
        self.table = BlockTable(16, [1], len(tokens))
        self.rows = [rows_of(right(tokens, layer)) for layer in range(2)]
        self.closed = False

    @property
    def block_table(self):
        return self.table

    @property
    def is_valid(self):
        return not self.closed

    @property
    def cache_id(self):
        return f"borrowed-{id(self)}"

    def _side(self, layer, side):
        if self.closed:
            raise StaleHandleError("stale", self.cache_id)
        if not 0 <= layer < 2:
            raise LayerOutOfRangeError(f"no layer {layer}", layer, 2)
        return self.rows[layer][side].copy()

    def key_cache(self, layer):
        return self._side(layer, 0)

    def value_cache(self, layer):
        return self._side(layer, 1)

    def clone_handle(self):
        if self.closed:
            raise StaleHandleError("stale", self.cache_id)
        return Borrowed()

    def stats(self):
        return None

    def close(self):
        self.closed = True


each_kind = pytest.mark.parametrize("new", [new_paged, new_contiguous, Borrowed])
each_of_ours = pytest.mark.parametrize("new", [new_paged, new_contiguous])


# The contract


@each_kind
def test_it_is_a_handle(new):
    assert isinstance(new(), KvCacheHandle)


@each_kind
def test_it_has_all_that_the_abstract_class_has(new):
    members = {name for name in vars(KvCacheHandle) if not name.startswith("_")}
    handle = new()
    assert members <= {*dir(handle)}
    for name in members:
        callable_there = callable(vars(KvCacheHandle)[name])
        assert callable(getattr(handle, name)) == callable_there, name


@each_kind
def test_plain_properties(new):
    handle = new()
    assert (handle.num_layers, handle.num_heads, handle.head_dim) == (2, HEADS, DIM)
    assert (handle.device, handle.is_valid, handle.num_tokens) == ("cpu", True, len(PROMPT))
    assert isinstance(handle.block_table, BlockTable)
    assert handle.block_table.sequence_length == len(PROMPT)
    assert isinstance(handle.cache_id, str)
    assert handle.cache_id != new().cache_id


@each_kind
def test_tensors_are_keys_and_values(new):
    handle = new()
    for layer in range(2):
        keys, values = rows_of(right(PROMPT, layer))
        for found, expected in [
            (handle.key_cache(layer), keys),
            (handle.value_cache(layer), values),
            *zip(handle.kv_cache(layer), (keys, values)),
        ]:
            assert found.shape == (len(PROMPT), HEADS, DIM)
            assert_array_equal(np.asarray(found), expected)


def test_keys_and_values_of_a_layer_are_one_view():
    manager = new_manager(num_layers=2)
    handle = start(manager, PROMPT)
    keys, values = handle.kv_cache(1)
    assert [block.pin_count for block in manager.inspect().blocks][:3] == [1, 1, 0]
    keys.release()
    assert manager.inspect().blocks[0].pin_count == 1
    values.release()
    assert manager.inspect().blocks[0].pin_count == 0


@each_kind
@pytest.mark.parametrize("layer", [2, -1, 2**70])
def test_layer_that_does_not_exist_is_an_error(new, layer):
    handle = new()
    for call in [handle.key_cache, handle.value_cache, handle.kv_cache]:
        with pytest.raises(LayerOutOfRangeError, match="no layer"):
            call(layer)


@each_kind
def test_a_closed_handle_refuses_every_use_and_still_answers(new):
    handle = new()
    tensor = handle.key_cache(0)
    cache_id = handle.cache_id
    handle.close()
    handle.close()
    assert not handle.is_valid
    assert (handle.cache_id, handle.num_layers, handle.device) == (cache_id, 2, "cpu")
    assert isinstance(handle.block_table, BlockTable)
    handle.stats()
    for use in [lambda: handle.key_cache(0), lambda: handle.kv_cache(0), handle.clone_handle]:
        with pytest.raises(StaleHandleError):
            use()
    # A tensor stays as it is, whatever happens to the handle.
    assert_array_equal(np.asarray(tensor), rows_of(right(PROMPT))[0])


@each_kind
def test_a_clone_is_a_handle_of_its_own(new):
    handle = new()
    clone = handle.clone_handle()
    assert clone.cache_id != handle.cache_id
    assert (clone.num_tokens, clone.num_layers) == (handle.num_tokens, 2)
    handle.close()
    assert clone.is_valid
    assert_array_equal(np.asarray(clone.key_cache(1)), rows_of(right(PROMPT, 1))[0])


@each_of_ours
def test_stats_are_real_figures(new):
    before = time.monotonic()
    handle = new()
    stats = handle.stats()
    slots = 8 if new is new_paged else 16
    assert (stats.tokens_stored, stats.blocks_allocated) == (6, 2 if new is new_paged else 1)
    assert stats.utilization == pytest.approx(6 / slots)
    # Keys and values of float32 in two layers; layer caches round up to cache lines.
    assert stats.memory_bytes == 2 * 2 * slots * HEADS * DIM * 4
    assert before <= stats.last_access <= time.monotonic()
    handle.key_cache(0)
    assert handle.stats().last_access > stats.last_access
    assert repr(stats).startswith("CacheHandleStats(memory_bytes=")
    handle.close()
    stats = handle.stats()
    assert (stats.memory_bytes, stats.tokens_stored, stats.utilization) == (0, 0, 0)


@each_of_ours
def test_with_block_closes_at_its_end(new):
    with new() as handle:
        assert handle.is_valid
    assert not handle.is_valid
    with pytest.raises(StaleHandleError), handle:
        pytest.fail("a closed handle was entered")


# Tensors


def test_tensor_of_blocks_lies_in_segments():
    handle = new_paged()
    keys = handle.key_cache(0)
    assert (keys.num_segments, keys.dtype, keys.device, len(keys)) == (2, "float32", "cpu", 6)
    assert repr(keys) == "CacheTensor(shape=(6, 1, 2), dtype='float32', num_segments=2)"
    assert [segment.shape for segment in keys.segments] == [(4, 1, 2), (2, 1, 2)]
    for segment in keys.segments:
        assert not segment.flags.writeable and not segment.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            segment[:] = 0
    assert_array_equal(np.concatenate(keys.segments), rows_of(right(PROMPT))[0])


def test_segments_are_gathered_only_if_asked():
    keys = new_paged().key_cache(0)
    for array in [keys.numpy(), np.asarray(keys), np.array(keys), np.from_dlpack(Copied(keys))]:
        assert_array_equal(array, rows_of(right(PROMPT))[0])
        assert not any(np.shares_memory(array, segment) for segment in keys.segments)
    with pytest.raises(ValueError, match="lies in 2 segments: one array of them is a copy"):
        np.asarray(keys, copy=False)
    with pytest.raises(BufferError, match="2 segments, and DLPack has room for one"):
        np.from_dlpack(keys)
    assert np.asarray(keys, np.float64).dtype == np.float64


class Copied:
    """Exports a copy."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**{**options, "copy": True})

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("new", [lambda: new_paged(PROMPT[:4]), new_contiguous])
def test_tensor_of_one_segment_is_one_array_without_a_copy(new):
    keys = new().key_cache(0)
    (segment,) = keys.segments
    for array in [
        keys.numpy(),
        np.asarray(keys),
        np.asarray(keys, copy=False),
        np.from_dlpack(keys),
    ]:
        assert np.shares_memory(array, segment)
        assert not array.flags.writeable
    copied = np.array(keys)
    assert copied.flags.writeable and not np.shares_memory(copied, segment)
    assert np.from_dlpack(Copied(keys)).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        keys.__dlpack__()


@pytest.mark.parametrize("new", [lambda: new_paged([]), lambda: new_contiguous([])])
def test_tensor_without_tokens_is_empty(new):
    keys = new().key_cache(0)
    assert (keys.shape, keys.num_segments, keys.segments) == ((0, HEADS, DIM), 0, [])
    for array in [keys.numpy(), np.asarray(keys), np.from_dlpack(keys)]:
        assert array.shape == (0, HEADS, DIM)


def test_tensor_ends_when_released():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    keys = handle.key_cache(0)
    segment = keys.segments[1]
    with pytest.raises(ViewsAliveError, match="1 view") as caught:
        keys.release()
    assert caught.value.views == 1 and not keys.released
    del segment
    keys.release()
    keys.release()
    assert keys.released and repr(keys).endswith(", released)")
    for use in [lambda: keys.segments, keys.numpy, lambda: np.asarray(keys), keys.__enter__]:
        with pytest.raises(ValueError, match="is over"):
            use()
    assert manager.leak_report().pinned_blocks == []
    with handle.value_cache(1) as values:
        assert manager.leak_report().pinned_blocks == [(1, 1), (2, 1)]
        kept = values.segments[0]
    assert values.released
    assert manager.leak_report().pinned_blocks == [(1, 1), (2, 1)]
    del kept
    assert manager.leak_report().pinned_blocks == []


# Paged handles


def test_assigning_a_table_changes_the_length():
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    table = handle.block_table
    table.truncate(5)
    handle.block_table = table
    assert (handle.num_tokens, handle.tokens.tolist()) == (5, PROMPT[:5])
    table.extend_sequence(3)
    handle.block_table = table
    assert handle.num_tokens == 8
    assert read(manager, handle) == [*right(PROMPT[:5]), 0, 0, 0]
    handle.block_table = BlockTable(4, [1], 2)
    assert (handle.num_tokens, handle.block_table.physical_blocks) == (2, [1])
    handle.block_table = handle.block_table
    assert_array_equal(read(manager, handle), right(PROMPT[:2]))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (BlockTable(4, [1, 3], 5), "it names blocks that the sequence does not have there"),
        (BlockTable(4, [2, 1], 5), "it names blocks that the sequence does not have there"),
        (BlockTable(4, [1, 2, 3], 5), "it names blocks that the sequence does not have there"),
        (BlockTable(4, [1, 99], 5), "it names blocks that the sequence does not have there"),
        (BlockTable(8, [1], 5), "its block size was changed"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_at_once(table, reason):
    manager = new_manager(8)
    handle = start(manager, PROMPT)
    before = manager.inspect(), handle.block_table
    with pytest.raises(InconsistentTableError) as caught:
        handle.block_table = table
    assert str(caught.value) == f"the block table is inconsistent: {reason}"
    assert (manager.inspect(), handle.block_table) == before
    manager_holds(manager, handle, PROMPT)
    for bad in [None, [1, 2], "table"]:
        with pytest.raises(TypeError, match="a BlockTable is wanted, not"):
            handle.block_table = bad
    with pytest.raises(AttributeError):
        del handle.block_table


def test_a_table_for_which_there_are_no_blocks_is_refused():
    manager = new_manager(2)
    handle = start(manager, PROMPT[:4])
    fork = manager.fork(handle)
    other = manager.allocate([1])
    with pytest.raises(OutOfBlocksError):
        fork.block_table = BlockTable(4, [1], 3)
    assert (fork.num_tokens, fork.block_table.physical_blocks) == (4, [1])
    manager_holds(manager, fork, PROMPT[:4])
    del other


def test_without_storage_a_table_for_which_a_block_is_copied_is_refused():
    manager = new_manager(8, storage=False)
    handle = start(manager, PROMPT[:7])
    fork = manager.fork(handle)
    before = manager.inspect(), fork.block_table
    for table in [BlockTable(4, [1], 3), BlockTable(4, [1, 2], 8)]:
        with pytest.raises(InconsistentTableError, match="needs a block to be copied"):
            fork.block_table = table
        assert (manager.inspect(), fork.block_table) == before
    fork.block_table = BlockTable(4, [1], 4)
    assert fork.num_tokens == 4


def test_a_table_of_a_handle_is_a_copy():
    handle = new_paged()
    handle.block_table.truncate(0)
    assert handle.num_tokens == len(PROMPT)


@pytest.mark.parametrize("name", ["num_tokens", "cache_id", "manager", "is_valid", "anything"])
def test_other_attributes_can_not_be_set(name):
    for handle in [new_paged(), new_contiguous()]:
        with pytest.raises(AttributeError):
            setattr(handle, name, 1)


def test_handles_are_made_by_a_manager_only():
    with pytest.raises(TypeError, match="PagedKvCacheHandle"):
        kvspan.PagedKvCacheHandle()


# Contiguous handles


def test_contiguous_handle_sees_what_happens_to_its_caches():
    caches = layer_caches()
    handle = kvspan.ContiguousKvCacheHandle(caches)
    assert (handle.num_tokens, handle.block_table.physical_blocks) == (0, [1])
    assert handle.block_table.block_size == 16
    rows = rows_of([1, 2, 3])
    assert caches[0].append(*rows) == range(3)
    # A token counts when all layers have it.
    assert handle.num_tokens == handle.block_table.sequence_length == 0
    assert handle.key_cache(0).shape == (3, HEADS, DIM)
    assert handle.append(1, rows[0][:2], rows[1][:2]) == range(2)
    assert handle.num_tokens == handle.block_table.sequence_length == 2
    assert len(caches[1]) == len(handle.layer(1)) == 2
    handle.layer(1).truncate(1)
    assert (handle.num_tokens, len(caches[1])) == (1, 1)
    assert handle.append(1, rows[0][0], rows[1][0]) == range(1, 2)
    assert repr(handle) == f"ContiguousKvCacheHandle({handle.cache_id}, num_tokens=2, num_layers=2)"


def test_contiguous_clones_share_until_one_appends():
    handle = new_contiguous()
    clone = handle.clone_handle()
    assert np.shares_memory(clone.key_cache(0).numpy(), handle.key_cache(0).numpy())
    assert clone.append(0, *rows_of([7])) == range(6, 7)
    assert not np.shares_memory(clone.key_cache(0).numpy(), handle.key_cache(0).numpy())
    assert (len(handle.layer(0)), len(clone.layer(0))) == (6, 7)
    assert_array_equal(handle.key_cache(0).numpy(), rows_of(right(PROMPT))[0])
    del clone
    handle.append(0, *rows_of([8]))
    assert len(handle.layer(0)) == 7


def test_closing_a_contiguous_handle_leaves_its_caches():
    caches = layer_caches()
    with kvspan.ContiguousKvCacheHandle(caches) as handle:
        handle.append(0, *rows_of([1]))
        handle.append(1, *rows_of([1]))
    assert (len(caches[0]), handle.num_tokens) == (1, 0)
    assert repr(handle).endswith(", num_layers=2, closed)")
    with pytest.raises(StaleHandleError):
        handle.append(0, *rows_of([1]))
    with pytest.raises(StaleHandleError):
        handle.layer(0)


def test_appending_what_does_not_fit_changes_nothing():
    handle = new_contiguous()
    with pytest.raises(CapacityExceededError):
        handle.append(0, *rows_of(range(11)))
    with pytest.raises(InvalidInputError, match="keys have shape"):
        handle.append(0, np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32))
    with pytest.raises(InvalidInputError, match="elements but values have"):
        handle.append(0, rows_of([1, 2])[0], rows_of([1])[1])
    with pytest.raises(LayerOutOfRangeError):
        handle.append(2, *rows_of([1]))
    clone = handle.clone_handle()
    with pytest.raises(CapacityExceededError):
        clone.append(0, *rows_of(range(11)))
    assert np.shares_memory(clone.key_cache(0).numpy(), handle.key_cache(0).numpy())
    assert handle.num_tokens == clone.num_tokens == 6


def test_caches_that_are_no_model_s_are_refused():
    cache, *_ = layer_caches()
    with pytest.raises(InvalidInputError, match="layers 0 and 1 are the same cache"):
        kvspan.ContiguousKvCacheHandle([cache, cache])
    with pytest.raises(InvalidInputError, match="layers 0 and 1 are the same cache, or share"):
        kvspan.ContiguousKvCacheHandle([cache, copy.copy(cache)])
    kvspan.ContiguousKvCacheHandle([cache, copy.deepcopy(cache)])
    with pytest.raises(TypeError, match="layer 1 must be a LayerKvCache, not int"):
        kvspan.ContiguousKvCacheHandle([cache, 3])
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        kvspan.ContiguousKvCacheHandle([])
    with pytest.raises(TypeError, match="not iterable"):
        kvspan.ContiguousKvCacheHandle(cache.config)
    for other in [layer_caches(1, heads=3), layer_caches(1, dim=3), layer_caches(1, capacity=3)]:
        with pytest.raises(
            ValueError, match="layer 1 does not have the shape and element type of layer 0"
        ):
            kvspan.ContiguousKvCacheHandle([cache, *other])


# The abstract class


def test_it_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        KvCacheHandle()
    abstract = KvCacheHandle.__abstractmethods__
    provided = {name for name in vars(KvCacheHandle) if not name.startswith("_")} - abstract
    assert provided == {"num_tokens", "kv_cache"}
    assert isinstance(KvCacheHandle, abc.ABCMeta)
    assert not inspect.isabstract(Borrowed)
    assert not isinstance(object(), KvCacheHandle)


def liar(**lies):
    """A handle that says something else about itself."""
    return type("Liar", (Borrowed,), lies)()


def says(value):
    return property(lambda self: value)


@pytest.mark.parametrize(
    ("lies", "error", "message"),
    [
        (
            {"block_table": says([1, 2])},
            TypeError,
            "Liar.block_table must be a BlockTable, not list",
        ),
        (
            {"block_table": says(None)},
            TypeError,
            "Liar.block_table must be a BlockTable, not NoneType",
        ),
    ],
)
def test_a_lie_about_the_table_shows_in_the_number_of_tokens(lies, error, message):
    with pytest.raises(error) as caught:
        liar(**lies).num_tokens
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("lies", "error", "message"),
    [
        ({"block_table": says(6)}, TypeError, "Liar.block_table must be a BlockTable, not int"),
        ({"num_layers": -1}, InvalidInputError, "Liar.num_layers must be at least 1, but it is -1"),
        ({"num_layers": "2"}, TypeError, "Liar.num_layers must be an integer, not str"),
        ({"num_layers": None}, TypeError, "Liar.num_layers must be an integer, not NoneType"),
        ({"num_heads": 0}, InvalidInputError, "Liar.num_heads must be at least 1, but it is 0"),
        ({"num_heads": True}, TypeError, "Liar.num_heads must be an integer, not bool"),
        (
            {"head_dim": -(2**70)},
            InvalidInputError,
            f"Liar.head_dim must be at least 1, but it is {-(2**70)}",
        ),
        ({"head_dim": 2.0}, TypeError, "Liar.head_dim must be an integer, not float"),
        (
            {"head_dim": 3},
            InvalidInputError,
            "Liar.key_cache(1) has shape (6, 1, 2), but (6, 1, 3) is wanted: num_tokens, num_heads "
            "and head_dim",
        ),
        (
            {"block_table": says(BlockTable(16, [1], 7))},
            InvalidInputError,
            "Liar.key_cache(1) has shape (6, 1, 2), but (7, 1, 2) is wanted: num_tokens, num_heads "
            "and head_dim",
        ),
        (
            {"value_cache": lambda self, layer: np.zeros((6, 2), np.float32)},
            InvalidInputError,
            "Liar.value_cache(1) has shape (6, 2), but (6, 1, 2) is wanted: num_tokens, num_heads "
            "and head_dim",
        ),
        (
            {"value_cache": lambda self, layer: np.float32(3)},
            InvalidInputError,
            "Liar.value_cache(1) has shape (), but (6, 1, 2) is wanted: num_tokens, num_heads and "
            "head_dim",
        ),
        (
            {"key_cache": lambda self, layer: SimpleNamespace(shape=6)},
            TypeError,
            "Liar.key_cache(1) has shape 6, which is no tuple of integers",
        ),
        (
            {"key_cache": lambda self, layer: SimpleNamespace(shape=("6", 1, 2))},
            TypeError,
            "Liar.key_cache(1) has shape ('6', 1, 2), which is no tuple of integers",
        ),
        (
            {"key_cache": lambda self, layer: "keys"},
            TypeError,
            "Liar.key_cache(1) must be a tensor, which has a shape, or None, not str",
        ),
    ],
)
def test_a_handle_that_contradicts_itself_is_told_where(lies, error, message):
    with pytest.raises(error) as caught:
        liar(**lies).kv_cache(1)
    assert str(caught.value) == message


def test_a_handle_may_hold_no_tensors():
    handle = liar(key_cache=lambda self, layer: None, value_cache=lambda self, layer: None)
    assert handle.kv_cache(0) == (None, None)
    with pytest.raises(TypeError):
        handle.kv_cache("0")


def test_what_a_handle_raises_passes_unchanged():
    def key_cache(self, layer):
        raise ZeroDivisionError("my own")

    with pytest.raises(ZeroDivisionError, match="my own"):
        liar(key_cache=key_cache).kv_cache(0)


def test_a_manager_takes_its_own_handles_only():
    manager = new_manager()
    for other in [Borrowed(), new_contiguous(), None, 3, "paged-1"]:
        for call in [manager.free, manager.extend, manager.fork, lambda h: manager.view(h, 0)]:
            with pytest.raises(TypeError, match=r"^a PagedKvCacheHandle is wanted, .*, not \w+"):
                call(other)
