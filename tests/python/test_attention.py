"""Attention in place, against a softmax in float64 that has every score in front of it."""

import collections.abc
import gc
import threading
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspan
from kvspan.errors import (
    InvalidConfigError,
    InvalidInputError,
    LayerOutOfRangeError,
    NoStorageError,
    OutOfRangeError,
    PinnedError,
    ReleasedError,
    StaleHandleError,
)
from softmax import softmax_attention
from support import isolated, run_python

KV_HEADS, DIM = 2, 8
DTYPES = ["float32", "float16", "bfloat16", "int8"]


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def new_cache(num_tokens, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    cache = kvspan.LayerKvCache(
        kvspan.KVCacheConfig(256, num_heads=KV_HEADS, hidden_dim_per_head=DIM, dtype=dtype)
    )
    if num_tokens:
        cache.append(
            numbers(rng, num_tokens, KV_HEADS, DIM), numbers(rng, num_tokens, KV_HEADS, DIM)
        )
    return cache


def new_manager(block_size=4, num_layers=2, **options):
    return kvspan.KvCacheManager(
        64,
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        **options,
    )


def start(manager, num_tokens, seed=0):
    """A sequence with rows in every layer."""
    rng = np.random.default_rng(seed)
    handle = manager.allocate(np.arange(seed * 1000, seed * 1000 + num_tokens))
    for layer in range(manager.num_layers):
        manager.write(handle, layer, 0, *(numbers(rng, num_tokens, KV_HEADS, DIM) for _ in "kv"))
    return handle


def new_query(*shape, seed=99):
    return numbers(np.random.default_rng(seed), *shape)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 70),
    num_queries=st.integers(1, 6),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(1, 50),
    scale=st.none() | st.floats(0.0625, 2),
)
def test_it_is_the_softmax_of_all_tokens_that_a_query_sees(
    num_tokens, num_queries, group, block_size, causal, window, softcap, scale
):
    num_queries = min(num_queries, num_tokens)
    options = {"causal": causal, "softcap": softcap, "scale": scale}
    options["window"] = window if causal else None
    manager = new_manager(max(block_size, 2))
    handle = start(manager, num_tokens)
    query = new_query(num_queries, group * KV_HEADS, DIM)
    result = kvspan.attention(query, handle, 1, **options)
    expected = softmax_attention(query, *manager.read_range(handle, 1), **options)
    assert (result.shape, result.dtype) == (query.shape, np.float32)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 129])
