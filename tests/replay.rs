//! A recorded trace of requests against pool and prefix index alone: each request's hits are known, and
//! so is what is cached at the end.

mod common {
    pub(crate) mod data;
}

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::iter;
use std::sync::LazyLock;

use common::data::test_data;
use flate2::Crc;
use flate2::read::GzDecoder;
use kvspan::{BlockId, BlockKey, Duplicates, KeyChain, KeyRoot, PrefixCache, Result};
use serde_json::Value;

/// Tokens that an id of the trace stands for.
const BLOCK_SIZE: usize = 512;

struct Request {
    num_tokens: usize,
    /// Of all its blocks. If the last one is partial, its key names it nevertheless.
    keys: Vec<BlockKey>,
    /// For which nobody else asks.
    private_key: BlockKey,
}

impl Request {
    fn full_keys(&self) -> &[BlockKey] {
        &self.keys[..self.num_tokens / BLOCK_SIZE]
    }

    fn reusable_keys(&self) -> &[BlockKey] {
        &self.keys[..(self.num_tokens - 1) / BLOCK_SIZE]
    }

    fn has_partial_block(&self) -> bool {
        self.full_keys().len() < self.keys.len()
    }
}

/// Where in the queue a partial block goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Partial {
    /// Ours.
    Head,
    /// Where others put it, and where ours goes if it has a key.
    Tail,
}

#[derive(Debug, PartialEq)]
struct Outcome {
    hits: Vec<usize>,
    evictions: u64,
    cached_at_the_end: usize,
    peak_used: usize,
}

fn conversation() -> Option<&'static [Request]> {
    static REQUESTS: LazyLock<Option<Vec<Request>>> = LazyLock::new(read_conversation);
    REQUESTS.as_deref()
}

/// An id of the trace stands for its block and all before it, so that a token for each id makes keys
/// that are equal where those of the trace are.
fn read_conversation() -> Option<Vec<Request>> {
    let trace = BufReader::new(GzDecoder::new(test_data("traces/conversation_packed.jsonl.gz")?));
    let mut private = chain(b"private");
    let request = |line: std::io::Result<String>| {
        let request: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        let num_tokens = number(&request[1]);
        let mut chain = chain(b"conversation");
        for run in request[3].as_array().expect("a list") {
            let (first, count) = match run.as_array() {
                Some(run) => (number(&run[0]), number(&run[1])),
                None => (number(run), 1),
            };
            let ids = (first..first + count).map(|id| u32::try_from(id).expect("a small number"));
            chain.extend(&ids.collect::<Vec<_>>());
        }
        assert_eq!(chain.block_keys().len(), num_tokens.div_ceil(BLOCK_SIZE));
        private.extend(&[0]);
        let private_key = *private.block_keys().last().expect("one a request");
        Request { num_tokens, keys: chain.block_keys().to_vec(), private_key }
    };
    Some(trace.lines().map(request).collect())
}

fn chain(namespace: &[u8]) -> KeyChain {
    let root = KeyRoot { namespace: Some(namespace), ..KeyRoot::default() };
    root.key().and_then(|root| KeyChain::new(root, 1)).expect("1 is a block size")
}

fn number(value: &Value) -> usize {
    value.as_u64().and_then(|number| number.try_into().ok()).expect("a number")
}

/// Serves one request after the other, each of which is over before the next one comes.
fn replay(
    requests: &[Request],
    capacity: usize,
    duplicates: Duplicates,
    partial: Partial,
) -> Result<Outcome> {
    let mut cache = PrefixCache::new(capacity, duplicates)?;
    let mut hits = Vec::new();
    let mut peak_used = 0;
    for request in requests {
        let mut blocks = Vec::new();
        hits.push(cache.acquire(request.reusable_keys(), request.keys.len(), &mut blocks)?);
        peak_used = peak_used.max(cache.pool().num_in_use());
        commit(&mut cache, &mut blocks, request.full_keys())?;
        if partial == Partial::Tail && request.has_partial_block() {
            let last = blocks.len() - 1;
            commit(&mut cache, &mut blocks[last..], &[request.private_key])?;
        }
        cache.give_back(&blocks)?;
    }
    cache.check_integrity()?;
    cache.pool().check_holders(iter::empty())?;

    let all_private = requests.iter().map(|request| request.private_key).collect::<HashSet<_>>();
    let cached = cache.pool().free_queue().filter_map(|block| cache.key(block).ok().flatten());
    let (private, public): (HashSet<&BlockKey>, HashSet<&BlockKey>) =
        cached.partition(|&key| all_private.contains(key));
    let committed_privately = match partial {
        Partial::Head => 0,
        Partial::Tail => requests.iter().filter(|request| request.has_partial_block()).count(),
    };
    let evicted_privately = u64::try_from(committed_privately - private.len());
    Ok(Outcome {
        hits,
        evictions: cache.num_evictions() - evicted_privately.expect("a small number"),
        cached_at_the_end: public.len(),
        peak_used,
    })
}

