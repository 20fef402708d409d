"""What a manager does: sharing, growing, forking, shrinking, freeing, and the numbers it tells."""

import array
import copy
import pickle
import weakref

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from blocks import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    NUM_LAYERS,
    assert_holds,
    assert_nothing_leaks,
    compute,
    new_manager,
    numbers_in,
    read,
    refused,
    right,
    rows_of,
    start,
)
from kvspan.errors import (
    InvalidInputError,
    OutOfBlocksError,
    OutOfRangeError,
    StaleHandleError,
    TokenMismatchError,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def manager():
    manager = new_manager(16)
    yield manager
    manager.check_integrity()


def blocks(handle):
    return handle.block_table.physical_blocks


# What it is made of


def test_properties_are_those_it_was_made_with():
    manager = kvspan.KvCacheManager(
        7, block_size=2, num_layers=3, num_kv_heads=5, head_dim=6, prefix_caching=False
    )
    assert (manager.num_blocks, manager.block_size, manager.num_layers) == (7, 2, 3)
    assert (manager.num_kv_heads, manager.head_dim, manager.dtype) == (5, 6, "float32")
    assert (manager.has_storage, manager.prefix_caching) == (True, False)
    # The null block has a place as well.
    assert manager.nbytes == (7 + 1) * 2 * 3 * 2 * 5 * 6 * 4
    assert manager.stats().block_bytes * 8 == manager.nbytes
    assert kvspan.KvCacheManager(7, storage=False).nbytes == 0


def test_defaults():
    manager = kvspan.KvCacheManager(1)
    assert (manager.block_size, manager.num_layers, manager.num_kv_heads) == (16, 1, 4)
    assert (manager.head_dim, manager.has_storage, manager.prefix_caching) == (64, True, True)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("f4")])
def test_dtype_can_be_anything_that_numpy_takes_for_float32(dtype):
    assert new_manager(dtype=dtype).dtype == "float32"


def test_representation_says_shape_and_use(manager):
    handle = start(manager, PROMPT, "chat")
    assert repr(manager) == (
        "KvCacheManager(16 blocks: 3 in use, 0 cached, 13 free; block_size=4, num_layers=2, "
        "num_kv_heads=1, head_dim=2, dtype='float32')"
    )
    assert repr(handle) == (
        f"PagedKvCacheHandle({handle.cache_id}, num_tokens=10, num_cached_tokens=0, num_blocks=3)"
    )
    handle.close()
    assert repr(handle).endswith(", num_blocks=3, freed)")
    assert repr(new_manager(2, storage=False)).endswith("dtype='float32', storage=False)")


@pytest.mark.parametrize("copy_it", [copy.copy, copy.deepcopy, pickle.dumps])
def test_managers_and_what_they_hand_out_can_not_be_copied(manager, copy_it):
    handle = start(manager, PROMPT)
    for live in [manager, handle, manager.view(handle, 0), handle.key_cache(0)]:
        with pytest.raises(TypeError):
            copy_it(live)


def test_managers_and_what_they_hand_out_can_be_referred_to_weakly(manager):
    handle = start(manager, PROMPT)
    span, tensor = manager.view(handle, 0), handle.key_cache(0)
    references = [weakref.ref(one) for one in (handle, span, tensor)]
    del handle, span, tensor
    assert [reference() for reference in references] == [None] * 3
    assert_nothing_leaks(manager)


# Sharing


def test_equal_beginnings_are_computed_once(manager):
    first = start(manager, PROMPT)
    assert (first.num_cached_tokens, first.num_committed_tokens) == (0, 10)
    assert manager.probe(PROMPT) == 8
    second = manager.allocate(PROMPT)
    assert second.num_cached_tokens == second.num_committed_tokens == 8
    assert blocks(second)[:2] == blocks(first)[:2]
    compute(manager, second, PROMPT, 8)
    third = start(manager, [*PROMPT[:7], 99, 100])
    assert third.num_cached_tokens == 4
    for handle, tokens in [(first, PROMPT), (second, PROMPT), (third, [*PROMPT[:7], 99, 100])]:
        assert_holds(manager, handle, tokens)


def test_at_least_one_token_is_left_to_compute(manager):
    start(manager, PROMPT[:8])
    assert manager.allocate(PROMPT[:8]).num_cached_tokens == 4
    assert manager.allocate(PROMPT[:9]).num_cached_tokens == 8
    assert manager.probe([]) == manager.probe(PROMPT[:1]) == 0