def test_elements_of_every_type_count_for_what_they_stand_for(dtype, num_tokens):
    cache = new_cache(num_tokens, dtype=dtype)
    query = new_query(1, 6, DIM)
    keys, values = (np.empty((num_tokens, KV_HEADS, DIM), np.float32) for _ in "kv")
    cache.read_range_into(0, num_tokens, keys, values)
    expected = softmax_attention(query, keys, values)
    np.testing.assert_allclose(kvspan.attention(query, cache), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_wherever_the_tokens_lie(dtype):
    """Bit for bit: in one piece, in blocks of any size, and through every kind of object."""
    num_tokens, query = 67, new_query(3, 4, DIM)
    cache = new_cache(num_tokens, dtype=dtype)
    rng = np.random.default_rng(0)
    rows = [numbers(rng, num_tokens, KV_HEADS, DIM) for _ in "kv"]
    expected = kvspan.attention(query, cache)
    for block_size in (2, 3, 16, 128):
        manager = new_manager(block_size, num_layers=1, dtype=dtype)
        handle = manager.allocate(range(num_tokens))
        manager.write(handle, 0, 0, *rows)
        np.testing.assert_array_equal(kvspan.attention(query, handle, 0), expected)
        with manager.view(handle, 0) as span:
            np.testing.assert_array_equal(kvspan.attention(query, span), expected)
    contiguous = kvspan.ContiguousKvCacheHandle([cache])
    np.testing.assert_array_equal(kvspan.attention(query, contiguous, 0), expected)
    np.testing.assert_array_equal(kvspan.attention(query, cache.view()), expected)


def test_a_span_is_attended_to_as_far_as_it_goes():
    cache, query = new_cache(40), new_query(1, 4, DIM)
    span = cache.view(7, 30)
    expected = softmax_attention(query, span.keys, span.values)
    np.testing.assert_allclose(kvspan.attention(query, span), expected, rtol=2e-5, atol=2e-5)


def test_a_block_of_a_view_can_be_attended_to_alone():
    manager = new_manager()
    segment = list(manager.view(start(manager, 10), 0))[1]
    query = new_query(1, 4, DIM)
    expected = softmax_attention(query, segment.keys, segment.values)
    np.testing.assert_allclose(kvspan.attention(query, segment), expected, rtol=2e-5, atol=2e-5)


def test_many_sequences_of_different_lengths_go_in_one_call():
    manager = new_manager()
    handles = [start(manager, n, seed=n) for n in (1, 5, 16, 33)]
    query = new_query(4, 4, DIM)
    together = kvspan.attention(query, handles, 0)
    for row, handle in enumerate(handles):
        alone = kvspan.attention(query[row : row + 1], handle, 0)
        np.testing.assert_array_equal(together[row : row + 1], alone)


def test_many_sequences_may_have_queries_of_different_lengths():
    manager = new_manager()
    handles, lens = [start(manager, n, seed=n) for n in (9, 20, 4)], [3, 1, 4]
    query = new_query(sum(lens), 4, DIM)
    together = kvspan.attention(query, tuple(handles), 1, query_lens=np.array(lens))
    ends = np.cumsum(lens)
    for end, length, handle in zip(ends, lens, handles):
        part = slice(end - length, end)
        np.testing.assert_array_equal(together[part], kvspan.attention(query[part], handle, 1))


def test_chunks_of_a_prompt_give_what_the_whole_gives():
    cache, whole = new_cache(48), new_query(48, 4, DIM)
    expected = kvspan.attention(whole, cache)
    ends = (12, 24, 36, 48)
    for parts in (
        [kvspan.attention(whole[end - 12 : end], cache.view(0, end)) for end in ends],
        [kvspan.attention(whole[end - 12 : end], cache, kv_lens=end) for end in ends],
    ):
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=2e-5, atol=2e-5)


def test_a_prompt_is_written_and_attended_to_in_chunks():
    manager, rng = new_manager(), np.random.default_rng(3)
    keys, values = (numbers(rng, 21, KV_HEADS, DIM) for _ in "kv")
    query = new_query(21, 4, DIM)
    expected = softmax_attention(query, keys, values)
    handle = manager.allocate(range(21))
    for start_ in range(0, 21, 8):
        chunk = slice(start_, min(start_ + 8, 21))
        manager.write(handle, 0, start_, keys[chunk], values[chunk])
        result = kvspan.attention(query[chunk], handle, 0, kv_lens=chunk.stop)
        np.testing.assert_allclose(result, expected[chunk], rtol=2e-5, atol=2e-5)


def test_each_of_many_sequences_has_as_many_tokens_as_is_said():
    manager = new_manager()
    handles, lens = [start(manager, n, seed=n) for n in (9, 20, 4)], [3, 17, 4]
    query = new_query(3, 4, DIM)
    together = kvspan.attention(query, handles, 0, kv_lens=np.array(lens))
    for row, (handle, length) in enumerate(zip(handles, lens)):
        alone = kvspan.attention(query[row], manager.view(handle, 0, 0, length))
        np.testing.assert_array_equal(together[row], alone)
    all_three = kvspan.attention(query, handles, 0, kv_lens=4)
    np.testing.assert_array_equal(all_three[2], together[2])


