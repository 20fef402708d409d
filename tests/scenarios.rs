//! Scenarios with known block ids, reference counts, hits and queue orders. `block_scenarios.json` says
//! what its fields mean; ours is the variant `head`.

mod common {
    pub(crate) mod data;
}

use std::collections::HashMap;

use common::data::test_data;
use kvspan::{
    BlockId, BlockPicture, Duplicates, KvCacheHandle, KvCacheManager, KvCacheManagerConfig,
    KvError, PagedKvCacheHandle, RequestOptions, Storage,
};
use serde_json::Value;

struct Scenario {
    manager: KvCacheManager,
    handles: HashMap<String, PagedKvCacheHandle>,
}

impl Scenario {
    fn new(scenario: &Value) -> Self {
        let duplicates =
            if scenario["merge"] == false { Duplicates::Keep } else { Duplicates::Merge };
        let config = KvCacheManagerConfig {
            // The null block is one of theirs, and comes on top of ours.
            num_blocks: number(&scenario["num_blocks"]) - 1,
            block_size: number(&scenario["block_size"]),
            storage: Storage::Elsewhere,
            prefix_caching: scenario["caching"] == true,
            duplicates,
            ..KvCacheManagerConfig::default()
        };
        let manager = KvCacheManager::new(config).expect("a small pool");
        Self { manager, handles: HashMap::new() }
    }

    fn step(&mut self, op: &Value) {
        let request = op["req"].as_str().unwrap_or_default();
        match op["op"].as_str().expect("a name") {
            "start" => self.start(request, op),
            "append" => self.append(request, op),
            "free" => {
                let handle = self.handles.remove(request).expect("it was started");
                self.manager.free(&handle).expect("it is alive");
            }
            "check" => self.check(op),
            other => panic!("unknown operation {other}"),
        }
        self.manager.check_integrity().expect("nothing is lost");
    }

    fn start(&mut self, request: &str, op: &Value) {
        let options = RequestOptions {
            lookahead: op.get("lookahead").map_or(0, number),
            request_id: Some(request),
            ..RequestOptions::default()
        };
        let tokens = tokens(&op["tokens"]);
        let allocated = self.manager.allocate(&tokens, &options);
        if op["fails"] == true {
            assert!(matches!(allocated, Err(KvError::OutOfBlocks { .. })));
            return;
        }
        let mut handle = allocated.expect("there is room");
        let num_cached = handle.num_cached_tokens();
        self.manager.commit(&mut handle, &tokens[num_cached..]).expect("the tokens are its own");
        let table = handle.block_table();
        let (hits, new) = table.logical_to_physical.split_at(num_cached / table.block_size);
        check_list(op, "hit", hits);
        check_number(op, "hit_tokens", num_cached);
        check_list(op, "new", new);
        check_number(op, "new_count", new.len());
        self.check_hashed(op);
        self.handles.insert(request.to_owned(), handle);
    }

    fn append(&mut self, request: &str, op: &Value) {
        let handle = self.handles.get_mut(request).expect("it was started");
        let (tokens, before) = (tokens(&op["tokens"]), handle.block_table().num_blocks());
        self.manager.extend(handle, tokens.len()).expect("there is room");
        check_number(op, "new_count", handle.block_table().num_blocks() - before);
        self.manager.commit(handle, &tokens).expect("there is room for them");
        let last = *handle.block_table().logical_to_physical.last().expect("it has blocks");
        if let Some(hashed) = op.get("last_block_hashed") {
            assert_eq!(self.picture(last).key.is_some(), *hashed);
        }
        self.check_hashed(op);
    }

    fn check(&self, op: &Value) {
        let (stats, queue) = (self.manager.stats(), self.manager.inspect().free_queue);
        check_number(op, "free", stats.num_free + stats.num_cached);
        check_list(op, "queue", &queue.into_iter().map(BlockId::get).collect::<Vec<_>>());
        for (block, count) in op["ref"].as_object().into_iter().flatten() {
            let picture = self.picture(block.parse().expect("a block id"));
            assert_eq!(picture.reference_count, number(count), "of block {block}");
        }
    }

    fn check_hashed(&self, op: &Value) {
        for (field, hashed) in [("hashed", true), ("unhashed", false)] {
            for block in op[field].as_array().into_iter().flatten() {
                let picture = self.picture(number(block).try_into().expect("a block id"));
                assert_eq!(picture.key.is_some(), hashed, "block {block}");
            }
        }
    }

    fn picture(&self, block: u32) -> BlockPicture {
        let blocks = self.manager.inspect().blocks;
        *blocks.iter().find(|picture| picture.block.get() == block).expect("it is in the pool")
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