def test_a_sequence_can_begin_without_tokens(manager):
    handle = manager.allocate([])
    assert (handle.num_tokens, blocks(handle)) == (0, [])
    manager.extend(handle, 5)
    compute(manager, handle, PROMPT[:5], 0)
    assert_holds(manager, handle, PROMPT[:5])


def test_freed_sequences_are_found_until_their_blocks_are_reused():
    manager = new_manager(4)
    start(manager, PROMPT[:9]).close()
    assert manager.probe(PROMPT[:9]) == 8
    other = manager.allocate(range(100, 108))
    # The one without a name went first, then the tail of the sequence.
    assert manager.probe(PROMPT[:9]) == 8
    more = manager.allocate([1])
    assert manager.probe(PROMPT[:9]) == 4
    assert manager.stats().num_evictions == 1
    del other, more
    assert_nothing_leaks(manager)


def test_probe_and_refused_allocations_change_nothing():
    manager = new_manager(3)
    start(manager, PROMPT[:8]).close()
    before, stats = manager.inspect(), manager.stats()
    for _ in range(3):
        manager.probe(PROMPT)
    assert (manager.inspect(), manager.stats()) == (before, stats)
    with pytest.raises(OutOfBlocksError):
        manager.allocate(PROMPT + PROMPT)
    assert manager.inspect() == before
    assert manager.stats().num_failures == 1
    assert manager.stats().query_tokens == stats.query_tokens


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ({"cache_salt": "a"}, [{}, {"cache_salt": "b"}, {"lora_id": "a"}, {"cache_salt": ""}]),
        ({"lora_id": "a"}, [{}, {"lora_id": "b"}, {"cache_salt": "x", "lora_id": "a"}]),
        (
            {"extra_keys": [(1, ["cat"])]},
            [{}, {"extra_keys": {1: ["dog"]}}, {"extra_keys": {1: ["cat", "cat"]}}],
        ),
    ],
)
def test_only_sequences_of_the_same_kind_share(manager, mine, others):
    start(manager, PROMPT, **mine)
    assert manager.probe(PROMPT, **mine) == 8
    # Extra keys decide the block that they are of, and what follows.
    rest = 4 if "extra_keys" in mine else 0
    for other in others:
        assert manager.probe(PROMPT, **other) == rest
        assert manager.allocate(PROMPT, **other).num_cached_tokens == rest


def test_extra_keys_can_be_text_or_bytes_in_pairs_or_a_mapping(manager):
    start(manager, PROMPT, extra_keys=[(0, ["cat", b"dog"]), (1, ("bird",))])
    for same in [
        {1: ["bird"], 0: [b"cat", "dog"]},
        iter([(np.int64(0), iter(["cat", "dog"])), [1, [b"bird"]]]),
    ]:
        assert manager.probe(PROMPT, extra_keys=same) == 8
    assert manager.probe(PROMPT, extra_keys={0: ["dog", "cat"], 1: ["bird"]}) == 0
    # No keys are none.
    assert manager.probe(PROMPT, extra_keys={2: []}) == 0
    start(manager, PROMPT, extra_keys=[])
    assert manager.probe(PROMPT, extra_keys={0: []}) == manager.probe(PROMPT) == 8


def test_prefix_caching_can_be_turned_off():
    manager = new_manager(16, prefix_caching=False)
    start(manager, PROMPT)
    assert manager.probe(PROMPT) == manager.allocate(PROMPT).num_cached_tokens == 0
    assert all(one.key is None for one in manager.inspect().blocks)


def test_duplicates_are_merged_unless_told_otherwise():
    for merge, expected in [(True, 2), (False, 4)]:
        manager = new_manager(8, merge_duplicates=merge)
        handles = [manager.allocate(PROMPT[:8]) for _ in range(2)]
        for handle in handles:
            compute(manager, handle, PROMPT[:8], 0)
        assert manager.stats().num_in_use == expected
        assert (blocks(handles[0]) == blocks(handles[1])) == merge
        for handle in handles:
            assert_holds(manager, handle, PROMPT[:8])