def test_a_sequence_has_no_more_tokens_than_it_has():
    manager, query, out = new_manager(), new_query(2, 4, DIM), np.full((2, 4, DIM), 7, np.float32)
    handles = [start(manager, 5), start(manager, 6, seed=1)]
    with pytest.raises(OutOfRangeError, match=r"0\.\.6.* 5") as raised:
        kvspan.attention(query, handles, 0, kv_lens=6, out=out)
    assert raised.value.__notes__ == ["in entry 0 of the batch"]
    with pytest.raises(OutOfRangeError, match="-1"):
        kvspan.attention(query, handles, 0, kv_lens=[5, -1], out=out)
    with pytest.raises(InvalidInputError, match="got 3 kv_lens, but there are 2"):
        kvspan.attention(query, handles, 0, kv_lens=[5, 5, 5], out=out)
    with pytest.raises(InvalidInputError, match="got 2 kv_lens, but there are 1"):
        kvspan.attention(query, handles[0], 0, kv_lens=[5, 5], out=out)
    with pytest.raises(InvalidInputError, match="only 1"):
        kvspan.attention(query, handles[0], 0, kv_lens=1, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_more_threads_give_the_same(num_threads):
    pool = kvspan.AttentionPool(num_threads)
    assert pool.num_threads == num_threads
    manager = new_manager()
    handles, query = [start(manager, n, seed=n) for n in (50, 3, 17)], new_query(3, 4, DIM)
    expected = np.concatenate(
        [
            softmax_attention(query[row : row + 1], *manager.read_range(handle, 0))
            for row, handle in enumerate(handles)
        ]
    )
    result = kvspan.attention(query, handles, 0, pool=pool)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(result, kvspan.attention(query, handles, 0))


def test_a_pool_can_be_used_by_many_threads_at_once():
    pool, cache = kvspan.AttentionPool(2), new_cache(100)
    query = new_query(100, 4, DIM)  # so many that the threads have something to do
    expected = kvspan.attention(query, cache)
    results, gate = [None] * 4, threading.Barrier(4)

    def work(index):
        gate.wait()
        results[index] = kvspan.attention(query, cache, pool=pool)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_the_result_goes_where_it_is_wanted():
    cache, query = new_cache(20), new_query(2, 4, DIM)
    out = np.full(query.shape, np.nan, np.float32)
    assert kvspan.attention(query, cache, out=out) is out
    np.testing.assert_array_equal(out, kvspan.attention(query, cache))


def test_the_query_may_be_where_the_result_goes():
    cache, query = new_cache(20), new_query(2, 4, DIM)
    expected = kvspan.attention(query, cache)
    kvspan.attention(query, cache, out=query)
    np.testing.assert_array_equal(query, expected)


def test_one_token_needs_no_axis():
    cache, query = new_cache(20), new_query(4, DIM)
    result = kvspan.attention(query, cache)
    assert result.shape == (4, DIM)
    np.testing.assert_array_equal(result, kvspan.attention(query[None], cache)[0])


def test_queries_come_from_other_buffers_as_well():
    cache, query = new_cache(20), new_query(1, 4, DIM)
    expected = kvspan.attention(query, cache)
    np.testing.assert_array_equal(kvspan.attention(memoryview(query), cache), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_no_query_sees_do_not_matter(poison):
    cache, query = new_cache(40), new_query(1, 4, DIM)
    expected = kvspan.attention(query, cache.view(0, 32))
    bad = np.full((8, KV_HEADS, DIM), poison, np.float32)
    for token, row in enumerate(bad, start=32):
        cache.write_kv(token, row, row)
    cache.truncate(32)
    np.testing.assert_array_equal(kvspan.attention(query, cache), expected)
    cache = new_cache(40)
    expected = kvspan.attention(query, cache.view(35, 40))
    for token in range(35):
        cache.write_kv(token, bad[0], bad[0])
    np.testing.assert_array_equal(kvspan.attention(query, cache, window=5), expected)


def test_a_fork_is_attended_to_as_it_is():
    manager = new_manager()
    one = start(manager, 10)
    other = manager.fork(one)
    manager.write(other, 0, 9, *(numbers(np.random.default_rng(5), KV_HEADS, DIM) for _ in "kv"))
    query = new_query(1, 4, DIM)
    for handle in (one, other):
        expected = softmax_attention(query, *manager.read_range(handle, 0))
        result = kvspan.attention(query, handle, 0)
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


class OwnHandle(kvspan.KvCacheHandle):
    """A handle over one array, or whatever the test says that it is."""

    block_table = device = num_layers = num_heads = head_dim = is_valid = cache_id = None
    clone_handle = stats = None

    def __init__(self, keys, values):
        table = kvspan.BlockTable(64, physical_blocks=[1], sequence_length=len(keys))
        type(self).block_table, type(self).num_layers = table, 1
        type(self).num_heads, type(self).head_dim = KV_HEADS, DIM
        self.planes = keys, values

    def key_cache(self, layer):
        return self.planes[0]

    def value_cache(self, layer):
        return self.planes[1]


def test_handles_of_others_are_attended_to_through_their_tensors():
    cache, query = new_cache(20), new_query(1, 4, DIM)
    expected = kvspan.attention(query, cache)
    arrays = OwnHandle(*cache.read_range(0, 20))
    np.testing.assert_array_equal(kvspan.attention(query, arrays, 0), expected)
    manager = new_manager()
    handle = start(manager, 20)
    tensors = OwnHandle(np.zeros((20, KV_HEADS, DIM), np.float32), None)
    tensors.planes = handle.kv_cache(0)
    np.testing.assert_array_equal(
        kvspan.attention(query, tensors, 0), kvspan.attention(query, handle, 0)
    )


def test_handles_of_others_that_contradict_themselves_are_refused():
    query, rows = new_query(1, 4, DIM), np.zeros((20, KV_HEADS, DIM), np.float32)
    for keys, values, error in [
        (rows, rows[:19], InvalidInputError),
        (rows, rows.astype(np.float64), InvalidInputError),
        (rows, rows.repeat(2, axis=2)[..., ::2], InvalidInputError),
        (rows, None, NoStorageError),
        (rows, "values", TypeError),
    ]:
        with pytest.raises(error):
            kvspan.attention(query, OwnHandle(keys, values), 0)


def test_what_others_return_as_keys_and_values_is_looked_at():
    query, rows = new_query(1, 4, DIM), np.zeros((20, KV_HEADS, DIM), np.float32)
    handle = OwnHandle(rows, rows)
    for pair, error, says in [
        ((rows, rows[:19]), InvalidInputError, r"tokens of the values: 19 .* must be 20"),
        ((rows, rows.astype(np.float64)), InvalidInputError, "values have dtype float64"),
        ((rows, rows[0]), InvalidInputError, r"values have shape \(2, 8\), but \(tokens"),
        ((rows, "values"), TypeError, r"values must be a CacheTensor or .*, not str"),
        (None, TypeError, r"kv_cache of a .*OwnHandle must return a tuple of keys and values"),
        ([rows, rows], TypeError, "must return a tuple"),
        ((rows, rows, rows), TypeError, "must return a tuple"),
    ]:
        handle.kv_cache = lambda layer, pair=pair: pair
        with pytest.raises(error, match=says):
            kvspan.attention(query, handle, 0)


@pytest.mark.parametrize(
    ("query", "options", "says"),
    [
        (new_query(1, 3, DIM), {}, "3 query heads are no multiple of 2 KV heads"),
        (new_query(1, 4, DIM + 1), {}, "head_dim of the query: 9 were given.* must be 8"),
        (new_query(21, 4, DIM), {}, "the query has 21 tokens, but only 20 are stored"),
        (new_query(DIM), {}, "query has shape"),
        (new_query(1, 1, 4, DIM), {}, "query has shape"),
        (
            new_query(1, 4, DIM).astype(np.float64),
            {},
            "elements of query have dtype float64, but float32",
        ),
        (new_query(2, 4, DIM)[::-1], {}, "not C-contiguous"),
        (new_query(1, 4, DIM), {"window": 0}, "window must be at least 1"),
        (new_query(1, 4, DIM), {"softcap": 0.0}, "softcap must be finite and above 0"),
        (new_query(1, 4, DIM), {"scale": float("nan")}, "scale must be finite"),
        (new_query(1, 4, DIM), {"window": 3, "causal": False}, "window must be left out"),
        (
            new_query(1, 4, DIM),
            {"out": np.zeros((1, 4, DIM))},
            "elements of out have dtype float64",
        ),
        (new_query(1, 4, DIM), {"out": np.zeros((2, 4, DIM), np.float32)}, "out has 64 elements"),
    ],
)
def test_what_does_not_fit_is_refused(query, options, says):
    with pytest.raises(InvalidInputError, match=says):
        kvspan.attention(query, new_cache(20), **options)


def test_a_failed_call_writes_nothing():
    out = np.full((21, 4, DIM), 7, np.float32)
    with pytest.raises(InvalidInputError):
        kvspan.attention(new_query(21, 4, DIM), new_cache(20), out=out)
    assert (out == 7).all()


# There is room for a copy of the query and for the result, and for little else.
NO_MEMORY = """
import resource, numpy as np, kvspan
cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(4, num_heads=1, hidden_dim_per_head=1))
cache.append(np.ones((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32))
query = np.ones((256, 4096, 1), np.float32)  # 4 MiB
out = np.full_like(query, 7)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2 * query.nbytes + 2**18, resource.RLIM_INFINITY))
try:
    kvspan.attention(query, cache, causal=False, out=out)
except MemoryError as error:
    print(type(error).__name__, str(query.nbytes) in str(error))
assert (out == 7).all()
cache.truncate(0)
"""


def test_sums_without_memory_are_refused():
    pytest.importorskip("resource", reason="this system has no resource limits")
    assert run_python(NO_MEMORY) == "OutOfMemoryError False\n"


def test_an_empty_cache_is_an_error():
    query = new_query(1, 4, DIM)
    with pytest.raises(InvalidInputError, match="the sequence has no tokens"):
        kvspan.attention(query, new_cache(0), causal=False)
    with pytest.raises(InvalidInputError, match="the sequence has no tokens"):
        kvspan.attention(query, new_cache(5), kv_lens=0)
    with pytest.raises(InvalidInputError):
        kvspan.attention(query, new_manager().allocate([]), 0)


def test_a_layer_is_for_handles_and_only_for_them():
    query, manager = new_query(1, 4, DIM), new_manager()
    handle = start(manager, 5)
    with pytest.raises(TypeError, match="which layer"):
        kvspan.attention(query, handle)
    with pytest.raises(LayerOutOfRangeError):
        kvspan.attention(query, handle, 2)
    for cache in (new_cache(5), new_cache(5).view(), manager.view(handle, 0)):
        with pytest.raises(TypeError, match="one layer already"):
            kvspan.attention(query, cache, 0)


def test_lengths_of_queries_must_add_up():
    manager = new_manager()
    handles = [start(manager, 5), start(manager, 6, seed=1)]
    for lens in ([1], [1, 3], [2, 2], [1, 1, 1], [2**63, 2**63]):
        with pytest.raises(InvalidInputError, match="must add up"):
            kvspan.attention(new_query(3, 4, DIM), handles, 0, query_lens=lens)
    with pytest.raises(InvalidInputError, match="must add up"):
        kvspan.attention(new_query(3, 4, DIM), handles, 0)
    with pytest.raises(TypeError, match="query_lens is for a list"):
        kvspan.attention(new_query(1, 4, DIM), handles[0], 0, query_lens=[1])


def test_an_error_says_which_sequence_it_is_about():
    manager = new_manager()
    handles = [start(manager, 5), start(manager, 6, seed=1)]
    manager.free(handles[1])
    with pytest.raises(StaleHandleError) as raised:
        kvspan.attention(new_query(2, 4, DIM), handles, 0)
    assert raised.value.__notes__ == ["in entry 1 of the batch"]
    with pytest.raises(InvalidInputError, match=r"entry 1 of the batch.* 2 tokens"):
        kvspan.attention(new_query(4, 4, DIM), [new_cache(5), new_cache(1)], query_lens=[2, 2])


@pytest.mark.parametrize("cache", [None, 7, "cache", np.zeros((5, KV_HEADS, DIM), np.float32)])
def test_other_objects_can_not_be_attended_to(cache):
    with pytest.raises(TypeError, match="is wanted, not"):
        kvspan.attention(new_query(1, 4, DIM), cache)


def test_what_is_over_can_not_be_attended_to():
    query, span = new_query(1, 4, DIM), new_cache(5).view()
    span.release()
    with pytest.raises(ReleasedError):
        kvspan.attention(query, span)
    handle = new_manager(storage=False).allocate([1, 2, 3])
    with pytest.raises(NoStorageError):
        kvspan.attention(query, handle, 0)


@pytest.mark.parametrize("query", [[[1.0] * DIM] * 4, None, 3.0])
def test_a_query_is_an_array(query):
    with pytest.raises(TypeError, match="query must be a float32 array"):
        kvspan.attention(query, new_cache(5))


@pytest.mark.parametrize("length", [2**60, 2**44])
def test_a_shape_can_lie_about_its_length(length):
    class Shape(collections.abc.Sequence):
        def __len__(self):
            return length

        def __getitem__(self, axis):
            return 1

    query = types.SimpleNamespace(shape=Shape())
    with pytest.raises(InvalidInputError, match="query has shape"):
        kvspan.attention(query, new_cache(5))


def test_nothing_stays_pinned():
    cache, query, manager = new_cache(20), new_query(1, 4, DIM), new_manager()
    handle = start(manager, 20)
    kvspan.attention(query, cache)
    kvspan.attention(query, handle, 0)
    with pytest.raises(InvalidInputError):
        kvspan.attention(new_query(1, 3, DIM), handle, 0)
    cache.reset()
    handle.close()
    stats = manager.stats()
    assert (stats.num_in_use, stats.num_pinned) == (0, 0)


def test_a_view_that_is_attended_to_is_the_callers():
    cache, query = new_cache(20), new_query(1, 4, DIM)
    span = cache.view()
    kvspan.attention(query, span)
    with pytest.raises(PinnedError):
        cache.truncate(3)
    span.release()
    cache.truncate(3)


@pytest.mark.parametrize("num_threads", [0, -1, 2**70])
def test_a_pool_has_at_least_one_thread(num_threads):
    with pytest.raises(InvalidConfigError, match="num_threads must be"):
        kvspan.AttentionPool(num_threads)


def test_a_pool_says_what_it_computes_with():
    pool = kvspan.AttentionPool(2)
    assert pool.instructions in ("avx512", "avx2", "portable")
    assert repr(pool) == f"AttentionPool(2, instructions='{pool.instructions}')"


@isolated  # from pools whose threads are still ending
def test_the_threads_of_a_pool_end_with_it():
    before = threads_of_this_process()
    pool = kvspan.AttentionPool(3)
    kvspan.attention(new_query(100, 4, DIM), new_cache(100), pool=pool)
    assert threads_of_this_process() == before + 2
    del pool
    gc.collect()
    ended = threading.Event()
    for _ in range(1000):
        if threads_of_this_process() == before:
            ended.set()
            break
        ended.wait(0.01)
    assert ended.is_set()


def threads_of_this_process():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
