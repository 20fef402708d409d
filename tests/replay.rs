//! A recorded trace of requests against pool and prefix index alone: every request's hits, and what
//! is cached at the end, are known.

mod common {
    pub(crate) mod data;
}

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};

use common::data::test_data;
use flate2::Crc;
use flate2::read::GzDecoder;
use kvspan::{BlockKey, Duplicates, KeyChain, KeyRoot, PrefixCache};
use serde_json::Value;

/// Tokens that an id of the trace stands for.
const BLOCK_SIZE: usize = 512;

struct Request {
    num_tokens: usize,
    /// Of its full blocks.
    keys: Vec<BlockKey>,
    /// Under which nobody looks for its last, partial block.
    private_key: BlockKey,
}

impl Request {
    fn num_blocks(&self) -> usize {
        self.num_tokens.div_ceil(BLOCK_SIZE)
    }

    fn reusable_keys(&self) -> &[BlockKey] {
        &self.keys[..(self.num_tokens - 1) / BLOCK_SIZE]
    }
}

/// Where in the queue a partial block goes. Ours is the head; the tail, where others put it, is where
/// ours go if they have a key.
#[derive(Clone, Copy, PartialEq)]
enum Partial {
    Head,
    Tail,
}

#[derive(Debug, PartialEq)]
struct Outcome {
    per_request_hits: Vec<usize>,
    evictions: u64,
    cached_at_the_end: u64,
    peak_used: usize,
}

/// An id of the trace stands for its block and all before it, so that a token for each id makes keys
/// that are equal where the trace's are.
fn conversation() -> Option<Vec<Request>> {
    let trace = test_data("traces/conversation_packed.jsonl.gz")?;
    let root = KeyRoot::default().key().unwrap();
    let private_root = KeyRoot { namespace: Some(b"private"), ..KeyRoot::default() }.key().unwrap();
    let mut private = KeyChain::new(private_root, 1).unwrap();
    let requests = BufReader::new(GzDecoder::new(trace)).lines().map(|line| {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let num_tokens = number(&request[1]);
        let mut ids = Vec::new();
        for run in request[3].as_array().unwrap() {
            let (first, count) = match run.as_array() {
                Some(run) => (number(&run[0]), number(&run[1])),
                None => (number(run), 1),
            };
            ids.extend((first..first + count).map(|id| u32::try_from(id).unwrap()));
        }
        assert_eq!(ids.len(), num_tokens.div_ceil(BLOCK_SIZE));
        let mut chain = KeyChain::new(root, 1).unwrap();
        chain.extend(&ids[..num_tokens / BLOCK_SIZE]);
        private.extend(&[0]);
        let private_key = *private.keys().last().unwrap();
        Request { num_tokens, keys: chain.keys().to_vec(), private_key }
    });
    Some(requests.collect())
}

fn number(value: &Value) -> usize {
    value.as_u64().and_then(|number| number.try_into().ok()).expect("a number")
}

/// Serves one request after the other; each is over before the next one comes.
fn replay(requests: &[Request], capacity: usize, duplicates: Duplicates, partial: Partial) -> Outcome {
    let mut cache = PrefixCache::new(capacity, duplicates).unwrap();
    let mut per_request_hits = Vec::new();
    let mut peak_used = 0;
    let mut blocks = Vec::new();
    for request in requests {
        blocks.clear();
        let hits = cache.acquire(request.reusable_keys(), request.num_blocks(), &mut blocks);
        per_request_hits.push(hits.unwrap());
        peak_used = peak_used.max(cache.pool().num_in_use());
        for (block, key) in blocks.iter_mut().zip(&request.keys) {
            *block = cache.commit(*block, key).unwrap();
        }
        if partial == Partial::Tail && request.keys.len() < blocks.len() {
            cache.commit(*blocks.last().unwrap(), &request.private_key).unwrap();
        }
        cache.give_back(&blocks).unwrap();
    }
    cache.check_integrity().unwrap();
    assert_eq!(cache.pool().num_in_use(), 0);

    let is_private = requests.iter().map(|request| request.private_key).collect::<HashSet<_>>();
    let cached = cache.pool().free_queue().filter_map(|block| cache.key(block).unwrap());
    let (private, public): (HashSet<_>, HashSet<_>) =
        cached.copied().partition(|key| is_private.contains(key));
    let num_private = match partial {
        Partial::Head => 0,
        Partial::Tail => {
            requests.iter().filter(|request| request.keys.len() < request.num_blocks()).count()
        }
    };
    Outcome {
        per_request_hits,
        evictions: cache.num_evictions() - count(num_private - private.len()),
        cached_at_the_end: count(public.len()),
        peak_used,
    }
}

fn count(number: usize) -> u64 {
    number.try_into().unwrap()
}

/// Of the numbers as compact JSON.
fn crc32(numbers: &[usize]) -> u32 {
    let mut crc = Crc::new();
    crc.update(serde_json::to_string(numbers).unwrap().as_bytes());
    crc.sum()
}

#[test]
fn the_conversation_trace_hits_and_evicts_as_recorded() {
    let Some(requests) = conversation() else { return };
    let Some(expected) = test_data("traces/expected_public.json") else { return };
    let expected: Value = serde_json::from_reader(expected).unwrap();
    for run in expected["block_manager"]["conversation"].as_array().unwrap() {
        let requests = &requests[..number(&run["requests"])];
        let partial = if run["part"] == "head" { Partial::Head } else { Partial::Tail };
        let outcome = replay(requests, number(&run["pool"]), Duplicates::Keep, partial);
        eprintln!("{} {}: {} hits", run["pool"], run["part"], run["hit_blocks"]);

        let full_blocks = requests.iter().map(|request| request.keys.len()).sum::<usize>();
        let hits = outcome.per_request_hits.iter().sum::<usize>();
        assert_eq!(full_blocks, number(&run["full_blocks"]));
        assert_eq!(hits, number(&run["hit_blocks"]));
        assert_eq!(outcome.evictions, run["evictions"].as_u64().unwrap());
        assert_eq!(outcome.cached_at_the_end, run["cached_hashes_end"].as_u64().unwrap());
        assert_eq!(outcome.peak_used, number(&run["peak_used"]));
        assert_eq!(
            Some(u64::from(crc32(&outcome.per_request_hits))),
            run["per_request_hits_crc32"].as_u64()
        );
        assert!(requests.len() < 12_031 || outcome == replay(requests, number(&run["pool"]), Duplicates::Merge, partial), "merging matters here");
    }
}

#[test]
fn without_a_limit_everything_that_was_seen_hits() {
    let Some(requests) = conversation() else { return };
    let outcome = replay(&requests, 300_000, Duplicates::Merge, Partial::Head);
    assert_eq!(outcome.per_request_hits.iter().sum::<usize>(), 105_592);
    assert_eq!(outcome.evictions, 0);
}

#[test]
fn each_of_the_first_requests_hits_as_recorded() {
    let Some(requests) = conversation() else { return };
    let name = "traces/conversation_first1000_pool5860_alone_hits.json";
    let Some(mut file) = test_data(name) else { return };
    let mut expected = String::new();
    file.read_to_string(&mut expected).unwrap();
    let outcome = replay(&requests[..1000], 5860, Duplicates::Keep, Partial::Tail);
    assert_eq!(serde_json::to_string(&outcome.per_request_hits).unwrap(), expected);
}