def test_fork_leaves_the_blocks_of_a_lookahead_to_the_original():
    manager = new_manager(2)
    handle = manager.allocate(PROMPT[:4], lookahead=4)
    fork = manager.fork(handle)
    assert blocks(fork) == blocks(handle)[:1]
    assert manager.extend(handle, 4) is None
    refused(manager, OutOfBlocksError, manager.extend, fork)


@pytest.mark.parametrize("storage", [False, True])
def test_who_is_about_to_write_elsewhere_gets_slots_of_its_own(storage):
    manager = new_manager(8, storage=storage)
    handle = manager.allocate(PROMPT[:3])
    manager.extend(handle, 3)
    fork = manager.fork(handle)
    assert blocks(fork) == blocks(handle)
    copies = manager.prepare_write(fork, 3, 6)
    assert [(copy.block_index, copy.source) for copy in copies] == [*enumerate(blocks(handle))]
    assert [copy.target for copy in copies] == blocks(fork)
    assert manager.prepare_write(fork, 0, 6) == manager.prepare_write(handle, 0, 6) == []
    refused(manager, OutOfRangeError, manager.prepare_write, fork, 5, 7)
    refused(manager, OutOfRangeError, manager.prepare_write, fork, 2, 1)


# Keys

GOLDEN = [
    (
        {},
        {"block_size": 16},
        range(33),
        {},
        [
            "90455353fdce42d1dd74202b4328958c0d008f6ab1a1b820149409179f3fc503",
            "e3e37746803d08980a8d56ee1ad27f9086baafc8c5291a999ab3167ff7fd3f4e",
        ],
    ),
    (
        {"namespace": "llama", "epoch": 3},
        {"block_size": 4},
        [0, 1, 2**32 - 1, 7, 5, 6, 7, 8, 9, 10, 11, 12],
        {"cache_salt": "tenant-7", "lora_id": "adapter", "extra_keys": {1: ["image:1", ""]}},
        [
            "93768021ec758cf6c4271820fed6ef49c438f33afd07ca593e18f0aad110e499",
            "3453ddcef186f4f3bc30f7c23297232e9de145260c8f2a256e4b90f05dd6d61b",
            "c09e3157131a0d1b747a51d8960be0de7b977c6cc6dd4d8eadfc70d6d5e75623",
        ],
    ),
    (
        {},
        {"block_size": 512},
        range(512),
        {},
        ["29463736e8e5cf4acc3a609a0a7b2bcd955a738fb6834aa8f8147e48e6d7e666"],
    ),
]


@pytest.mark.parametrize(("root", "shape", "tokens", "options", "keys"), GOLDEN)
@pytest.mark.parametrize("bytes_too", [False, True])
def test_keys_of_blocks_are_the_golden_ones(root, shape, tokens, options, keys, bytes_too):
    if bytes_too and "namespace" in root:
        root = {**root, "namespace": root["namespace"].encode()}
    manager = kvspan.KvCacheManager(8, storage=False, **root, **shape)
    handle = start(manager, tokens, **options)
    found = {one.block: one.key for one in manager.inspect().blocks}
    assert [found[block] for block in blocks(handle)][: len(keys)] == [*map(bytes.fromhex, keys)]
    assert sum(key is not None for key in found.values()) == len(keys)


def test_nothing_older_than_the_epoch_is_found_and_all_that_live_go_on():
    manager = new_manager(12, namespace="llama", epoch=7)
    assert (manager.namespace, manager.epoch) == (b"llama", 7)
    start(manager, PROMPT).close()
    old = manager.allocate(PROMPT)
    assert old.num_cached_tokens == 8
    assert manager.advance_epoch() == manager.epoch == 8
    assert manager.probe(PROMPT) == 0
    manager.extend(old, 2)
    compute(manager, old, [*PROMPT, 1, 2], 8)
    assert_holds(manager, old, [*PROMPT, 1, 2])
    assert manager.probe([*PROMPT, 1, 2, 3]) == 0
    new = start(manager, PROMPT)
    assert new.num_cached_tokens == 0
    assert manager.probe(PROMPT) == 8


def test_last_epoch_is_not_followed_by_the_first():
    manager = new_manager(1, epoch=2**64 - 1)
    message = f"the epoch is {2**64 - 1}, and can not be raised"
    error = refused(manager, InvalidInputError, manager.advance_epoch)
    assert (str(error), manager.epoch, manager.namespace) == (message, 2**64 - 1, None)


# Tokens


