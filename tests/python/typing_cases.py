"""What type checkers make of the public API: checked by mypy, run by nobody."""

import array
import copy
import ctypes
from collections.abc import Iterator
from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

import kvspan
from kvspan import (
    AttentionPool,
    BlockCopy,
    BlockPicture,
    BlockTable,
    CacheTensor,
    ContiguousKvCacheHandle,
    Inspection,
    KeyChain,
    KVCacheConfig,
    KvCacheHandle,
    KvCacheManager,
    KVSpan,
    LayerKvCache,
    LeakReport,
    ManagerStats,
    PagedKvCacheHandle,
    PagedSpan,
    ReservedSpan,
    SequenceReport,
    TensorView,
    errors,
    replay,
)

Float32Array = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


def configs() -> KVCacheConfig:
    config = KVCacheConfig(max_tokens_per_seq=16, num_heads=2, hidden_dim_per_head=4)
    assert_type(config, KVCacheConfig)
    KVCacheConfig()
    KVCacheConfig(np.int64(16), 2, 4, "float32")
    KVCacheConfig(dtype=np.float32)
    KVCacheConfig(dtype=np.dtype(np.float16))
    KVCacheConfig(dtype="bfloat16")
    KVCacheConfig(dtype=config.dtype)
    assert_type(config.max_tokens_per_seq, int)
    assert_type(config.num_heads, int)
    assert_type(config.hidden_dim_per_head, int)
    assert_type(config.token_width, int)
    assert_type(config.dtype, str)
    assert_type(config == config, bool)
    assert_type({config: 1}[config], int)
    assert_type(copy.copy(config), KVCacheConfig)

    KVCacheConfig(num_heads="2")  # type: ignore[arg-type]
    KVCacheConfig(num_heads=2.0)  # type: ignore[arg-type]
    KVCacheConfig(dtype=None)  # type: ignore[arg-type]
    KVCacheConfig(heads=2)  # type: ignore[call-arg]
    config.num_heads = 3  # type: ignore[misc]
    return config


