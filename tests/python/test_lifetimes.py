"""Nothing is kept that should be gone, and nothing goes that is still in use."""

import contextlib
import copy
import gc
import sys
import weakref

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from support import address, isolated, new_cache, new_filled_cache, run_python, token, tokens

CYCLES = 200_000


def resident_kib():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    raise OSError("no VmRSS")


def write_and_read(cache, keys, values, room):
    """Everything that makes objects, once."""
    cache.write_kv(0, keys, values)
    cache.write_kv_batch([(1, keys, values)])
    cache.append(keys, values)
    with cache.view() as span:
        span.keys, span.values, span.key_view
    cache.view(0, 1).release()
    cache.with_read_kv(0, lambda keys, values: keys)
    cache.with_read_range(0, 1, lambda span: span.values)
    np.from_dlpack(cache.view().key_view)
    np.asarray(cache.view().value_view)
    memoryview(cache.view().key_view)
    cache.view().key_view.__dlpack__(max_version=(1, 0))
    cache.read_range_into(0, 1, room, room)
    cache.read_kv(0)
    with cache.reserve(1) as rows:
        rows.keys[...] = 1
    cache.truncate(6)


def fail(cache, keys, _, room):
    """Everything that raises, once."""
    held = cache.view()
    for call, arguments in [
        (cache.write_kv, (0, keys, keys)),
        (cache.write_kv, (-1, keys, keys)),
        (cache.write_kv, (99, keys, keys)),
        (cache.append, (keys, keys.astype(float))),
        (cache.append, (keys, None)),
        (cache.write_kv_batch, ([(0, keys, keys), (1, keys, None)],)),
        (cache.write_kv_batch, ([0, 99], *tokens(2))),
        (cache.view, (0, 99)),
        (cache.read_range_into, (0, 6, keys, room)),
        (cache.with_read_kv, (0, lambda keys, values: keys[99])),
        (held.key_view.__dlpack__, ()),
        (memoryview(held.key_view).cast, ("B", (1,))),
    ]:
        with contextlib.suppress(Exception):
            call(*arguments)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("work", "share"), [("view", 1), ("write_and_read", 8), ("fail", 16)])
@isolated
def test_memory_does_not_grow(work, share):
    cache, room = new_filled_cache(), np.zeros(8, np.float32)
    keys, values = token()

    def view(cache, *_):
        span = cache.view()
        span.keys, span.values
        del span

    once = {"view": view, "write_and_read": write_and_read, "fail": fail}[work]
    for _ in range(CYCLES // share // 10):
        once(cache, keys, values, room)
    gc.collect()
    before = resident_kib()
    for _ in range(CYCLES // share):
        once(cache, keys, values, room)
    gc.collect()
    # A leak of the smallest object in each cycle would be far more.
    assert resident_kib() - before < CYCLES // share * 16 // 1024
    cache.reset()


@isolated
def test_number_of_objects_does_not_grow():
    cache, room = new_filled_cache(), np.zeros(8, np.float32)
    keys, values = token()
    for once in [write_and_read, fail]:
        # A leak grows in every round, what Python keeps for itself in the first few.
        assert min(growth(once, cache, keys, values, room) for _ in range(8)) < 50


def growth(once, *arguments):
    """Objects and blocks of memory that 500 calls leave behind."""
    gc.collect()
    before = len(gc.get_objects()) + sys.getallocatedblocks()
    for _ in range(500):
        once(*arguments)
    gc.collect()
    return len(gc.get_objects()) + sys.getallocatedblocks() - before


@pytest.mark.parametrize("work", [write_and_read, fail])
def test_inputs_are_not_kept(work, filled):
    keys, values = token()
    room = np.zeros(8, np.float32)
    objects = [filled, keys, values, room, keys.dtype, type(keys)]
    work(filled, keys, values, room)
    # What other tests left behind refers to the dtype as well.
    gc.collect()
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(100):
        work(filled, keys, values, room)
    gc.collect()
    assert [sys.getrefcount(one) for one in objects] == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: memoryview(bytearray(32)).cast("f"),
        lambda: np.ones((2, 4), np.float32)[:, ::-1],
        lambda: np.ones((2, 4)),
        lambda: np.ones((1, 4), np.float32),
    ],
)
def test_refused_and_accepted_memory_is_given_back(make, filled):
    given = make()
    before = sys.getrefcount(given)
    for call in [
        lambda: filled.append(given, given),
        lambda: filled.write_kv(0, given, given),
        lambda: filled.write_kv_batch([(0, given, given)]),
        lambda: filled.read_range_into(0, 1, given, given),
    ]:
        with contextlib.suppress(ValueError):
            call()
    gc.collect()
    assert sys.getrefcount(given) == before
    if isinstance(given, memoryview):
        given.release()


