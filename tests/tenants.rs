//! Many look-ups by tenants who do not know what others have cached: none may find anything, while
//! those who know find it each time. `KVSPAN_LOOKUPS` is their number.

use std::env;
use std::thread;

use kvspan::{
    KvCacheManager, KvCacheManagerConfig, KvError, PagedKvCacheHandle, RequestOptions, Storage,
};

const BLOCK_SIZE: u32 = 16;
const NUM_PROMPTS: u32 = 256;
const THREADS: u32 = 2;
const LOOKUPS: u32 = 1_000_000;
/// As many look-ups of strangers for one of somebody who knows.
const PER_CONTROL: u32 = 16;

/// One block, and the token that is always left to compute.
fn prompt(number: u32) -> Vec<u32> {
    (0..=BLOCK_SIZE).map(|token| number % NUM_PROMPTS * 1_000 + token).collect()
}

/// What the owner of a prompt sends with it. Some of it could be told apart from what others send
/// only by where a field ends.
fn secrets(number: u32) -> [Option<String>; 2] {
    let number = number % NUM_PROMPTS;
    match number % 4 {
        0 => [Some(format!("tenant-{number}")), None],
        1 => [None, Some(format!("tenant-{number}"))],
        2 => [Some(format!("{number}a")), Some("b".to_owned())],
        _ => [Some(format!("{number}")), Some("ab".to_owned())],
    }
}

/// A stranger's guess, which is never right.
fn guess(number: u32, guess: u32) -> [Option<String>; 2] {
    let [salt, lora] = secrets(number);
    let appended = |text: Option<String>, more: &str| Some(text.unwrap_or_default() + more);
    match guess % 8 {
        0 => [None, None],
        1 => [lora, salt],
        2 => [appended(salt, " "), lora],
        3 => [appended(salt, "\0"), lora],
        4 => [salt, appended(lora, &guess.to_string())],
        5 => [appended(salt, &lora.unwrap_or_default()), Some(String::new())],
        6 => secrets(number + 4 * (1 + guess % 60)),
        _ => [Some(guess.to_string()), Some((guess / 2).to_string())],
    }
}

fn options(secrets: &[Option<String>; 2]) -> RequestOptions<'_> {
    let [cache_salt, lora_id] =
        secrets.each_ref().map(|field| field.as_ref().map(String::as_bytes));
    RequestOptions { cache_salt, lora_id, ..RequestOptions::default() }
}

fn manager() -> KvCacheManager {
    let block_size = usize::try_from(BLOCK_SIZE).expect("a small number");
    let config = KvCacheManagerConfig {
        num_blocks: 2 * usize::try_from(NUM_PROMPTS).expect("a small number"),
        block_size,
        storage: Storage::Elsewhere,
        ..KvCacheManagerConfig::default()
    };
    KvCacheManager::new(config).expect("a small pool")
}

fn num_cached(handle: &Result<PagedKvCacheHandle, KvError>) -> usize {
    handle.as_ref().expect("there is room").num_cached_tokens()
}

#[test]
fn strangers_find_nothing_and_owners_find_it_each_time() {
    let manager = &manager();
    for number in 0..NUM_PROMPTS {
        let (tokens, secrets) = (prompt(number), secrets(number));
        let mut handle = manager.allocate(&tokens, &options(&secrets)).expect("there is room");
        assert_eq!(handle.num_cached_tokens(), 0);
        manager.commit(&mut handle, &tokens).expect("the tokens are its own");
    }
    let lookups = env::var("KVSPAN_LOOKUPS").map_or(LOOKUPS, |n| n.parse().expect("a number"));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for turn in (thread..lookups).step_by(2) {
                    let number = turn.wrapping_mul(0x9e37_79b1) >> 8;
                    let (tokens, stranger) = (prompt(number), guess(number, turn));
                    let found = manager.probe(&tokens, &options(&stranger));
                    assert_eq!(found, Ok(0), "{stranger:?} found a block of {:?}", secrets(number));
                    if (turn / THREADS).is_multiple_of(PER_CONTROL) {
                        let found = manager.probe(&tokens, &options(&secrets(number)));
                        assert_eq!(found, Ok(16), "{:?} found nothing", secrets(number));
                        // By the way that takes blocks as well.
                        let owner = manager.allocate(&tokens, &options(&secrets(number)));
                        assert_eq!(num_cached(&owner), 16);
                        assert_eq!(num_cached(&manager.allocate(&tokens, &options(&stranger))), 0);
                    }
                }
            });
        }
    });
    manager.check_integrity().expect("nothing is lost");
    assert_eq!(manager.stats().num_in_use, 0);
}
