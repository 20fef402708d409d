"""Calls for many sequences do what the calls for one do, for all of them or for none; and keys."""

import array
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from blocks import (
    BLOCK_SIZE,
    assert_nothing_leaks,
    compute,
    new_manager,
    read,
    refused,
    right,
    rows_of,
    start,
    unchanged,
)
from kvspan.errors import (
    ForeignHandleError,
    InvalidInputError,
    NoStorageError,
    OutOfBlocksError,
    OutOfRangeError,
    RequestExistsError,
    StaleHandleError,
    TokenMismatchError,
    WrongBlockStateError,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def manager():
    manager = new_manager(16)
    yield manager
    manager.check_integrity()


@pytest.fixture
def handles(manager):
    """Three sequences that have nothing in common, of 5, 1 and 8 tokens."""
    return manager.allocate_many([[1, 2, 3, 4, 5], [6], range(10, 18)])


def blocks(handle):
    return handle.block_table.physical_blocks


def lengths(handles):
    return [handle.num_tokens for handle in handles]


def state(handles):
    """All that a call that fails must leave alone."""
    return [
        (handle.block_table, handle.tokens.tolist(), handle.num_committed_tokens)
        for handle in handles
    ]


def refused_alike(manager, handles, error, call, *arguments, **keywords):
    """The exception of a call that must raise just `error` and leave all handles as they were."""
    before = state(handles)
    raised = refused(manager, error, call, *arguments, **keywords)
    assert state(handles) == before
    return raised


# Starting


def test_sequences_that_are_started_together_are_as_if_started_one_by_one():
    prompts = [PROMPT, PROMPT[:6], [7] * 9, []]
    ones, many = new_manager(16), new_manager(16)
    for manager in (ones, many):
        start(manager, PROMPT[:8]).close()
    alone = [ones.allocate(prompt, lookahead=3) for prompt in prompts]
    together = many.allocate_many(prompts, lookahead=3)
    assert [type(handle) for handle in together] == [kvspan.PagedKvCacheHandle] * 4
    assert [blocks(handle) for handle in together] == [blocks(handle) for handle in alone]
    assert many.num_cached_tokens(together).tolist() == [8, 4, 0, 0]
    assert [handle.num_cached_tokens for handle in alone] == [8, 4, 0, 0]
    assert many.inspect() == ones.inspect()
    assert many.stats() == ones.stats()


def test_names_salts_and_adapters_are_those_of_each_sequence(manager):
    salted = {"cache_salts": ["one", "two", None], "lora_ids": [None, "adapter", None]}
    handles = manager.allocate_many([PROMPT] * 3, ["a", None, "c"], **salted)
    for handle in handles:
        compute(manager, handle, PROMPT, 0)
    assert manager.probe(PROMPT, cache_salt="one") == 8
    assert manager.probe(PROMPT, cache_salt="two") == 0
    assert manager.probe(PROMPT, cache_salt="two", lora_id="adapter") == 8
    manager.free_request("c")
    assert [handle.is_valid for handle in handles] == [True, True, False]


def test_tokens_come_in_all_the_ways_that_one_sequence_takes(manager):
    ways = [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT, np.int32),
        np.array(PROMPT, np.uint32),
        np.array(PROMPT, np.int64),
        array.array("i", PROMPT),
        range(11, 21),
        manager.block_keys(PROMPT),
    ]
    handles = new_manager(64).allocate_many(iter(ways))
    for handle in handles:
        assert_array_equal(handle.tokens, np.array(PROMPT, np.uint32), strict=True)


def test_too_few_blocks_for_all_start_none(manager):
    raised = refused(manager, OutOfBlocksError, manager.allocate_many, [[1] * 40, [2] * 40])
    assert (raised.needed, raised.free, raised.evictable, raised.pinned) == (20, 16, 0, 0)
    assert_nothing_leaks(manager)


