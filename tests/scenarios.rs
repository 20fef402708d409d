//! Scenarios with known block ids, reference counts, hits and queue orders. `block_scenarios.json` says
//! what its fields mean; ours is the variant `head`.

mod common {
    pub(crate) mod data;
    pub(crate) mod sequence;
}

use std::collections::HashMap;

use common::data::test_data;
use common::sequence::{Sequence, is_out_of_blocks};
use kvspan::{BlockId, Duplicates, PrefixCache};
use serde_json::Value;

struct Scenario {
    cache: PrefixCache,
    sequences: HashMap<String, Sequence>,
    block_size: usize,
    caching: bool,
}

impl Scenario {
    fn new(scenario: &Value) -> Self {
        let duplicates =
            if scenario["merge"] == false { Duplicates::Keep } else { Duplicates::Merge };
        // The null block is one of theirs, and comes on top of ours.
        let cache = PrefixCache::new(number(&scenario["num_blocks"]) - 1, duplicates)
            .expect("a small pool");
        Self {
            cache,
            sequences: HashMap::new(),
            block_size: number(&scenario["block_size"]),
            caching: scenario["caching"] == true,
        }
    }

    fn step(&mut self, op: &Value) {
        let request = op["req"].as_str().unwrap_or_default();
        match op["op"].as_str().expect("a name") {
            "start" => self.start(request, op),
            "append" => self.append(request, op),
            "free" => {
                let sequence = self.sequences.remove(request).expect("it was started");
                sequence.free(&mut self.cache).expect("it holds its blocks");
            }
            "check" => self.check(op),
            other => panic!("unknown operation {other}"),
        }
        self.cache.check_integrity().expect("nothing is lost");
        let held =
            self.sequences.values().flat_map(|sequence| sequence.table.physical_blocks.clone());
        self.cache.pool().check_holders(held).expect("each block has its holders");
    }

    fn start(&mut self, request: &str, op: &Value) {
        let lookahead = op.get("lookahead").map_or(0, number);
        let (block_size, caching) = (self.block_size, self.caching);
        let started = Sequence::start(
            &mut self.cache,
            block_size,
            &tokens(&op["tokens"]),
            lookahead,
            caching,
        );
        if op["fails"] == true {
            assert!(is_out_of_blocks(&started));
            return;
        }
        let (sequence, num_hits) = started.expect("there is room");
        let (hits, new) = sequence.table.logical_to_physical.split_at(num_hits);
        check_list(op, "hit", hits);
        check_number(op, "hit_tokens", num_hits * block_size);
        check_list(op, "new", new);
        check_number(op, "new_count", new.len());
        self.check_hashed(op);
        self.sequences.insert(request.to_owned(), sequence);
    }

    fn append(&mut self, request: &str, op: &Value) {
        let sequence = self.sequences.get_mut(request).expect("it was started");
        let new = sequence.append(&mut self.cache, &tokens(&op["tokens"])).expect("there is room");
        check_number(op, "new_count", new.len());
        let last = *sequence.table.logical_to_physical.last().expect("it has blocks");
        if let Some(hashed) = op.get("last_block_hashed") {
            assert_eq!(self.is_hashed(last), *hashed);
        }
        self.check_hashed(op);
    }

    fn check(&self, op: &Value) {
        let pool = self.cache.pool();
        check_number(op, "free", pool.num_free() + pool.num_cached());
        check_list(op, "queue", &pool.free_queue().map(BlockId::get).collect::<Vec<_>>());
        for (block, count) in op["ref"].as_object().into_iter().flatten() {
            let block = id(block.parse().expect("a block id"));
            assert_eq!(pool.reference_count(block), Ok(number(count)), "of block {block}");
        }
    }

    fn check_hashed(&self, op: &Value) {
        for (field, hashed) in [("hashed", true), ("unhashed", false)] {
            for block in op[field].as_array().into_iter().flatten() {
                assert_eq!(
                    self.is_hashed(number(block).try_into().expect("a block id")),
                    hashed,
                    "block {block}"
                );
            }
        }
    }

    fn is_hashed(&self, block: u32) -> bool {
        self.cache.key(id(block)).expect("it is in the pool").is_some()
    }
}

/// From runs like `["fill", value, count]` and `["range", from, to]`.
fn tokens(runs: &Value) -> Vec<u32> {
    let run = |run: &Value| -> Vec<u32> {
        let [a, b] = [1, 2].map(|place| u32::try_from(number(&run[place])).expect("a token"));
        match run[0].as_str().expect("a name") {
            "fill" => (0..b).map(|_| a).collect(),
            "range" => (a..b).collect(),
            other => panic!("unknown run {other}"),
        }
    };
    runs.as_array().expect("a list").iter().flat_map(run).collect()
}

fn id(block: u32) -> BlockId {
    BlockId::new(block).expect("not the null block")
}

fn number(value: &Value) -> usize {
    value.as_u64().and_then(|number| number.try_into().ok()).expect("a number")
}

fn check_number(op: &Value, field: &str, found: usize) {
    if let Some(expected) = op.get(field) {
        assert_eq!(found, number(expected), "{field}");
    }
}

fn check_list(op: &Value, field: &str, found: &[u32]) {
    if let Some(expected) = op.get(field) {
        let expected = expected.get("head").unwrap_or(expected);
        assert_eq!(&Value::from(found), expected, "{field}");
    }
}

#[test]
fn every_scenario_ends_as_recorded() {
    let Some(file) = test_data("block_scenarios.json") else { return };
    let file: Value = serde_json::from_reader(file).unwrap();
    for description in file["scenarios"].as_array().unwrap() {
        eprintln!("{}: {}", description["id"], description["title"]);
        let mut scenario = Scenario::new(description);
        for op in description["ops"].as_array().unwrap() {
            eprintln!("  {} {}", op["op"], op["req"]);
            scenario.step(op);
        }
    }
}