def test_exception_does_not_keep_the_arguments(filled):
    class Keys(np.ndarray):
        pass

    keys = np.ones((3, 3), np.float32).view(Keys)
    gone = weakref.ref(keys)
    try:
        filled.append(keys, keys)
    except ValueError as error:
        kept = error.with_traceback(None)
    del keys
    gc.collect()
    assert gone() is None
    assert "(3, 3)" in str(kept)


def test_result_of_a_callback_is_the_caller_s_alone(filled):
    class Result:
        pass

    gone = weakref.ref(filled.with_read_kv(0, lambda *_: Result()))
    assert gone() is None


def test_callback_is_not_kept(filled):
    def f(*_):
        return None

    before = sys.getrefcount(f)
    filled.with_read_kv(0, f)
    filled.with_read_range(0, 1, f)
    assert sys.getrefcount(f) == before


def test_cache_ends_at_once():
    cache = new_cache()
    shared, gone = copy.copy(cache), weakref.ref(cache)
    del cache
    assert gone() is None
    shared.append(*token())
    assert len(shared) == 1


def test_memory_is_given_back_when_the_last_array_is_gone():
    def large_cache():
        cache = new_cache(1024, 16, 1024)
        cache.prefault()
        cache.initialize(1024)
        return cache

    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    cache = large_cache()
    size = cache.nbytes // 1024
    array = cache.view().keys
    with_cache = resident_kib()
    del cache
    gc.collect()
    assert resident_kib() > with_cache - size // 4
    assert not array.any()
    del array
    gc.collect()
    assert resident_kib() < with_cache - size * 3 // 4


def test_arrays_of_many_caches_keep_their_own_tokens():
    arrays = []
    for number in range(100):
        cache = new_cache()
        cache.append(*tokens(3, first=number))
        arrays.append((number, cache.view().keys, cache.read_range(0, 3)[1]))
    gc.collect()
    for number, keys, values in arrays:
        assert_array_equal((keys, values), tokens(3, first=number))
    assert len({address(keys) for _, keys, _ in arrays}) == 100


EXIT = """
import threading
import numpy as np
import kvspan

config = kvspan.KVCacheConfig(max_tokens_per_seq=4, num_heads=1, hidden_dim_per_head=2)
cache = kvspan.LayerKvCache(config)
cache.initialize(4)
manager = kvspan.KvCacheManager(512, block_size=1)
tensor = manager.allocate(range(512)).key_cache(0)

rows = np.ones((1, 4, 64), np.float32)

def busy(*_):
    return sum(range(1000))

class Exporter:
    # Speaks DLPack alone, in Python, as the tensors of some libraries do.
    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        busy()
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        busy()
        return self.array.__dlpack_device__()

class OwnHandle(kvspan.KvCacheHandle):
    block_table = device = num_layers = num_heads = head_dim = is_valid = cache_id = None
    key_cache = value_cache = clone_handle = stats = None

    def kv_cache(self, layer):
        busy()
        return rows, rows

def work():
    begun.release()
    while True:
        {call}

begun = threading.Semaphore(0)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for _ in range(4):
    begun.acquire()
threading.Event().wait(0.2)
"""


@pytest.mark.parametrize(
    "call",
    [
        "cache.with_read_kv(0, busy)",
        "cache.with_read_range(0, 4, busy)",
        "tensor.numpy()",
        "np.asarray(tensor, np.float64)",
        "np.asarray(cache.view().key_view, np.float64)",
        "kvspan.attention(rows, OwnHandle(), 0)",
        "kvspan.attention(Exporter(rows), OwnHandle(), 0)",
        "kvspan.BlockTable(16, Exporter(np.array([1, 2])))",
    ],
)
def test_daemon_threads_do_not_crash_the_end_of_the_interpreter(call):
    for _ in range(3):
        run_python(EXIT.format(call=call))