fn commit(cache: &mut PrefixCache, blocks: &mut [BlockId], keys: &[BlockKey]) -> Result<()> {
    blocks.iter_mut().zip(keys).try_for_each(|(block, key)| {
        *block = cache.commit(*block, key)?;
        Ok(())
    })
}

/// Of the numbers as compact JSON.
fn crc32(numbers: &[usize]) -> u32 {
    let mut crc = Crc::new();
    crc.update(serde_json::to_string(numbers).expect("numbers").as_bytes());
    crc.sum()
}

fn expected(section: &str) -> Option<Vec<Value>> {
    let file: Value =
        serde_json::from_reader(test_data("traces/expected_public.json")?).expect("JSON");
    Some(file[section]["conversation"].as_array().expect("a list").clone())
}

#[test]
fn hits_and_evictions_are_those_on_record() {
    let (Some(requests), Some(runs)) = (conversation(), expected("block_manager")) else { return };
    for run in runs {
        let requests = &requests[..number(&run["requests"])];
        let partial = if run["part"] == "head" { Partial::Head } else { Partial::Tail };
        let outcome = replay(requests, number(&run["pool"]), Duplicates::Keep, partial).unwrap();

        let full_blocks = requests.iter().map(|request| request.full_keys().len()).sum::<usize>();
        assert_eq!(full_blocks, number(&run["full_blocks"]));
        assert_eq!(outcome.hits.iter().sum::<usize>(), number(&run["hit_blocks"]));
        assert_eq!(u64::from(crc32(&outcome.hits)), run["per_request_hits_crc32"]);
        assert_eq!(outcome.evictions, run["evictions"]);
        assert_eq!(outcome.cached_at_the_end, run["cached_hashes_end"]);
        assert_eq!(outcome.peak_used, run["peak_used"]);
    }
}

#[test]
fn merging_changes_nothing_where_there_are_no_duplicates() {
    let Some(requests) = conversation() else { return };
    let run = |duplicates| replay(requests, 10_000, duplicates, Partial::Head).unwrap();
    assert_eq!(run(Duplicates::Merge), run(Duplicates::Keep));
}

#[test]
fn with_room_for_everything_all_that_came_before_hits() {
    let Some(requests) = conversation() else { return };
    let outcome = replay(requests, 300_000, Duplicates::Merge, Partial::Head).unwrap();
    assert_eq!((outcome.hits.iter().sum::<usize>(), outcome.evictions), (105_592, 0));
}

#[test]
fn each_of_the_first_requests_has_the_hits_on_record() {
    let name = "traces/conversation_first1000_pool5860_alone_hits.json";
    let (Some(requests), Some(mut file)) = (conversation(), test_data(name)) else { return };
    let mut on_record = String::new();
    file.read_to_string(&mut on_record).unwrap();
    let outcome = replay(&requests[..1000], 5860, Duplicates::Keep, Partial::Tail).unwrap();
    assert_eq!(serde_json::to_string(&outcome.hits).unwrap(), on_record);
}

/// An LRU cache that is told of a request's blocks from the last to the first, to be exact.
#[test]
fn with_full_blocks_only_it_hits_as_an_lru_cache_does() {
    let (Some(requests), Some(runs)) = (conversation(), expected("cache")) else { return };
    for run in runs.iter().filter(|run| run["order"] == "rev") {
        let mut cache = PrefixCache::new(number(&run["capacity"]), Duplicates::Merge).unwrap();
        let mut hits = 0;
        for Request { keys, .. } in requests {
            let mut blocks = Vec::new();
            hits += cache.acquire(keys, keys.len(), &mut blocks).unwrap();
            commit(&mut cache, &mut blocks, keys).unwrap();
            cache.give_back(&blocks).unwrap();
        }
        assert_eq!(hits, run["prefix_hit_blocks"]);
    }
}