def test_a_name_that_is_taken_or_there_twice_starts_none(manager):
    handle = manager.allocate([1], "taken")
    for names, message in [
        (["new", "taken"], 'there is a live request "taken" already'),
        (["new", "new"], 'the request "new" is there twice in one call'),
    ]:
        raised = refused(manager, RequestExistsError, manager.allocate_many, [[1], [2]], names)
        assert (raised.request_id, str(raised)) == (names[1], message)
    assert manager.stats().num_sequences == 1
    handle.close()


@pytest.mark.parametrize(
    ("tokens", "others", "error", "text"),
    [
        ([[1], [2, -1]], {}, InvalidInputError, "token 1 is -1, but it must be 0 to 4294967295"),
        ([[1], [2**32]], {}, InvalidInputError, "token 0 is 4294967296"),
        ([[1], ["2"]], {}, TypeError, "token 0 must be an integer, not str"),
        ([[1], 2], {}, TypeError, "tokens must be an array of int32, uint32 or int64"),
        ([[1], np.zeros(2, np.int16)], {}, InvalidInputError, "tokens have dtype int16"),
        ([np.zeros((2, 2), np.int32)], {}, InvalidInputError, "2 axes ([2, 2]), but one is"),
        ([np.arange(8)[::2]], {}, InvalidInputError, "not C-contiguous"),
        (
            [[1], [2]],
            {"request_ids": ["a"]},
            InvalidInputError,
            "got 1 request_ids, but there are 2",
        ),
        ([[1]], {"cache_salts": ["a", "b"]}, InvalidInputError, "got 2 cache_salts"),
        ([[1]], {"lora_ids": []}, InvalidInputError, "got 0 lora_ids"),
        ([[1]], {"lora_ids": "a"}, TypeError, "lora_ids must be a list"),
        (
            [[1]],
            {"request_ids": [7]},
            TypeError,
            "request_ids must be str or None, but entry 0 is int",
        ),
        ([[1]], {"lookahead": -1}, OutOfRangeError, "-1 is no position or number of tokens"),
        (7, {}, TypeError, "not iterable"),
    ],
)
def test_what_can_not_be_started_starts_nothing(manager, tokens, others, error, text):
    raised = refused(manager, error, manager.allocate_many, tokens, **others)
    assert text in str(raised)
    assert manager.stats().num_allocations == 0


def test_an_error_says_which_entry_it_is_about(manager):
    with pytest.raises(InvalidInputError) as caught:
        manager.allocate_many([[1], [2, -1]])
    assert caught.value.__notes__ == ["in entry 1 of the batch"]


# Keys


def test_keys_are_made_once_and_stand_for_their_tokens(manager):
    chain = manager.block_keys(PROMPT, cache_salt="salt", extra_keys={1: ["image"]})
    assert (len(chain), chain.block_size, len(chain.block_keys)) == (2, BLOCK_SIZE, 2)
    assert_array_equal(chain.tokens, np.array(PROMPT, np.uint32), strict=True)
    assert manager.probe(chain) == 0
    handle = manager.allocate(chain, "a", lookahead=8)
    assert (handle.num_tokens, len(blocks(handle))) == (10, 5)
    compute(manager, handle, PROMPT, 0)
    assert manager.probe(chain) == 8
    assert manager.probe(PROMPT, cache_salt="salt", extra_keys={1: ["image"]}) == 8
    assert [picture.key for picture in manager.inspect().blocks[:2]] == chain.block_keys
    manager.extend(handle)
    manager.commit(handle, [21])
    assert (handle.tokens[-1], len(chain.tokens)) == (21, 10)


