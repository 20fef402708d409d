"""Block tables: what they say, what they refuse, and that they stay consistent."""

import copy
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspan
from kvspan import BlockTable
from kvspan.errors import (
    BlockIndexError,
    CapacityExceededError,
    DuplicateBlockError,
    InvalidConfigError,
    InvalidInputError,
    OutOfRangeError,
    SlotOverflowError,
    UnknownBlockError,
)


@pytest.fixture
def table():
    return BlockTable(4, [7, 9, 2], 9)


def fields(table):
    return table.block_size, table.physical_blocks, table.sequence_length


def refused(table, error, call, *arguments):
    """The exception of a call that must raise just `error`, and must leave the table as it was."""
    before = copy.copy(table)
    with pytest.raises(error) as caught:
        call(*arguments)
    assert type(caught.value) is error
    assert table == before
    return caught.value


def test_new_table_is_empty():
    table = BlockTable(16)
    assert fields(table) == (16, [], 0)
    assert (table.num_blocks, table.free_tokens, table.has_free_space) == (0, 0, False)
    assert BlockTable(block_size=4, physical_blocks=(3,), sequence_length=2) == BlockTable(
        4, [3], 2
    )


def test_properties(table):
    assert table.logical_to_physical == table.physical_blocks == [7, 9, 2]
    assert (table.num_blocks, table.sequence_length, table.block_size) == (3, 9, 4)
    assert (table.free_tokens, table.has_free_space) == (3, True)
    table.extend_sequence(3)
    assert (table.free_tokens, table.has_free_space) == (0, False)


def test_lists_are_new_ones(table):
    table.physical_blocks.clear()
    table.logical_to_physical.append(3)
    assert table.physical_blocks == [7, 9, 2]


@pytest.mark.parametrize(
    "blocks",
    [[3, 4], (3, 4), range(3, 5), np.array([3, 4]), np.array([3, 4], np.uint32), memoryview(b"")],
    ids=str,
)
def test_blocks_come_in_many_forms(table, blocks):
    if isinstance(blocks, memoryview):
        blocks = memoryview(np.array([3, 4], np.int32))
    table.add_blocks(blocks)
    assert table.physical_blocks == [7, 9, 2, 3, 4]


def test_growing_and_shrinking():
    table = BlockTable(4)
    table.add_blocks([7])
    table.extend_sequence(3)
    table.add_blocks([])
    table.extend_sequence(0)
    table.add_blocks([9, 2])
    table.extend_sequence(6)
    assert fields(table) == (4, [7, 9, 2], 9)
    assert table.truncate(9) == []
    assert table.truncate(4) == [9, 2]
    assert table.truncate(0) == [7]
    assert fields(table) == (4, [], 0)


def test_replacing(table):
    assert table.replace_block(1, 5) == 9
    assert table.replace_block(1, 5) == 5
    assert table.replace_block(np.int64(0), np.uint8(9)) == 7
    assert table.physical_blocks == [9, 5, 2]


def test_slots(table):
    assert [table.slot(position) for position in (0, 3, 4, 8, 11)] == [28, 31, 36, 8, 11]
    slots = table.slot_mapping(2, 10)
    assert (slots.dtype, slots.tolist()) == (np.int64, [30, 31, 36, 37, 38, 39, 8, 9])
    assert table.slot_mapping(5, 5).tolist() == table.slot_mapping(99, 99).tolist() == []
    slots[:] = 0
    assert table.slot(2) == 30


@pytest.mark.parametrize(
    ("length", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (2**64 - 1, 2**60)]
)
def test_blocks_needed(length, blocks):
    assert BlockTable.blocks_needed_for_length(length, 16) == blocks


def test_equality_is_that_of_the_fields(table):
    assert table == BlockTable(4, [7, 9, 2], 9)
    assert table == table
    for other in [
        BlockTable(4, [7, 9, 2], 8),
        BlockTable(4, [7, 2, 9], 9),
        BlockTable(5, [7, 9, 2], 9),
    ]:
        assert table != other
    assert table != (4, [7, 9, 2], 9)
    assert table != None  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)