class Exporter:
    """An array of another library."""

    def __dlpack__(self, *, stream: int | None = None, copy: bool | None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def writes(cache: LayerKvCache, rows: Float32Array) -> None:
    assert_type(cache.append(rows, rows), range)
    cache.initialize(3)
    cache.initialize(np.int32(3))
    cache.write_kv(0, rows, rows)
    cache.write_kv(np.uint8(0), rows[0], rows[0], timeout=1.5)
    cache.write_kv(token_idx=0, keys=rows, values=rows, timeout=None)
    cache.write_kv(0, rows, rows, timeout=float("inf"))
    cache.write_kv(0, rows, rows, timeout=np.float32(1))
    cache.truncate(1)
    cache.truncate(1, timeout=1)
    cache.reset()
    cache.reset(timeout=0.5)
    cache.prefault()

    cache.append(rows.data, array.array("f", [1.0]))
    cache.append((ctypes.c_float * 8)(), Exporter())
    with cache.view() as span:
        cache.append(span.keys, span.value_view)

    cache.append([1.0], [1.0])  # type: ignore[arg-type]
    cache.append(None, rows)  # type: ignore[arg-type]
    cache.append(rows)  # type: ignore[call-arg]
    cache.write_kv("0", rows, rows)  # type: ignore[arg-type]
    cache.write_kv(0.0, rows, rows)  # type: ignore[arg-type]
    cache.write_kv(0, rows, rows, 1.0)  # type: ignore[call-arg]
    cache.write_kv(0, rows, rows, timeout="1")  # type: ignore[arg-type]


def batches(cache: LayerKvCache, rows: Float32Array) -> None:
    def entries() -> Iterator[tuple[int, Float32Array, Float32Array]]:
        yield 0, rows, rows

    cache.write_kv_batch([(0, rows, rows), (1, rows, rows)])
    cache.write_kv_batch(entries(), timeout=1)
    cache.write_kv_batch([])
    cache.write_kv_batch([(np.int64(0), rows.data, Exporter())])
    cache.write_kv_batch([0, 1], rows, rows)
    cache.write_kv_batch((0, 1), keys=rows, values=rows, timeout=None)
    cache.write_kv_batch(range(2), rows, rows)
    cache.write_kv_batch(np.arange(2), rows, rows)
    cache.write_kv_batch(np.arange(2, dtype=np.uint8), rows, rows)
    cache.write_kv_batch(array.array("q", [0, 1]), rows, rows)

    cache.write_kv_batch([0, 1])  # type: ignore[list-item]
    cache.write_kv_batch([0, 1], rows)  # type: ignore[call-overload]
    cache.write_kv_batch(["0"], rows, rows)  # type: ignore[list-item]
    cache.write_kv_batch(rows, rows, rows)  # type: ignore[arg-type]


def reads(cache: LayerKvCache, room: Float32Array) -> None:
    assert_type(cache.read_kv(0), tuple[Array, Array])
    assert_type(cache.read_range(0, 3), tuple[Array, Array])
    cache.read_range_into(0, 3, room, memoryview(bytearray(4)).cast("f"))
    assert_type(cache.with_read_kv(0, lambda keys, values: float(keys[0, 0])), float)
    assert_type(cache.with_read_kv(0, both), list[Array])
    assert_type(cache.with_read_range(0, 3, lambda span: span.start), int)
    assert_type(cache.with_read_range(0, 3, len), int)
    assert_type(len(cache), int)
    assert_type(cache.is_empty(), bool)
    assert_type(cache.capacity, int)
    assert_type(cache.nbytes, int)
    assert_type(cache.config, KVCacheConfig)
    assert_type(copy.copy(cache), LayerKvCache)
    assert_type(copy.deepcopy(cache), LayerKvCache)

    cache.with_read_kv(0, lambda keys: keys)  # type: ignore[misc, arg-type]
    cache.with_read_range(0, 3, lambda span: span.start())  # type: ignore[operator]
    cache.nbytes = 0  # type: ignore[misc]


def both(keys: Array, values: Array) -> list[Array]:
    return [keys, values]


def views(cache: LayerKvCache) -> Array:
    span = cache.view()
    assert_type(span, KVSpan)
    assert_type(cache.view(1, end=None), KVSpan)
    assert_type(span.keys, Array)
    assert_type(span.values, Array)
    assert_type(span.key_scales, Float32Array | None)
    assert_type(span.dtype, str)
    assert_type(span.key_view, TensorView)
    assert_type(span.value_view, TensorView)
    assert_type((span.start, span.end, len(span)), tuple[int, int, int])
    assert_type((span.num_heads, span.head_dim), tuple[int, int])
    assert_type(span.released, bool)
    with span as same:
        assert_type(same, KVSpan)
    span.release()

    KVSpan(1)  # type: ignore[call-arg]
    span.keys = span.values  # type: ignore[misc]
    return span.keys


def exporters(exporter: TensorView) -> None:
    assert_type(memoryview(exporter), memoryview)
    assert_type(bytes(exporter), bytes)
    np.frombuffer(memoryview(exporter), np.float32)
    assert_type(np.asarray(exporter), npt.NDArray[Any])
    np.from_dlpack(exporter)
    exporter.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=True)
    assert_type(exporter.__dlpack_device__(), tuple[int, int])
    assert_type(exporter.shape, tuple[int, ...])
    assert_type(exporter.strides, tuple[int, ...])
    assert_type((exporter.dtype, exporter.nbytes), tuple[str, int])
    assert_type((exporter.readonly, len(exporter)), tuple[bool, int])


def reservations(cache: LayerKvCache) -> None:
    rows = cache.reserve(3)
    assert_type(rows, ReservedSpan)
    rows.keys[...] = 1.0
    assert_type(rows.values, Array)
    assert_type(rows.value_scales, Float32Array | None)
    assert_type(rows.key_view, TensorView)
    assert_type(rows.value_view, TensorView)
    assert_type((rows.start, rows.end, len(rows)), tuple[int, int, int])
    assert_type(rows.ended, bool)
    assert_type(rows.commit(), range)
    rows.discard()
    with cache.reserve(3) as rows:
        assert_type(rows, ReservedSpan)
    # The block does not swallow exceptions, so this is reached only by its end.
    assert_type(len(cache), int)