def test_a_chain_is_equal_to_what_has_equal_keys(manager):
    chain = manager.block_keys(PROMPT)
    assert (
        chain
        == manager.block_keys(np.array(PROMPT))
        == manager.block_keys(PROMPT[:3]).extended(PROMPT[3:])
    )
    assert chain != manager.block_keys(PROMPT[:9]) and chain != manager.block_keys(
        PROMPT, cache_salt="salt"
    )
    assert chain != PROMPT
    assert repr(chain) == "KeyChain(num_tokens=10, num_keys=2, block_size=4)"
    assert (
        chain.block_keys[:1]
        == chain.extended([]).block_keys[:1]
        == manager.block_keys(PROMPT[:4]).block_keys
    )


def test_what_belongs_into_keys_is_refused_beside_them(manager):
    chain = manager.block_keys(PROMPT)
    for other in ({"cache_salt": "a"}, {"lora_id": "a"}, {"extra_keys": {0: ["a"]}}):
        for call in (manager.allocate, manager.probe):
            raised = refused(manager, InvalidInputError, call, chain, **other)
            assert str(raised).startswith(f"{next(iter(other))} is given beside a KeyChain")
    raised = refused(
        manager, InvalidInputError, manager.allocate_many, [[1], chain], cache_salts=["a", "b"]
    )
    assert raised.__notes__ == ["in entry 1 of the batch"]
    other = new_manager(8, block_size=8)
    for call in (other.allocate, other.probe, lambda chain: other.allocate_many([chain])):
        raised = refused(other, InvalidInputError, call, chain)
        assert "the keys are of blocks of 4 tokens, but the manager has blocks of 8" in str(raised)


def test_without_prefix_caching_keys_find_nothing():
    manager = new_manager(16, prefix_caching=False)
    chain = manager.block_keys(PROMPT)
    compute(manager, manager.allocate(chain), PROMPT, 0)
    assert manager.probe(chain) == 0
    assert manager.allocate_many([chain, PROMPT])[0].num_cached_tokens == 0


# Growing


def test_sequences_that_grow_together_are_as_if_they_had_grown_one_by_one():
    ones, many = new_manager(16), new_manager(16)
    prompts = [[1] * 3, [2] * 4, [3] * 8]
    alone, together = ones.allocate_many(prompts), many.allocate_many(prompts)
    for numbers in (1, [1, 0, 5], np.array([2, 1, 0]), 3):
        slots = many.extend_many(together, numbers)
        expected = []
        for handle, number in zip(alone, np.broadcast_to(numbers, 3)):
            length = handle.num_tokens
            ones.extend(handle, number)
            expected += handle.block_table.slot_mapping(length, handle.num_tokens).tolist()
        assert_array_equal(slots, np.array(expected, np.int64), strict=True)
        assert lengths(together) == lengths(alone)
        assert many.inspect() == ones.inspect()
        assert_array_equal(many.slot_mappings(together, lengths(alone)), [])


def test_new_slots_are_found_behind_lookahead_as_well(manager):
    handles = manager.allocate_many([[1] * 3, [2]], lookahead=9)
    tables = manager.block_tables(handles)
    assert_array_equal(manager.extend_many(handles), [tables[0, 0] * 4 + 3, tables[1, 0] * 4 + 1])
    assert_array_equal(manager.extend_many(handles, [3, 0]), tables[0, 1] * 4 + np.arange(3))


def test_many_slots_are_an_array_as_few_are():
    manager = new_manager(8_192, storage=False)
    handle = manager.allocate(range(20_000))
    slots = manager.slot_mappings([handle], 0)
    first = handle.block_table.physical_blocks[0] * BLOCK_SIZE
    assert_array_equal(slots, np.arange(first, first + 20_000, dtype=np.int64), strict=True)
    assert slots.flags.writeable and slots.flags.c_contiguous


def test_too_few_blocks_for_all_make_none_longer(manager, handles):
    raised = refused_alike(manager, handles, OutOfBlocksError, manager.extend_many, handles, 33)
    assert (raised.needed, raised.free) == (8 + 8 + 9, 16 - 5)
    assert_array_equal(manager.extend_many(handles), [9, 13, 24])