def test_copies_and_pickles_are_tables_of_their_own(table):
    for same in [
        copy.copy(table),
        copy.deepcopy(table),
        *(pickle.loads(pickle.dumps(table, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
        eval(repr(table), vars(kvspan)),
    ]:
        assert type(same) is BlockTable
        assert same == table
        same.truncate(0)
        assert fields(table) == (4, [7, 9, 2], 9)


def test_representation_makes_it_again(table):
    assert repr(table) == "BlockTable(block_size=4, physical_blocks=[7, 9, 2], sequence_length=9)"


def test_it_can_be_referred_to_weakly(table):
    reference = weakref.ref(table)
    assert reference() is table


def test_what_is_no_table_is_refused():
    for arguments in [(0,), (-1,), (2**64,)]:
        with pytest.raises(InvalidConfigError, match="must be at least 1"):
            BlockTable(*arguments)
    with pytest.raises(InvalidConfigError, match="block_size must be at least 1, but it is 0"):
        BlockTable.blocks_needed_for_length(1, 0)
    with pytest.raises(CapacityExceededError, match=r"tokens 0..9 do not fit: the capacity is 8"):
        BlockTable(4, [1, 2], 9)
    for bad in [None, "4", 4.0]:
        with pytest.raises(TypeError):
            BlockTable(bad)


def test_blocks_that_can_not_stand_in_a_table_are_refused(table):
    error = refused(table, DuplicateBlockError, table.add_blocks, [3, 9])
    assert (error.block, str(error)) == (9, "block 9 would be in the block table twice")
    refused(table, DuplicateBlockError, table.add_blocks, [3, 4, 3])
    refused(table, DuplicateBlockError, table.replace_block, 0, 9)
    for call in [lambda: table.add_blocks([3, 0]), lambda: table.replace_block(0, 0)]:
        error = refused(table, UnknownBlockError, call)
        assert str(error) == "block 0 is the null block, which no sequence has"
    error = refused(table, UnknownBlockError, table.replace_block, 0, -3)
    assert (error.block, str(error)) == (-3, "there is no block -3: ids are 1 to 2**32 - 1")
    refused(table, UnknownBlockError, table.replace_block, 0, 2**32)
    error = refused(table, InvalidInputError, table.add_blocks, [3, -1])
    assert str(error) == "block 1 is -1, but it must be 0 to 4294967295"
    error = refused(table, TypeError, table.add_blocks, [3, "4"])
    assert str(error) == "block 1 must be an integer, not str"
    error = refused(table, TypeError, table.add_blocks, 3)
    assert "blocks must be an array of int32" in str(error)


def test_what_is_past_the_end_is_refused(table):
    error = refused(table, BlockIndexError, table.replace_block, 3, 4)
    assert str(error) == "the sequence has no block at index 3: it has 3"
    error = refused(table, CapacityExceededError, table.extend_sequence, 4)
    assert str(error) == "tokens 9..13 do not fit: the capacity is 12 tokens"
    refused(table, CapacityExceededError, table.extend_sequence, 2**64 - 1)
    error = refused(table, OutOfRangeError, table.truncate, 10)
    assert str(error) == "the range 0..10 is out of bounds: 9 tokens are stored"
    refused(table, CapacityExceededError, table.slot, 12)
    refused(table, CapacityExceededError, table.slot_mapping, 11, 13)
    refused(table, CapacityExceededError, table.slot_mapping, 0, 2**63)
    error = refused(table, OutOfRangeError, table.slot_mapping, 3, 2)
    assert str(error) == "the range 3..2 ends before it starts"
    for call in [table.slot, table.truncate, table.extend_sequence]:
        error = refused(table, OutOfRangeError, call, -1)
        assert "-1 is no position" in str(error)


def test_slots_that_are_too_large_a_number_are_refused():
    table = BlockTable(2**62, [1, 2])
    assert table.slot(2**62 - 1) == 2**63 - 1
    error = refused(table, SlotOverflowError, table.slot_mapping, 2**62, 2**62 + 1)
    assert str(error) == f"the slot of token {2**62} overflows"
    refused(BlockTable(2**62, [9]), SlotOverflowError, BlockTable(2**62, [9]).slot, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add_blocks"), st.lists(st.integers(-1, 9), max_size=4)),
            st.tuples(st.just("extend_sequence"), st.integers(0, 9)),
            st.tuples(st.just("truncate"), st.integers(0, 20)),
            st.tuples(st.just("replace_block"), st.integers(0, 5), st.integers(-1, 9)),
        ),
        max_size=30,
    )
)
def test_no_sequence_of_calls_makes_a_table_inconsistent(calls):
    table = BlockTable(3)
    for name, *arguments in calls:
        before = copy.copy(table)
        try:
            getattr(table, name)(*arguments)
        except kvspan.KvCacheError:
            assert table == before
        blocks, length = table.physical_blocks, table.sequence_length
        assert len(set(blocks)) == len(blocks) == table.num_blocks
        assert 0 not in blocks
        assert 0 <= length <= 3 * len(blocks)
        assert table.free_tokens == 3 * len(blocks) - length
        slots = [3 * blocks[at // 3] + at % 3 for at in range(length)]
        assert table.slot_mapping(0, length).tolist() == slots