TOKEN_KINDS = {
    "list": list,
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
    "int32": lambda tokens: np.array(tokens, np.int32),
    "uint32": lambda tokens: np.array(tokens, np.uint32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "longlong": lambda tokens: np.array(tokens, np.longlong),
    "list of NumPy's": lambda tokens: [np.uint16(token) for token in tokens],
    "array of i": lambda tokens: array.array("i", tokens),
    "array of I": lambda tokens: array.array("I", tokens),
    "array of l": lambda tokens: array.array("l", tokens),
    "array of q": lambda tokens: array.array("q", tokens),
    "memoryview": lambda tokens: memoryview(np.array(tokens, np.int64)),
    "read-only": lambda tokens: np.frombuffer(np.array(tokens, np.int32).tobytes(), np.int32),
    "part": lambda tokens: np.array([[0] * len(tokens), tokens])[1],
    "DLPack": lambda tokens: Exporter(np.array(tokens, np.int64)),
}


class Exporter:
    """Offers DLPack and nothing else, as tensors of other libraries do."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_tokens_come_in_many_forms(manager, kind):
    tokens = TOKEN_KINDS[kind](PROMPT)
    handle = start(manager, PROMPT)
    assert manager.probe(tokens) == 8
    other = manager.allocate(tokens)
    assert other.num_cached_tokens == 8
    assert other.tokens.dtype == np.uint32
    assert other.tokens.tolist() == PROMPT
    manager.commit(other, TOKEN_KINDS[kind](PROMPT[8:]))
    assert (handle.num_committed_tokens, other.num_committed_tokens) == (10, 10)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_largest_token_is_a_token(manager, dtype):
    largest = 2**32 - 1
    assert manager.allocate(np.array([0, largest], dtype)).tokens.tolist() == [0, largest]
    assert manager.allocate([largest]).tokens.tolist() == [largest]


def test_many_tokens_are_copied_without_the_interpreter(manager):
    tokens = np.arange(100_000) % 50_000
    assert manager.probe(tokens) == 0
    bookkeeping = kvspan.KvCacheManager(7_000, storage=False)
    handle = bookkeeping.allocate(tokens)
    assert_array_equal(handle.tokens, tokens)
    tokens[77_777] = -3
    with pytest.raises(ValueError, match="token 77777 is -3, but it must be 0 to 4294967295"):
        bookkeeping.probe(tokens)


def test_tokens_are_a_copy(manager):
    tokens = np.array(PROMPT)
    handle = manager.allocate(tokens)
    tokens[:] = 0
    handle.tokens[:] = 1
    assert handle.tokens.tolist() == PROMPT


# Content


@pytest.mark.parametrize(
    "shape", [(3, HEADS, DIM), (3, HEADS * DIM)], ids=["tokens, heads, dim", "tokens, width"]
)
def test_many_tokens_are_written_in_one_call(manager, shape):
    handle = manager.allocate(PROMPT)
    keys = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    manager.write(handle, 1, 3, keys, -keys)
    for found, written in zip(manager.read_range(handle, 1, 3, 6), (keys, -keys)):
        assert_array_equal(found.reshape(shape), written)
    assert not np.any(manager.read_range(handle, 1, 0, 3))
    assert not np.any(manager.read_range(handle, 1, 6))
    assert not np.any(manager.read_range(handle, 0))


@pytest.mark.parametrize("shape", [(HEADS, DIM), (HEADS * DIM,), (1, HEADS, DIM)])
def test_one_token_is_written_in_any_of_its_shapes(manager, shape):
    handle = manager.allocate(PROMPT)
    manager.write(handle, 0, 9, np.full(shape, 3, np.float32), np.full(shape, -3, np.float32))
    assert read(manager, handle)[8:] == [0, 3]


def test_writing_no_tokens_changes_nothing(manager):
    handle = start(manager, PROMPT)
    before = manager.inspect()
    manager.write(handle, 0, 0, *rows_of([]))
    manager.write_many(0, [], [], *rows_of([]))
    assert (manager.inspect(), handle.num_committed_tokens) == (before, 10)


def test_reading_gives_new_arrays(manager):
    handle = start(manager, PROMPT)
    keys, values = manager.read_range(handle, 0, 3, 9)
    assert keys.shape == values.shape == (6, HEADS, DIM)
    assert keys.flags.writeable and keys.flags.owndata and keys.flags.c_contiguous
    keys[:] = values[:] = 0
    assert_holds(manager, handle, PROMPT)
    assert [part.shape for part in manager.read_range(handle, 0, 10)] == [(0, HEADS, DIM)] * 2
    assert_array_equal(manager.read_range(handle, 1), manager.read_range(handle, 1, 0, 10))


def test_reading_into_arrays_leaves_what_is_behind_the_tokens_alone(manager):
    handle = start(manager, PROMPT)
    for shape in [(8, HEADS, DIM), (8 * HEADS * DIM,)]:
        keys, values = np.full(shape, 7, np.float32), np.full(shape, 8, np.float32)
        manager.read_range_into(handle, 1, 2, 8, keys, values)
        keys, values = keys.reshape(8, HEADS, DIM), values.reshape(8, HEADS, DIM)
        assert numbers_in(keys[:6], values[:6]) == right(PROMPT, 1)[2:8]
        assert (keys[6:] == 7).all() and (values[6:] == 8).all()


def test_many_sequences_are_written_in_one_call(manager):
    handles = [start(manager, PROMPT[: 3 + count]) for count in range(4)]
    before = [read(manager, handle, 1) for handle in handles]
    for form in [list, tuple, iter, np.array]:
        rows = rows_of([101, 102, 103, 104])
        positions = form([0, 1, 4, 5]) if form is not iter else iter([0, 1, 4, 5])
        manager.write_many(1, form(handles) if form is not np.array else handles, positions, *rows)
        for handle, old, at, number in zip(handles, before, [0, 1, 4, 5], [101, 102, 103, 104]):
            expected = [*old[:at], number, *old[at + 1 :]]
            assert read(manager, handle, 1) == expected


def test_the_last_of_those_who_write_a_shared_block_keeps_it():
    manager = new_manager(2)
    one = start(manager, PROMPT[:4])
    other = manager.fork(one)
    manager.write_many(0, [one, other], [3, 3], *rows_of([7, 8]))
    assert (blocks(one), blocks(other)) == ([2], [1])
    assert (read(manager, one)[3], read(manager, other)[3]) == (7, 8)


# Growing and shrinking


def test_extending_makes_room_that_is_zero(manager):
    handle = start(manager, PROMPT[:3])
    assert manager.extend(handle) is None
    assert manager.extend(handle, 0) is None
    assert manager.extend(handle, num_tokens=5) is None
    assert (handle.num_tokens, len(blocks(handle))) == (9, 3)
    assert read(manager, handle) == [*right(PROMPT[:3]), 0, 0, 0, 0, 0, 0]
    compute(manager, handle, PROMPT[:9], 3)
    assert_holds(manager, handle, PROMPT[:9])


def test_lookahead_takes_blocks_before_they_are_needed():
    manager = new_manager(3)
    handle = manager.allocate(PROMPT[:4], lookahead=5)
    assert (handle.num_tokens, len(blocks(handle))) == (4, 3)
    assert handle.block_table.free_tokens == 8
    manager.extend(handle, 8)
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle)


def test_truncating_gives_blocks_back(manager):
    handle = start(manager, PROMPT)
    assert manager.truncate(handle, 10) is None
    assert manager.truncate(handle, 5) is None
    assert (handle.num_tokens, len(blocks(handle)), handle.tokens.tolist()) == (5, 2, PROMPT[:5])
    assert handle.num_committed_tokens == 5
    manager.extend(handle, 2)
    assert read(manager, handle) == [*right(PROMPT[:5]), 0, 0]
    manager.truncate(handle, 0)
    assert (handle.num_tokens, blocks(handle)) == (0, [])


def test_drafts_that_are_rejected_leave_nothing_behind(manager):
    handle = start(manager, PROMPT)
    for rejected in [4, 3, 1, 0]:
        manager.extend(handle, 5)
        manager.write(handle, 0, 10, *rows_of(range(501, 506)))
        manager.write(handle, 1, 10, *rows_of(range(501, 506)))
        manager.truncate(handle, 15 - rejected)
        manager.truncate(handle, 10)
    assert_holds(manager, handle, PROMPT)


def test_cutting_a_block_that_others_have_copies_it(manager):
    handle = start(manager, PROMPT)
    fork = manager.fork(handle)
    copied = manager.truncate(fork, 6)
    assert copied == kvspan_copy(copied, 1, blocks(handle)[1], blocks(fork)[1])
    assert (
        repr(copied) == f"BlockCopy(block_index=1, source={copied.source}, target={copied.target})"
    )
    assert_holds(manager, handle, PROMPT)
    assert_holds(manager, fork, PROMPT[:6])


def kvspan_copy(copied, block_index, source, target):
    """The copy, if it is this one."""
    assert (copied.block_index, copied.source, copied.target) == (block_index, source, target)
    return copied


def test_forks_share_until_one_of_them_writes(manager):
    handle = start(manager, PROMPT)
    fork = manager.fork(handle, "fork")
    assert blocks(fork) == blocks(handle)
    assert fork.cache_id != handle.cache_id
    copied = manager.extend(fork)
    assert copied is not None and copied.block_index == 2
    manager.write(fork, 0, 10, *rows_of([5]))
    manager.write(fork, 0, 0, *rows_of([6]))
    assert [a == b for a, b in zip(blocks(fork), blocks(handle))] == [False, True, False]
    assert read(manager, fork) == [6, *right(PROMPT)[1:], 5]
    assert_holds(manager, handle, PROMPT)
    assert manager.stats().num_copies == 2


def test_clone_of_a_handle_is_a_fork_of_its_sequence(manager):
    handle = start(manager, PROMPT)
    clone = handle.clone_handle()
    assert type(clone) is kvspan.PagedKvCacheHandle
    assert (clone.manager, blocks(clone)) == (manager, blocks(handle))
    manager.write(clone, 0, 0, *rows_of([6]))
    assert_holds(manager, handle, PROMPT)


def test_a_write_to_a_committed_block_has_it_committed_again(manager):
    handle = start(manager, PROMPT)
    manager.write(handle, 0, 5, *rows_of([77]))
    assert handle.num_committed_tokens == 4
    assert manager.probe(PROMPT) == 4
    with pytest.raises(TokenMismatchError):
        manager.commit(handle, [1])
    manager.commit(handle, PROMPT[4:])
    assert manager.probe(PROMPT) == 8


def test_a_write_to_a_block_that_is_not_full_leaves_its_tokens_committed(manager):
    handle = start(manager, PROMPT)
    manager.write(handle, 0, 8, *rows_of([77, 78]))
    assert handle.num_committed_tokens == len(PROMPT)
    with pytest.raises(OutOfRangeError):
        manager.commit(handle, PROMPT[8:])


# Freeing


def test_freeing_gives_everything_back_once(manager):
    handle = start(manager, PROMPT, "chat")
    manager.free(handle)
    assert not handle.is_valid
    with pytest.raises(StaleHandleError):
        manager.free(handle)
    handle.close()
    assert_nothing_leaks(manager)
    assert manager.stats().num_cached == 2


def test_freeing_by_name_works_wherever_the_handle_is(manager):
    handle = start(manager, PROMPT, "chat")
    manager.free_request("chat")
    assert not handle.is_valid
    assert_nothing_leaks(manager)
    with pytest.raises(KeyError):
        manager.free_request("chat")
    assert start(manager, PROMPT, "chat").num_cached_tokens == 8


def test_dropping_a_handle_frees_it(manager):
    start(manager, PROMPT, "chat")
    assert_nothing_leaks(manager)
    start(manager, PROMPT, "chat")


def test_with_block_frees_at_its_end_whatever_happens(manager):
    with start(manager, PROMPT) as handle:
        assert handle.is_valid
    assert not handle.is_valid
    with pytest.raises(ZeroDivisionError), start(manager, PROMPT) as other:
        1 / 0
    assert not other.is_valid
    with pytest.raises(StaleHandleError), other:
        pytest.fail("a stale handle was entered")
    with start(manager, PROMPT) as handle:
        handle.close()
    assert_nothing_leaks(manager)


def test_tail_is_given_back_first_and_what_has_no_name_is_reused_first():
    manager = new_manager(5)
    handle = start(manager, PROMPT)
    manager.free(handle)
    assert manager.inspect().free_queue == [3, 4, 5, 2, 1]


def test_handles_keep_their_manager():
    handle = start(new_manager(), PROMPT)
    assert handle.manager.num_blocks == 8
    assert_holds(handle.manager, handle, PROMPT)


# Resetting and telling


def test_resetting_forgets_everything_that_is_cached(manager):
    start(manager, PROMPT)
    manager.reset_prefix_cache()
    assert manager.probe(PROMPT) == 0
    assert manager.stats().num_free == 16


def test_numbers_add_up(manager):
    handles = [start(manager, PROMPT) for _ in range(3)]
    span = manager.view(handles[0], 0)
    stats = manager.stats()
    assert stats.num_free + stats.num_cached + stats.num_in_use == stats.num_blocks == 16
    assert (stats.query_tokens, stats.hit_tokens, stats.miss_tokens) == (30, 16, 14)
    assert stats.hit_rate == 16 / 30
    assert (stats.num_sequences, stats.num_allocations, stats.num_failures) == (3, 3, 0)
    assert stats.num_pinned == 0
    handles.clear()
    stats = manager.stats()
    assert (stats.num_in_use, stats.num_pinned, stats.num_cached) == (3, 3, 0)
    del span
    assert manager.stats().num_cached == 2
    assert manager.stats() == manager.stats()
    assert manager.stats() != stats
    fields = [name for name in dir(stats) if not name.startswith("_")]
    text = repr(stats)
    assert text.startswith("ManagerStats(num_blocks=16, num_free=13, ")
    assert all(f"{field}={getattr(stats, field)}" in text for field in fields)


def test_hit_rate_of_nothing_is_zero(manager):
    assert manager.stats().hit_rate == 0.0


def test_picture_shows_every_block():
    manager = new_manager(4)
    handle = start(manager, PROMPT[:6])
    other = manager.fork(handle)
    span = manager.view(other, 0, 4)
    one, two, three, four = manager.inspect().blocks
    assert (one.block, one.state, one.reference_count, one.pin_count) == (1, "in_use", 2, 0)
    assert (two.state, two.reference_count, two.pin_count, two.key) == ("in_use", 2, 1, None)
    assert (three.state, three.reference_count) == (four.state, 0) == ("free", 0)
    assert isinstance(one.key, bytes) and len(one.key) == 32
    assert one.key.hex() in repr(one)
    del handle, other
    one, two, *_ = manager.inspect().blocks
    assert (one.state, two.state, two.reference_count, two.pin_count) == ("cached", "pinned", 0, 1)
    assert manager.inspect().free_queue == [3, 4, 1]
    assert repr(manager.inspect()) == "Inspection(4 blocks, 3 in the free queue)"
    del span
    assert manager.inspect().free_queue == [2, 3, 4, 1]


def test_leak_report_says_who_has_what(manager):
    assert not manager.leak_report()
    handle = start(manager, PROMPT, "chat")
    other = start(manager, PROMPT[:2])
    span = manager.view(handle, 0, 0, 4)
    report = manager.leak_report()
    assert report
    assert [(one.cache_id, one.request_id, one.blocks) for one in report.sequences] == [
        (handle.cache_id, "chat", [1, 2, 3]),
        (other.cache_id, None, [4]),
    ]
    assert report.pinned_blocks == [(1, 1)]
    assert repr(report).startswith('LeakReport(sequences=[SequenceReport(cache_id="paged-')
    assert manager.leak_report() == report
    del handle, other
    assert manager.leak_report() != report
    assert (manager.leak_report().sequences, manager.leak_report().pinned_blocks) == ([], [(1, 1)])
    del span
    assert not manager.leak_report()


def test_without_storage_it_keeps_count_of_blocks_alone():
    manager = new_manager(storage=False)
    handle = start(manager, PROMPT)
    fork = manager.fork(handle)
    copied = manager.extend(fork)
    assert copied is not None and copied.source == blocks(handle)[2]
    assert manager.allocate(PROMPT).num_cached_tokens == 8
    assert (handle.key_cache(0), handle.value_cache(1), handle.kv_cache(0)) == (
        None,
        None,
        (None,) * 2,
    )
    assert handle.stats().memory_bytes == 0


def test_blocks_are_zero_when_they_get_a_new_owner():
    manager = new_manager(3)
    for layer in range(NUM_LAYERS):
        handle = manager.allocate(range(12))
        manager.write(handle, layer, 0, *rows_of([666] * 12))
        manager.free(handle)
        handle = manager.allocate(range(100, 112))
        for other in range(NUM_LAYERS):
            assert read(manager, handle, other) == [0] * 12
        manager.free(handle)
    assert BLOCK_SIZE * 3 == 12