def test_copies_are_reported_for_those_who_keep_the_bytes():
    manager = new_manager(16, storage=False)
    first = start(manager, PROMPT)
    handles = [manager.fork(first), manager.fork(first), first]
    copies = []
    slots = manager.extend_many(handles, copies=copies)
    assert [index for index, _ in copies] == [0, 1]
    for index, copy in copies:
        assert (copy.block_index, copy.source) == (2, blocks(first)[2])
        assert blocks(handles[index])[2] == copy.target == slots[index] // BLOCK_SIZE
    assert manager.stats().num_copies == 2


def test_without_storage_no_copy_goes_unreported():
    manager = new_manager(16, storage=False)
    first, other = start(manager, PROMPT), start(manager, [1, 2, 3])
    handles = [other, manager.fork(first), first]
    raised = refused_alike(manager, handles, NoStorageError, manager.extend_many, handles)
    assert str(raised) == (
        f"block {blocks(first)[2]} has to be copied where its content is, since the manager has no "
        "storage, but the call does not report copies: pass copies=[], a list to append them to"
    )
    copies = []
    manager.extend_many(handles, copies=copies)
    assert [index for index, _ in copies] == [1]
    # Nothing is left to copy.
    manager.extend_many(handles)


def test_forks_that_grow_together_keep_their_content_apart(manager):
    handle = start(manager, PROMPT)
    forks = [manager.fork(handle) for _ in range(2)]
    manager.extend_many([handle, *forks])
    rows = rows_of([1, 2, 3])
    manager.write_many(0, [handle, *forks], [10] * 3, *rows)
    assert [read(manager, one)[-1] for one in (handle, *forks)] == [1, 2, 3]
    assert read(manager, forks[0])[:10] == right(PROMPT)


# Committing


@pytest.mark.parametrize(
    "tokens",
    [
        [[5], [6], [7]],
        [5, 6, 7],
        np.array([5, 6, 7]),
        np.array([[5], [6], [7]], np.int32),
        array.array("I", [5, 6, 7]),
        (np.array([5]), [6], array.array("q", [7])),
    ],
)
def test_tokens_of_many_come_in_many_ways(manager, tokens):
    handles = manager.allocate_many([[], [], []])
    manager.extend_many(handles)
    manager.commit_many(handles, tokens)
    assert [handle.tokens.tolist() for handle in handles] == [[5], [6], [7]]


def test_what_is_committed_together_is_found_and_merged(manager):
    handles = manager.allocate_many([PROMPT, PROMPT, [1] * 5])
    manager.commit_many(handles, [PROMPT, PROMPT, [1] * 4])
    assert [handle.num_committed_tokens for handle in handles] == [10, 10, 4]
    assert blocks(handles[0])[:2] == blocks(handles[1])[:2]
    assert manager.probe([*PROMPT, 1]) == 8
    manager.extend_many(handles, 4)
    manager.commit_many(handles[:2], np.arange(8).reshape(2, 4))
    assert handles[1].tokens.tolist() == [*PROMPT, 4, 5, 6, 7]