def failures(cache: LayerKvCache) -> int | None:
    try:
        cache.truncate(0, timeout=1)
    except errors.PinnedError as error:
        assert_type((error.start, error.end, error.pins), tuple[int, int, int])
    except errors.KvTimeoutError as error:
        assert_type((error.start, error.end, error.pins), tuple[int, int, int])
    except errors.OutOfRangeError as error:
        assert_type((error.start, error.end, error.len), tuple[int | None, int | None, int | None])
        return error.len
    except errors.CapacityExceededError as error:
        assert_type((error.start, error.end, error.capacity), tuple[int, int, int])
    except errors.OutOfMemoryError as error:
        assert_type(error.bytes, int)
    except errors.ReservedError as error:
        assert_type((error.start, error.end), tuple[int, int])
    except errors.ViewsAliveError as error:
        assert_type(error.views, int)
    except kvspan.KvCacheError as error:
        assert_type(str(error), str)
    return None


def closed_classes() -> None:
    class Derived(LayerKvCache):  # type: ignore[misc]
        pass


assert_type(kvspan.__version__, str)


def managers(rows: Float32Array) -> None:
    manager = KvCacheManager(
        np.int64(8), block_size=4, dtype=np.float32, storage=True, namespace=b"llama", epoch=1
    )
    assert_type(manager.num_blocks, int)
    assert_type(manager.has_storage, bool)
    assert_type(manager.namespace, bytes | None)
    assert_type(manager.epoch, int)
    assert_type(manager.advance_epoch(), int)
    assert_type(manager.probe(np.arange(3, dtype=np.uint32)), int)
    handle = manager.allocate([1, np.int64(2)], "chat", cache_salt="s", lookahead=3)
    assert_type(handle, PagedKvCacheHandle)
    manager.allocate(range(3), extra_keys={0: ["a"], 1: ["b"]})
    manager.allocate((1, 2), extra_keys=[(0, ["a"]), (1, (b"b",))])
    manager.allocate(array.array("i", [1]))
    manager.allocate(Exporter())
    assert_type(manager.extend(handle), BlockCopy | None)
    assert_type(manager.truncate(handle, 1), BlockCopy | None)
    assert_type(manager.prepare_write(handle, 0, 1), list[BlockCopy])
    assert_type(manager.fork(handle, request_id="fork"), PagedKvCacheHandle)
    manager.write(handle, 0, 0, rows, rows)
    manager.write_many(0, [handle], [0], rows, rows)
    manager.write_many(0, iter([handle]), np.array([0]), rows, rows)
    assert_type(manager.view(handle, 0, 0, None), PagedSpan)
    assert_type(manager.read_range(handle, 0), tuple[Array, Array])
    manager.read_range_into(handle, 0, 0, 1, rows, rows)
    manager.commit(handle, [1])
    assert_type(manager.stats(), ManagerStats)
    assert_type(manager.stats().hit_rate, float)
    assert_type(manager.inspect(), Inspection)
    assert_type(manager.inspect().blocks, list[BlockPicture])
    assert_type(manager.inspect().blocks[0].key, bytes | None)
    assert_type(manager.leak_report(), LeakReport)
    assert_type(manager.leak_report().sequences, list[SequenceReport])
    assert_type(manager.leak_report().pinned_blocks, list[tuple[int, int]])
    manager.free(handle)

    KvCacheManager()  # type: ignore[call-arg]
    KvCacheManager(8, 16)  # type: ignore[call-arg]
    manager.allocate("tokens")  # type: ignore[arg-type]
    manager.allocate([1.5])  # type: ignore[list-item]
    manager.allocate([1], cache_salt=b"salt")  # type: ignore[arg-type]
    manager.free("chat")  # type: ignore[arg-type]
    manager.num_blocks = 3  # type: ignore[misc]


def views_of_blocks(manager: KvCacheManager, handle: PagedKvCacheHandle) -> None:
    with manager.view(handle, 0) as span:
        assert_type(span, PagedSpan)
        for segment in span:
            assert_type(segment, KVSpan)
        assert_type(span.segments, list[KVSpan])
        assert_type(len(span), int)
    with handle as same:
        assert_type(same, PagedKvCacheHandle)


