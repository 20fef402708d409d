"""`copy.copy` shares a cache, `copy.deepcopy` copies it, and what can not be copied says so."""

import copy
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvspan.errors import OutOfMemoryError, PinnedError, ReservedError
from support import assert_holds, new_cache, new_filled_cache, refused, run_python, token, tokens


def test_copy_shares_the_tokens(filled):
    shared = copy.copy(filled)
    assert shared is not filled
    assert shared.config == filled.config
    shared.append(*token(7))
    filled.write_kv(0, *token(9))
    for cache in [filled, shared]:
        assert len(cache) == 7
        assert_array_equal(cache.read_kv(0), token(9))
        assert_array_equal(cache.read_kv(6), token(7))


def test_copy_shares_the_buffer_even_if_there_is_none_yet(cache):
    shared = copy.copy(cache)
    shared.append(*tokens(2))
    assert_holds(cache, *tokens(2))
    assert cache.nbytes == shared.nbytes > 0


def test_copy_shares_pins_and_reservations(filled):
    shared = copy.copy(filled)
    span, rows = filled.view(), filled.reserve(1)
    refused(shared, PinnedError, shared.write_kv, 0, *token())
    refused(shared, ReservedError, shared.append, *token())
    del span
    rows.commit()
    shared.reset()


def test_deepcopy_is_a_cache_of_its_own(filled):
    own = copy.deepcopy(filled)
    assert own.config == filled.config
    assert_holds(own, *tokens(6))
    filled.write_kv(0, *token(9))
    own.append(*token(7))
    own.truncate(5)
    assert_array_equal(filled.read_kv(0), token(9))
    assert len(filled) == 6
    assert_holds(own, *tokens(5))


def test_deepcopy_is_not_pinned_or_reserved(filled):
    span, rows = filled.view(), filled.reserve(2)
    rows.keys[...] = 5
    own = copy.deepcopy(filled)
    assert_holds(own, *tokens(6))
    own.append(*token(7))
    own.reset()
    assert_array_equal(span.keys, tokens(6)[0])


@pytest.mark.parametrize("prepare", [new_cache, lambda: used_and_reset()])
def test_deepcopy_of_an_empty_cache_is_empty(prepare):
    cache = prepare()
    own = copy.deepcopy(cache)
    assert (len(own), own.is_empty()) == (0, True)
    assert bool(own.nbytes) == bool(cache.nbytes)
    own.append(*tokens(16))
    assert len(cache) == 0


def used_and_reset():
    cache = new_filled_cache()
    cache.reset()
    return cache


def test_deepcopy_does_not_bring_back_what_was_truncated(filled):
    filled.truncate(2)
    own = copy.deepcopy(filled)
    own.initialize(6)
    assert_array_equal(own.read_range(0, 2), tokens(2))
    assert not np.any(own.read_range(2, 6))


def test_deepcopy_keeps_what_is_shared(filled):
    layers = [filled, copy.copy(filled), filled]
    one, other, again = copy.deepcopy(layers)
    assert one is again
    assert one is not other
    one.append(*token(7))
    assert (len(other), len(filled)) == (6, 6)


# The memory of a second buffer is not there; what the first one has stays.
NO_MEMORY = """
import copy, resource, numpy as np, kvspan
cache = kvspan.LayerKvCache(kvspan.KVCacheConfig(2**20, 2, 32))  # 512 MiB
cache.append(np.ones((8, 2, 32), np.float32), np.ones((8, 2, 32), np.float32))
cache.initialize(2**20)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
try:
    {call}
except MemoryError as error:
    print(type(error).__name__)
assert len(cache) == 2**20 and cache.view(0, 8).keys.all()
cache.truncate(8)
cache.append(*cache.read_range(0, 8))
assert len(cache) == 16
"""


def test_deepcopy_without_memory_is_refused():
    pytest.importorskip("resource", reason="this system has no resource limits")
    assert run_python(NO_MEMORY.format(call="copy.deepcopy(cache)")) == "OutOfMemoryError\n"
    assert issubclass(OutOfMemoryError, MemoryError)


def test_read_range_without_memory_is_refused():
    pytest.importorskip("resource", reason="this system has no resource limits")
    said = run_python(NO_MEMORY.format(call="cache.read_range(0, len(cache))"))
    assert said in ("OutOfMemoryError\n", "_ArrayMemoryError\n", "MemoryError\n")


@pytest.mark.parametrize(
    "make",
    [
        lambda cache: cache,
        lambda cache: cache.view(),
        lambda cache: cache.view().key_view,
        lambda cache: cache.reserve(1),
    ],
    ids=["LayerKvCache", "KVSpan", "TensorView", "ReservedSpan"],
)
def test_objects_with_memory_do_not_pickle(make, filled, request):
    made = make(filled)
    name = request.node.callspec.id
    for protocol in [2, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL]:
        with pytest.raises(TypeError, match=f"cannot pickle '(kvspan.)?{name}' object"):
            pickle.dumps(made, protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "make",
    [
        lambda cache: cache.view(),
        lambda cache: cache.view().key_view,
        lambda cache: cache.reserve(1),
    ],
)
def test_views_can_not_be_copied(make, copied, filled):
    with pytest.raises(TypeError, match="cannot pickle"):
        copied(make(filled))
    filled.reset()


def test_arrays_of_a_view_pickle_as_copies(filled):
    array = pickle.loads(pickle.dumps(filled.view().keys))
    assert_array_equal(array, tokens(6)[0])
    assert copy.deepcopy(filled.view().keys).flags.owndata
    filled.reset()