def test_tokens_that_do_not_fit_one_are_committed_for_none(manager, handles):
    call = manager.commit_many
    raised = refused_alike(manager, handles, OutOfRangeError, call, handles, [[1], [6, 7], [10]])
    assert str(raised).startswith("entry 1 of the batch: tokens 0..2 can not be committed")
    raised = refused_alike(manager, handles, TokenMismatchError, call, handles, [[1], [7], [10]])
    assert raised.token == 0
    fork = manager.fork(handles[0])
    both = [handles[0], fork]
    manager.extend_many(both[:1], 3)
    other = manager.fork(both[0])
    refused_alike(
        manager,
        handles,
        WrongBlockStateError,
        call,
        [both[0], other],
        [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9]],
    )


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        ([1, 6], InvalidInputError, "got 2 lists of tokens, but there are 3 sequences"),
        (np.zeros((4, 1), int), InvalidInputError, "got 4 lists of tokens"),
        (np.zeros((3, 0), int), None, None),
        ([[], [], []], None, None),
        (np.zeros((3, 1, 1), int), InvalidInputError, "[sequences] or [sequences, tokens]"),
        (np.array(1), InvalidInputError, "0 axes"),
        (np.ones((3, 2), int)[:, :1], InvalidInputError, "not C-contiguous"),
        (np.zeros(3), InvalidInputError, "tokens have dtype float64"),
        (np.array([1, -6, 10]), InvalidInputError, "token 1 is -6"),
        ([1, -6, 10], InvalidInputError, "token 0 is -6"),
        ([1, 2**32, 10], InvalidInputError, "token 0 is 4294967296"),
        ([1, None, 10], TypeError, "not NoneType"),
        ("abc", TypeError, "not str"),
        (None, TypeError, "not iterable"),
    ],
)
def test_tokens_of_another_shape_or_kind_are_refused(manager, handles, tokens, error, text):
    if error is None:
        with unchanged(manager):
            manager.commit_many(handles, tokens)
        return
    raised = refused_alike(manager, handles, error, manager.commit_many, handles, tokens)
    assert text in str(raised)


# Tables, slots and counts


def test_tables_slots_and_counts_are_arrays_that_kernels_take(manager, handles):
    tables = manager.block_tables(handles)
    expected = np.array([[1, 2], [3, 0], [4, 5]], np.int32)
    assert_array_equal(tables, expected, strict=True)
    assert tables.flags.c_contiguous and tables.flags.writeable
    expected = np.array([4, 5, 6, 7, 8, 12, *range(16, 24)], np.int64)
    assert_array_equal(manager.slot_mappings(handles, 0), expected, strict=True)
    assert_array_equal(manager.slot_mappings(handles, [3, 1, 7], [5, 1, 8]), [7, 8, 23])
    assert_array_equal(manager.slot_mappings(handles, 0, 1), [4, 12, 16])
    assert manager.num_cached_tokens(handles).dtype == np.int64


def test_one_handle_can_be_asked_for_twice(manager, handles):
    twice = [handles[0], handles[0]]
    assert_array_equal(manager.block_tables(twice), [[1, 2], [1, 2]])
    assert_array_equal(manager.slot_mappings(twice, 4), [8, 8])


@pytest.mark.parametrize(
    ("starts", "ends", "error", "text"),
    [
        (0, [5, 2, 8], OutOfRangeError, "entry 1 of the batch: the range 0..2 is out of bounds"),
        ([0, 0, 9], None, OutOfRangeError, "entry 2 of the batch: the range 9..8 ends before"),
        ([0, 0], None, InvalidInputError, "got 2 starts, but there are 3 sequences"),
        (0, [1], InvalidInputError, "got 1 ends"),
        (-1, None, OutOfRangeError, "-1 is no position"),
        ([0, -1, 0], None, OutOfRangeError, "-1 is no position"),
        (0.5, None, TypeError, "float"),
    ],
)
def test_slots_of_tokens_that_are_not_there_are_refused(
    manager, handles, starts, ends, error, text
):
    raised = refused_alike(manager, handles, error, manager.slot_mappings, handles, starts, ends)
    assert text in str(raised)


# Handles


def calls(manager, handles):
    """All calls for many handles, as they are made for these."""
    num_handles = len(handles)
    return {
        "extend_many": lambda: manager.extend_many(handles),
        "commit_many": lambda: manager.commit_many(handles, [[]] * num_handles),
        "free_many": lambda: manager.free_many(handles),
        "block_tables": lambda: manager.block_tables(handles),
        "slot_mappings": lambda: manager.slot_mappings(handles, 0),
        "num_cached_tokens": lambda: manager.num_cached_tokens(handles),
    }


CALLS = list(calls(None, []))


