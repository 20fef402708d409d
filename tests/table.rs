//! Block tables: what each method means, what it refuses, and random calls beside a naive model.

use kvspan::{BlockId, BlockTable, KvError};
use proptest::collection::vec;
use proptest::prelude::*;

fn ids<const N: usize>(ids: [u32; N]) -> [BlockId; N] {
    ids.map(id)
}

fn id(block: u32) -> BlockId {
    BlockId::new(block).expect("not the null block")
}

fn table<const N: usize>(block_size: usize, blocks: [u32; N], len: usize) -> BlockTable {
    let mut table = BlockTable::new(block_size);
    table.add_blocks(&ids(blocks)).expect("each is there once");
    table.extend_sequence(len).expect("there is room");
    table
}

/// Asserts that `call` fails with `error` and changes nothing.
fn refuses<R: std::fmt::Debug + PartialEq>(
    table: &BlockTable,
    call: impl FnOnce(&mut BlockTable) -> kvspan::Result<R>,
    error: KvError,
) {
    let mut changed = table.clone();
    assert_eq!(call(&mut changed), Err(error));
    assert_eq!(changed, *table);
}

#[test]
fn both_lists_name_the_blocks_in_order() {
    let table = table(16, [7, 9], 17);
    assert_eq!(table.physical_blocks, ids([7, 9]));
    assert_eq!(table.logical_to_physical, [7, 9]);
    assert_eq!((table.num_blocks(), table.sequence_length, table.block_size), (2, 17, 16));
}

#[test]
fn free_space_is_counted_in_tokens() {
    let free = |table: BlockTable| (table.has_free_space(), table.free_tokens());
    assert_eq!(free(table(16, [], 0)), (false, 0));
    assert_eq!(free(table(16, [1], 0)), (true, 16));
    assert_eq!(free(table(16, [1, 2], 17)), (true, 15));
    assert_eq!(free(table(16, [1, 2], 32)), (false, 0));
}

#[test]
fn blocks_needed_are_rounded_up() {
    let needed = |length| BlockTable::blocks_needed_for_length(length, 16);
    assert_eq!([0, 1, 16, 17].map(needed), [0, 1, 1, 2]);
    assert_eq!(needed(usize::MAX), 1 << (usize::BITS - 4));
}

#[test]
fn blocks_of_no_tokens_hold_nothing_and_break_nothing() {
    let table = table(0, [1, 2], 0);
    assert_eq!(BlockTable::blocks_needed_for_length(0, 0), 0);
    assert_eq!(BlockTable::blocks_needed_for_length(1, 0), usize::MAX);
    assert_eq!((table.free_tokens(), table.has_free_space()), (0, false));
    assert_eq!(table.slot_mapping(0..0), Ok(Vec::new()));
    let no_block_size = || KvError::InvalidConfig { field: "block_size" };
    refuses(&table, |table| table.extend_sequence(1), no_block_size());
    refuses(&table, |table| table.slot(0), no_block_size());
    refuses(&table, |table| table.slot_mapping(0..1), no_block_size());
    assert_eq!(table.clone().truncate(0), Ok(ids([1, 2]).to_vec()));
}

#[test]
fn a_sequence_grows_only_within_its_blocks() {
    let full = table(4, [3], 4);
    let exceeded = |range| KvError::CapacityExceeded { range, capacity: 4 };
    refuses(&full, |table| table.extend_sequence(1), exceeded(4..5));
    refuses(&full, |table| table.extend_sequence(usize::MAX), exceeded(4..usize::MAX));
    assert_eq!(full.clone().extend_sequence(0), Ok(()));
}

#[test]
fn a_block_is_added_once() {
    let present = table(4, [3, 5], 0);
    let twice = |block| KvError::DuplicateBlock { block };
    refuses(&present, |table| table.add_blocks(&ids([5])), twice(5));
    refuses(&present, |table| table.add_blocks(&ids([4, 3])), twice(3));
    refuses(&present, |table| table.add_blocks(&ids([9, 8, 9])), twice(9));
}