def handles(handle: PagedKvCacheHandle, caches: list[LayerKvCache]) -> None:
    def describe(handle: KvCacheHandle) -> str:
        assert_type(handle.num_tokens, int)
        assert_type(handle.kv_cache(0), tuple[Any, Any])
        return f"{handle.num_tokens} tokens in {handle.num_layers} layers"

    contiguous = ContiguousKvCacheHandle(caches)
    describe(handle)
    describe(contiguous)
    describe(caches[0])  # type: ignore[arg-type]
    assert_type(contiguous.append(0, [], []), range)  # type: ignore[arg-type]
    assert_type(contiguous.layer(0), LayerKvCache)
    assert_type(handle.key_cache(0), CacheTensor | None)
    assert_type(contiguous.kv_cache(0), tuple[CacheTensor | None, CacheTensor | None])
    assert_type(contiguous.clone_handle(), ContiguousKvCacheHandle)
    assert_type(handle.tokens, npt.NDArray[np.uint32])
    handle.block_table = BlockTable(4, [1], 2)
    handle.num_tokens = 3  # type: ignore[misc]
    KvCacheHandle()  # type: ignore[abstract]


def tables(table: BlockTable) -> None:
    assert_type(table.physical_blocks, list[int])
    assert_type(table.slot_mapping(0, 3), npt.NDArray[np.int64])
    assert_type(table.truncate(0), list[int])
    assert_type(BlockTable.blocks_needed_for_length(3, 2), int)
    table.block_size = 3  # type: ignore[misc]


def plots(manager: KvCacheManager, ax: Axes) -> None:
    assert_type(manager.plot(), Axes)
    assert_type(manager.plot(ax=ax), Axes)

    manager.plot("axes")  # type: ignore[arg-type]


def replays() -> replay.Summary:
    trace = replay.read_trace("trace.jsonl", block_size=16)
    assert_type(trace.requests, list[replay.Request])
    assert_type(replay.replay(trace, 10, block_size=32), Iterator[replay.Outcome])
    return replay.summarize(replay.replay(trace, 10))


def many(manager: KvCacheManager, ids: npt.NDArray[np.int64]) -> None:
    chain = manager.block_keys(ids, cache_salt="tenant")
    assert_type(chain, KeyChain)
    assert_type(chain.block_keys, list[bytes])
    assert_type(chain.extended([1, 2]).tokens, npt.NDArray[np.uint32])
    assert_type(manager.probe(chain), int)
    handles = manager.allocate_many([chain, ids, [1, 2]], ["a", None, "c"], lookahead=4)
    assert_type(handles, list[PagedKvCacheHandle])
    assert_type(manager.extend_many(handles), npt.NDArray[np.int64])
    manager.extend_many(handles, [1, 2, 3], copies=[])
    manager.commit_many(handles, ids)
    manager.commit_many(handles, [[1], [2, 3], []])
    manager.commit_many(handles, (ids, array.array("i", [2]), ids))
    assert_type(manager.block_tables(handles), npt.NDArray[np.int32])
    assert_type(manager.slot_mappings(handles, 0, [1, 2, 3]), npt.NDArray[np.int64])
    assert_type(manager.num_cached_tokens(handles), npt.NDArray[np.int64])
    manager.free_many(handles)
    manager.extend_many(handles[0])  # type: ignore[arg-type]
    manager.commit_many(handles, None)  # type: ignore[arg-type]


def attended(
    query: Float32Array,
    cache: LayerKvCache,
    manager: KvCacheManager,
    mine: KvCacheHandle,
    buffer: array.array[float],
) -> None:
    pool = AttentionPool(2)
    assert_type(pool.instructions, Literal["avx512", "avx2", "portable"])
    handles = manager.allocate_many([[1], [2, 3]])
    assert_type(kvspan.attention(query, cache), Float32Array)
    assert_type(kvspan.attention(query, handles, 0, pool=pool), Float32Array)
    assert_type(kvspan.attention(query, tuple(handles), 0, window=8, softcap=30), Float32Array)
    assert_type(kvspan.attention(query, [cache, cache], query_lens=[1, 2]), Float32Array)
    assert_type(kvspan.attention(query, [handles[0], mine], 0), Float32Array)
    assert_type(kvspan.attention(query, cache.view(), out=None), Float32Array)
    assert_type(kvspan.attention(query, handles, 0, out=query), Float32Array)
    assert_type(kvspan.attention(query, cache, out=buffer), array.array[float])

    kvspan.attention(query, [1])  # type: ignore[list-item]
    kvspan.attention(query, cache, out=1)  # type: ignore[call-overload]