@pytest.mark.parametrize("name", CALLS)
def test_no_handles_are_no_work(manager, name):
    with unchanged(manager):
        result = calls(manager, [])[name]()
    assert result is None or result.size == 0
    assert manager.block_tables([]).shape == (0, 0)
    assert manager.allocate_many([]) == []


def test_handles_come_in_any_iterable(manager, handles):
    expected = manager.block_tables(handles)
    for given in (tuple(handles), iter(handles), dict.fromkeys(handles)):
        assert_array_equal(manager.block_tables(given), expected)
    assert manager.extend_many(handle for handle in handles).size == 3


@pytest.mark.parametrize("name", CALLS)
def test_a_stale_handle_fails_the_call_for_all(manager, handles, name):
    handles[1].close()
    raised = refused_alike(manager, handles, StaleHandleError, calls(manager, handles)[name])
    assert raised.cache_id == handles[1].cache_id
    assert handles[0].is_valid and handles[2].is_valid


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_handle_of_another_manager_fails_the_call_for_all(manager, handles, name, dtype):
    other = new_manager(4, dtype=dtype)
    mixed = [*handles, other.allocate([1])]
    raised = refused_alike(manager, mixed, ForeignHandleError, calls(manager, mixed)[name])
    assert raised.cache_id == mixed[3].cache_id


@pytest.mark.parametrize("name", ["extend_many", "commit_many", "free_many"])
def test_a_handle_that_is_there_twice_fails_the_call_for_all(manager, handles, name):
    twice = [*handles, handles[1]]
    raised = refused_alike(manager, twice, InvalidInputError, calls(manager, twice)[name])
    cache_id = handles[1].cache_id
    assert str(raised) == f"the handle {cache_id} is given twice, at 1 and at 3"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("other", [None, 7, "paged-1", kvspan.BlockTable(4)])
def test_what_is_no_handle_fails_the_call_for_all(manager, handles, name, other):
    mixed = [*handles, other]
    before = state(handles)
    raised = refused(manager, TypeError, calls(manager, mixed)[name])
    assert "a PagedKvCacheHandle is wanted" in str(raised)
    assert "in entry 3 of the batch" in raised.__notes__
    assert state(handles) == before


def test_sequences_that_are_freed_together_go_back_as_if_freed_one_by_one():
    ones, many = new_manager(16), new_manager(16)
    prompts = [PROMPT, [1] * 5, [2] * 9]
    alone = [start(ones, prompt) for prompt in prompts]
    together = [start(many, prompt) for prompt in prompts]
    for handle in alone:
        ones.free(handle)
    many.free_many(together)
    assert many.inspect() == ones.inspect()
    assert not any(handle.is_valid for handle in together)
    assert_nothing_leaks(many)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_all_element_types_have_all_calls(dtype):
    manager = new_manager(16, dtype=dtype)
    handles = manager.allocate_many([PROMPT, [1]])
    manager.extend_many(handles)
    manager.commit_many(handles, [[*PROMPT, 1], [1, 2]])
    assert manager.block_tables(handles).shape == (2, 3)
    assert manager.slot_mappings(handles, 0).size == 13
    assert manager.num_cached_tokens(handles).tolist() == [0, 0]
    manager.free_many(handles)
    assert_nothing_leaks(manager)


def test_threads_that_use_the_same_handles_wait_for_each_other():
    manager = new_manager(4096, storage=False)
    handles = manager.allocate_many([[number] for number in range(16)])
    failures = []

    def work(order):
        try:
            for _ in range(200):
                manager.extend_many(order)
                manager.block_tables(order)
                manager.extend(order[0])
        except BaseException as error:
            failures.append(error)

    orders = [handles, handles[::-1], handles[8:] + handles[:8]]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(lengths(handles)) == 16 + 3 * 200 * 16 + 3 * 200
    manager.check_integrity()
    manager.free_many(handles)
    assert_nothing_leaks(manager)