#[test]
fn truncating_returns_the_blocks_that_are_not_needed() {
    let mut table = table(4, [3, 5, 2], 9);
    refuses(
        &table,
        |table| table.truncate(10),
        KvError::RangeOutOfBounds { start: 0, end: 10, len: 9 },
    );
    assert_eq!(table.truncate(9), Ok(vec![]));
    assert_eq!(table.truncate(5), Ok(ids([2]).to_vec()));
    assert_eq!(table.truncate(4), Ok(ids([5]).to_vec()));
    assert_eq!((table.sequence_length, table.logical_to_physical.as_slice()), (4, &[3][..]));
    assert_eq!(table.truncate(0), Ok(ids([3]).to_vec()));
    assert_eq!(table, BlockTable::new(4));
}

#[test]
fn a_block_can_be_replaced_by_one_that_is_not_in_the_table() {
    let mut table = table(4, [3, 5], 6);
    refuses(
        &table,
        |table| table.replace_block(2, id(9)),
        KvError::BlockIndexOutOfRange { block_index: 2, num_blocks: 2 },
    );
    refuses(&table, |table| table.replace_block(1, id(3)), KvError::DuplicateBlock { block: 3 });
    assert_eq!(table.replace_block(1, id(5)), Ok(id(5)));
    assert_eq!(table.replace_block(1, id(9)), Ok(id(5)));
    assert_eq!(table.logical_to_physical, [3, 9]);
    assert_eq!(table.validate(), Ok(()));
}

#[test]
fn slots_are_known_for_all_tokens_that_there_are_blocks_for() {
    let table = table(4, [5, 2], 3);
    assert_eq!(table.slot(7), Ok(11));
    assert_eq!(table.slot_mapping(0..8), Ok(vec![20, 21, 22, 23, 8, 9, 10, 11]));
    assert_eq!(table.slot_mapping(3..5), Ok(vec![23, 8]));
    assert_eq!(table.slot_mapping(99..99), Ok(vec![]));
    let exceeded = |range| KvError::CapacityExceeded { range, capacity: 8 };
    refuses(&table, |table| table.slot(8), exceeded(8..9));
    refuses(&table, |table| table.slot(usize::MAX), exceeded(usize::MAX..usize::MAX));
    refuses(&table, |table| table.slot_mapping(7..9), exceeded(7..9));
    let inverted = KvError::InvertedRange { start: 3, end: 2 };
    #[expect(clippy::reversed_empty_ranges, reason = "it is what must be refused")]
    refuses(&table, |table| table.slot_mapping(3..2), inverted);
}

#[test]
fn a_slot_that_is_too_large_a_number_is_an_error() {
    let table = table(usize::MAX, [2], 1);
    refuses(&table, |table| table.slot(0), KvError::SlotOverflow { token: 0 });
    refuses(&table, |table| table.slot_mapping(0..1), KvError::SlotOverflow { token: 0 });
}

#[test]
fn more_slots_than_there_is_memory_for_are_an_error() {
    let size = usize::MAX / 2;
    let table = table(size, [1], 1);
    let too_much = KvError::OutOfMemory { bytes: usize::MAX };
    refuses(&table, |table| table.slot_mapping(0..size), too_much);
}

/// The fields are public; whatever is in them, the worst is an error.
#[test]
fn contradicting_fields_are_found_and_never_cause_a_panic() {
    let good = table(4, [3, 5], 6);
    let broken = [
        BlockTable { logical_to_physical: vec![3], ..good.clone() },
        BlockTable { logical_to_physical: vec![5, 3], ..good.clone() },
        BlockTable {
            physical_blocks: ids([3, 3]).to_vec(),
            logical_to_physical: vec![3, 3],
            ..good.clone()
        },
        BlockTable { sequence_length: 9, ..good.clone() },
        BlockTable { sequence_length: usize::MAX, ..good.clone() },
        BlockTable { block_size: 0, ..good.clone() },
    ];
    assert_eq!(good.validate(), Ok(()));
    for mut table in broken {
        assert!(matches!(table.validate(), Err(KvError::InconsistentTable { .. })), "{table:?}");
        let _ = (table.free_tokens(), table.has_free_space());
        let _ = (table.slot(5), table.slot_mapping(0..8));
        let _ = (table.extend_sequence(1), table.replace_block(1, id(9)));
        let _ = (table.add_blocks(&ids([9])), table.truncate(1));
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_table_survives_json_and_a_broken_one_is_not_read() {
    let json = r#"{"physical_blocks":[7,9],"logical_to_physical":[7,9],"sequence_length":17,"block_size":16}"#;
    let table = table(16, [7, 9], 17);
    assert_eq!(serde_json::to_string(&table).unwrap(), json);
    assert_eq!(serde_json::from_str::<BlockTable>(json).unwrap(), table);
    for (good, bad) in [("[7,9]", "[7,7]"), ("[7,9]", "[0,9]"), (":17", ":33"), (":[7", ":[8")] {
        let bad = json.replacen(good, bad, if bad == "[7,7]" { 2 } else { 1 });
        assert!(serde_json::from_str::<BlockTable>(&bad).is_err(), "{bad}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Add(Vec<u32>),
    Extend(usize),
    Truncate(usize),
    Replace(usize, u32),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        vec(1_u32..12, 0..4).prop_map(Op::Add),
        (0_usize..8).prop_map(Op::Extend),
        (0_usize..20).prop_map(Op::Truncate),
        (0_usize..6, 1_u32..12).prop_map(|(index, block)| Op::Replace(index, block)),
    ]
}

/// A list with the slot of each token that there is room for, and a length.
#[derive(Debug, Default)]
struct Model {
    blocks: Vec<u32>,
    len: usize,
}

impl Model {
    fn slots(&self, block_size: usize) -> Vec<usize> {
        let slots = |&block: &u32| {
            let first = usize::try_from(block).expect("a small number") * block_size;
            first..first + block_size
        };
        self.blocks.iter().flat_map(slots).collect()
    }

    /// Whether it could be done.
    fn step(&mut self, op: &Op, block_size: usize) -> bool {
        match op {
            Op::Add(new) => {
                let mut all = self.blocks.clone();
                for block in new {
                    if all.contains(block) {
                        return false;
                    }
                    all.push(*block);
                }
                self.blocks = all;
            }
            Op::Extend(additional) => {
                if self.len + additional > self.blocks.len() * block_size {
                    return false;
                }
                self.len += additional;
            }
            Op::Truncate(new_len) => {
                if *new_len > self.len {
                    return false;
                }
                self.len = *new_len;
                while self.blocks.len() * block_size >= self.len + block_size {
                    self.blocks.pop();
                }
            }
            Op::Replace(index, block) => {
                let taken = self.blocks.iter().position(|other| other == block);
                if *index >= self.blocks.len() || taken.is_some_and(|taken| taken != *index) {
                    return false;
                }
                self.blocks[*index] = *block;
            }
        }
        true
    }
}

proptest! {
    #[test]
    fn a_table_does_what_a_list_of_slots_does(
        block_size in 1_usize..5,
        ops in vec(any_op(), 0..30),
    ) {
        let mut table = BlockTable::new(block_size);
        let mut model = Model::default();
        for op in ops {
            let before = table.clone();
            let done = match &op {
                Op::Add(blocks) => {
                    let blocks = blocks.iter().map(|&block| id(block)).collect::<Vec<_>>();
                    table.add_blocks(&blocks).is_ok()
                }
                Op::Extend(additional) => table.extend_sequence(*additional).is_ok(),
                Op::Truncate(new_len) => match table.truncate(*new_len) {
                    Ok(dropped) => {
                        let kept = table.num_blocks();
                        prop_assert_eq!(&dropped, &before.physical_blocks[kept..]);
                        true
                    }
                    Err(_) => false,
                },
                Op::Replace(index, block) => table.replace_block(*index, id(*block)).is_ok(),
            };
            prop_assert_eq!(done, model.step(&op, block_size), "{:?}", op);
            if !done {
                prop_assert_eq!(&table, &before);
            }
            prop_assert_eq!(table.validate(), Ok(()));
            prop_assert_eq!(&table.logical_to_physical, &model.blocks);
            prop_assert_eq!(table.sequence_length, model.len);
            let slots = model.slots(block_size);
            prop_assert_eq!(table.free_tokens(), slots.len() - model.len);
            prop_assert_eq!(table.slot_mapping(0..slots.len()), Ok(slots));
        }
    }
}
