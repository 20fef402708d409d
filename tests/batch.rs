//! Calls for many sequences: each does what the calls for one do one after the other, or nothing.

mod common {
    pub(crate) mod sequences;
    pub(crate) mod watchdog;
}

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::sequences::{BLOCK_SIZE, config, keys, numbers_of, read, values, write};
use common::watchdog::within;
use kvspan::{
    BlockId, BlockTables, Duplicates, Inspection, KeyChain, KeyRoot, KeyedRequest, KvCacheHandle,
    KvCacheManager, KvCacheManagerConfig, KvError, ManagerStats, PagedKvCacheHandle, PagedSpan,
    RequestOptions, Result, Storage,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, FileFailurePersistence};

const NUM_BLOCKS: usize = 10;

fn manager(num_blocks: usize) -> KvCacheManager {
    KvCacheManager::new(config(num_blocks)).expect("a small pool")
}

fn allocate(manager: &KvCacheManager, tokens: &[u32]) -> PagedKvCacheHandle {
    manager.allocate(tokens, &RequestOptions::default()).expect("there is room")
}

/// A sequence whose tokens are all committed.
fn committed(manager: &KvCacheManager, tokens: &[u32]) -> PagedKvCacheHandle {
    let mut handle = allocate(manager, tokens);
    let new = &tokens[handle.num_cached_tokens()..];
    manager.commit(&mut handle, new).expect("they are its own");
    handle
}

fn blocks(handle: &PagedKvCacheHandle) -> &[u32] {
    &handle.block_table().logical_to_physical
}

fn refs(handles: &mut [PagedKvCacheHandle]) -> Vec<&mut PagedKvCacheHandle> {
    handles.iter_mut().collect()
}

/// Everything that can be seen of a manager, but for how often it refused something.
fn picture(manager: &KvCacheManager) -> (Inspection, ManagerStats) {
    manager.check_integrity().expect("nothing is lost");
    let mut stats = manager.stats();
    stats.num_failures = 0;
    (manager.inspect(), stats)
}

/// Asserts that `call` fails with `error` and that nothing of `handles` or the manager changed.
fn refuses<R: std::fmt::Debug>(
    manager: &KvCacheManager,
    handles: &mut [PagedKvCacheHandle],
    call: impl FnOnce(&mut [&mut PagedKvCacheHandle]) -> Result<R>,
    error: &KvError,
) {
    let state = |handles: &[PagedKvCacheHandle]| {
        let of = |handle: &PagedKvCacheHandle| {
            let committed = handle.num_committed_tokens();
            (handle.block_table().clone(), handle.tokens().to_vec(), committed)
        };
        handles.iter().map(of).collect::<Vec<_>>()
    };
    let before = (picture(manager), state(handles));
    assert_eq!(&call(&mut refs(handles)).expect_err("it is refused"), error);
    assert_eq!((picture(manager), state(handles)), before);
}

fn entry(index: usize, source: KvError) -> KvError {
    KvError::BatchEntry { index, source: Box::new(source) }
}

// Starting

#[test]
fn what_is_cached_of_any_sequence_is_held_before_blocks_for_another_are_taken() {
    let manager = manager(4);
    drop(committed(&manager, &[1; 9]));
    let (other, cached) = ([2; 8], [1; 9]);
    let options = RequestOptions::default();
    assert_eq!(manager.stats().num_cached, 2);

    // One after the other, the first takes what the second would have found.
    let handles = manager.allocate_many(&[(&other[..4], options), (&cached, options)]).unwrap();
    assert_eq!(handles[1].num_cached_tokens(), 8);
    drop(handles);
    let refused = manager.allocate_many(&[(&other, options), (&cached, options)]);
    let error = KvError::OutOfBlocks { needed: 3, free: 2, evictable: 0, pinned: 0 };
    assert_eq!(refused.unwrap_err(), error);
    assert_eq!(manager.stats().num_evictions, 0);
}

#[test]
fn a_block_that_several_sequences_find_is_spared_once() {
    let manager = manager(4);
    drop(committed(&manager, &[1; 8]));
    let options = RequestOptions::default();
    let handles = manager.allocate_many(&[(&[1; 9], options), (&[1; 10], options)]).unwrap();
    assert_eq!(blocks(&handles[0])[..2], blocks(&handles[1])[..2]);
    assert_eq!(manager.stats().num_free, 0);
}

#[test]
fn a_name_can_not_be_there_twice_in_one_call_either() {
    let manager = manager(4);
    let named = |request_id| RequestOptions { request_id: Some(request_id), ..Default::default() };
    let twice = manager.allocate_many(&[(&[1], named("a")), (&[2], named("a"))]);
    let error = twice.unwrap_err();
    assert_eq!(error, KvError::DuplicateRequest { request_id: "a".to_owned() });
    assert_eq!(error.to_string(), "the request \"a\" is there twice in one call");
    let stats = manager.stats();
    assert_eq!((stats.num_in_use, stats.num_failures, stats.num_allocations), (0, 2, 0));

    let handles = manager.allocate_many(&[(&[1], named("a")), (&[2], named("b"))]).unwrap();
    assert_eq!(
        manager.allocate(&[3], &named("b")).unwrap_err().to_string(),
        "there is a live request \"b\" already"
    );
    manager.free_request("a").unwrap();
    assert!(!handles[0].is_valid() && handles[1].is_valid());
}

#[test]
fn no_sequences_are_no_work() {
    let manager = manager(4);
    let mut none: [&mut PagedKvCacheHandle; 0] = [];
    assert!(manager.allocate_many(&[]).unwrap().is_empty());
    assert_eq!(manager.extend_many(&mut none, &[]), Ok(vec![]));
    assert_eq!(manager.commit_many(&mut none, &[]), Ok(()));
    assert_eq!(manager.free_many(&none), Ok(()));
    let tables = BlockTables { blocks: vec![], width: 0 };
    assert_eq!(manager.block_tables(&none), Ok(tables));
    assert_eq!(manager.slot_mappings(&none, &[]), Ok(vec![]));
}

// Keys as objects

#[test]
fn keys_that_were_made_once_find_what_tokens_find() {
    let manager = manager(8);
    drop(committed(&manager, &[1; 9]));
    let salted = RequestOptions { cache_salt: Some(b"other"), ..Default::default() };
    let chain = Arc::new(manager.block_keys(&[1; 9], &RequestOptions::default()).unwrap());
    assert_eq!(manager.probe_keyed(&chain), Ok(8));
    assert_eq!(manager.probe_keyed(&manager.block_keys(&[1; 9], &salted).unwrap()), Ok(0));

    let request = KeyedRequest {
        request_id: Some("a"),
        lookahead: 4,
        ..KeyedRequest::new(Arc::clone(&chain))
    };
    let mut handle = manager.allocate_keyed(request).unwrap();
    assert_eq!((handle.num_cached_tokens(), handle.block_table().num_blocks()), (8, 4));
    manager.commit(&mut handle, &[1]).unwrap();
    manager.extend(&mut handle, 1).unwrap();
    manager.commit(&mut handle, &[7]).unwrap();
    assert_eq!(handle.tokens(), [1, 1, 1, 1, 1, 1, 1, 1, 1, 7]);
    assert_eq!(chain.tokens(), [1; 9], "somebody else has it");

    let both = vec![KeyedRequest::new(Arc::clone(&chain)), KeyedRequest::new(chain)];
    let handles = manager.allocate_many_keyed(both).unwrap();
    assert_eq!(blocks(&handles[0])[..2], blocks(&handle)[..2]);
    assert_eq!(manager.stats().hit_tokens, 24);
}

#[test]
fn keys_of_blocks_of_another_size_are_refused() {
    let manager = manager(4);
    let chain = Arc::new(KeyChain::new(KeyRoot::default().key().unwrap(), 5).unwrap());
    let error = KvError::BlockSizeMismatch { given: 5, wanted: BLOCK_SIZE };
    assert_eq!(
        error.to_string(),
        "the keys are of blocks of 5 tokens, but the manager has blocks of 4"
    );
    assert_eq!(manager.probe_keyed(&chain), Err(error.clone()));
    assert_eq!(manager.allocate_keyed(KeyedRequest::new(Arc::clone(&chain))).unwrap_err(), error);
    let right = Arc::new(manager.block_keys(&[1], &RequestOptions::default()).unwrap());
    let many = vec![KeyedRequest::new(right), KeyedRequest::new(chain)];
    assert_eq!(manager.allocate_many_keyed(many).unwrap_err(), entry(1, error));
    assert_eq!(manager.stats().num_in_use, 0);
}

#[test]
fn a_manager_that_shares_nothing_takes_keys_and_finds_nothing() {
    let config = KvCacheManagerConfig { prefix_caching: false, ..config(8) };
    let manager = KvCacheManager::new(config).unwrap();
    let chain = manager.block_keys(&[1; 9], &RequestOptions::default()).unwrap();
    let mut handle = manager.allocate_keyed(KeyedRequest::new(chain.clone())).unwrap();
    manager.commit(&mut handle, &[1; 9]).unwrap();
    assert_eq!(handle.tokens(), [1; 9]);
    assert_eq!((manager.probe_keyed(&chain), manager.stats().num_committed), (Ok(0), 0));
    let mismatch = KvError::TokenMismatch { token: 3 };
    let mut other = allocate(&manager, &[1; 9]);
    assert_eq!(manager.commit(&mut other, &[1, 1, 1, 2]), Err(mismatch));
    manager.truncate(&mut other, 2).unwrap();
    assert_eq!(other.tokens(), [1; 2]);
}

#[test]
fn of_kept_duplicates_the_one_in_use_is_found() {
    let config = KvCacheManagerConfig { duplicates: Duplicates::Keep, ..config(8) };
    let manager = KvCacheManager::new(config).unwrap();
    let mut sequences = [(); 3].map(|()| allocate(&manager, &[1; 5]));
    for sequence in &mut sequences {
        manager.commit(sequence, &[1; 5]).unwrap();
    }
    let [first, second, third] = sequences;
    drop(first);
    drop(third);
    assert_eq!(manager.stats().num_cached, 2);
    let found = allocate(&manager, &[1; 5]);
    assert_eq!((found.num_cached_tokens(), blocks(&found)[0]), (4, blocks(&second)[0]));
    assert_eq!(manager.stats().num_cached, 2, "they can still be reused");
    drop((found, second));
    assert_eq!(allocate(&manager, &[1; 5]).num_cached_tokens(), 4);
}

// Growing

#[test]
fn sequences_grow_together_or_not_at_all() {
    let manager = manager(4);
    let mut handles = vec![allocate(&manager, &[1; 4]), allocate(&manager, &[2; 3])];
    assert_eq!(manager.extend_many(&mut refs(&mut handles), &[1, 1]), Ok(vec![]));
    assert_eq!([blocks(&handles[0]), blocks(&handles[1])], [&[1, 3][..], &[2]]);
    assert_eq!(manager.extend_many(&mut refs(&mut handles), &[3, 0]), Ok(vec![]));
    assert_eq!(handles[0].num_tokens(), 8);

    let error = KvError::OutOfBlocks { needed: 2, free: 1, evictable: 0, pinned: 0 };
    refuses(&manager, &mut handles, |handles| manager.extend_many(handles, &[1, 1]), &error);
    let all = usize::MAX;
    let extend = |handles: &mut [&mut _]| manager.extend_many(handles, &[all, all]);
    let blocks = all.div_ceil(4) - 2 + all.div_ceil(4) - 1;
    let error = KvError::OutOfBlocks { needed: blocks, free: 1, evictable: 0, pinned: 0 };
    refuses(&manager, &mut handles, extend, &error);
    let count = KvError::CountMismatch { what: "numbers of tokens", given: 1, wanted: 2 };
    refuses(&manager, &mut handles, |handles| manager.extend_many(handles, &[1]), &count);
}

#[test]
fn a_row_past_the_end_of_a_sequence_says_of_which_one() {
    let manager = manager(4);
    let mut handles = [allocate(&manager, &[1; 3]), allocate(&manager, &[2; 2])];
    let rows = [7.0, 8.0];
    let write_many = |layer, positions: [usize; 2]| {
        let manager = &manager;
        move |all: &mut [&mut PagedKvCacheHandle]| {
            manager.write_many(layer, all, &positions, &keys(&rows), &values(&rows))
        }
    };
    let past = KvError::RangeOutOfBounds { start: 2, end: 3, len: 2 };
    refuses(&manager, &mut handles, write_many(0, [2, 2]), &entry(1, past));
    // The layer is that of the whole call.
    let layer = KvError::LayerOutOfRange { layer: 9, num_layers: 2 };
    refuses(&manager, &mut handles, write_many(9, [2, 1]), &layer);
    assert_eq!(read(&manager, &handles[0], 0), [0.0; 3]);
}

#[test]
fn what_is_shared_is_copied_for_each_but_the_last_and_the_call_says_so() {
    let manager = manager(6);
    let first = allocate(&manager, &[1; 6]);
    let mut handles =
        vec![manager.fork(&first, None).unwrap(), manager.fork(&first, None).unwrap()];
    write(&manager, &mut handles[0], 0, 0, &[1.0]).unwrap();
    drop(first);
    // The second block has two owners now.
    let made = manager.extend_many(&mut refs(&mut handles), &[1, 1]).unwrap();
    let (from, to) = (BlockId::new(2).unwrap(), BlockId::new(4).unwrap());
    assert_eq!(made.len(), 1);
    let (index, copy) = made[0];
    assert_eq!((index, copy.block_index, copy.from, copy.to), (0, 1, from, to));
    assert_eq!([blocks(&handles[0]), blocks(&handles[1])], [[3, 4], [1, 2]]);
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn zeros_are_found_where_tokens_were_given_up_also_after_a_copy() {
    let manager = manager(6);
    let mut handles = vec![allocate(&manager, &[1; 7])];
    write(&manager, &mut handles[0], 0, 0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).unwrap();
    manager.truncate(&mut handles[0], 5).unwrap();
    let fork = manager.fork(&handles[0], None).unwrap();
    handles.push(fork);
    let made = manager.extend_many(&mut refs(&mut handles), &[2, 1]).unwrap();
    assert_eq!(made.len(), 1);
    assert_eq!(read(&manager, &handles[0], 0), [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]);
    assert_eq!(read(&manager, &handles[1], 0), [1.0, 2.0, 3.0, 4.0, 5.0, 0.0]);
}

// Committing

#[test]
fn tokens_are_committed_for_all_or_for_none() {
    let manager = manager(8);
    let mut handles = vec![allocate(&manager, &[1; 5]), allocate(&manager, &[2; 5])];
    let wrong = entry(1, KvError::TokenMismatch { token: 2 });
    let commit = |handles: &mut [&mut _]| manager.commit_many(handles, &[&[1; 5], &[2, 2, 3]]);
    refuses(&manager, &mut handles, commit, &wrong);
    let far = entry(1, KvError::NoRoomToCommit { range: 0..6, len: 5 });
    let commit = |handles: &mut [&mut _]| manager.commit_many(handles, &[&[1; 5], &[2; 6]]);
    refuses(&manager, &mut handles, commit, &far);
    let count = KvError::CountMismatch { what: "lists of tokens", given: 1, wanted: 2 };
    refuses(&manager, &mut handles, |handles| manager.commit_many(handles, &[&[1]]), &count);

    manager.commit_many(&mut refs(&mut handles), &[&[1; 5], &[2; 4]]).unwrap();
    assert_eq!(
        handles.iter().map(PagedKvCacheHandle::num_committed_tokens).collect::<Vec<_>>(),
        [5, 4]
    );
    assert_eq!(manager.stats().num_committed, 2);
}

#[test]
fn a_shared_block_can_not_get_two_keys_in_one_call() {
    let manager = manager(8);
    let first = allocate(&manager, &[1; 2]);
    let mut handles = vec![first];
    manager.extend(&mut handles[0], 2).unwrap();
    let fork = manager.fork(&handles[0], None).unwrap();
    handles.push(fork);
    let (ones, twos) = ([1; 4], [1, 1, 2, 2]);
    let (state, wanted) = ("committed under another key", "uncommitted");
    let error = KvError::WrongBlockState { block: 1, state, wanted };
    refuses(
        &manager,
        &mut handles,
        |handles| manager.commit_many(handles, &[&ones, &twos]),
        &error,
    );
    manager.commit_many(&mut refs(&mut handles), &[&ones, &ones]).unwrap();
    assert_eq!(manager.stats().num_committed, 1);
}

#[test]
fn equal_sequences_that_are_committed_in_one_call_are_merged() {
    let manager = manager(8);
    let mut handles = vec![allocate(&manager, &[1; 9]), allocate(&manager, &[1; 9])];
    manager.commit_many(&mut refs(&mut handles), &[&[1; 9], &[1; 9]]).unwrap();
    assert_eq!([blocks(&handles[0]), blocks(&handles[1])], [[1, 2, 3], [1, 2, 6]]);
    assert_eq!(manager.stats().num_free, 4);
}

// Freeing, and handles that can not be used

#[test]
fn a_handle_that_is_stale_or_there_twice_keeps_the_others_from_being_freed() {
    let manager = manager(8);
    let mut handles =
        vec![allocate(&manager, &[1]), allocate(&manager, &[2]), allocate(&manager, &[3])];
    let cache_id = handles[2].cache_id();
    manager.free(&handles[2]).unwrap();
    let stale = KvError::StaleHandle { cache_id };
    refuses(&manager, &mut handles, |handles| manager.free_many(handles), &stale);
    refuses(&manager, &mut handles, |handles| manager.extend_many(handles, &[1, 1, 0]), &stale);
    let commit = |handles: &mut [&mut _]| manager.commit_many(handles, &[&[], &[2], &[3]]);
    refuses(&manager, &mut handles, commit, &stale);
    refuses(&manager, &mut handles, |handles| manager.block_tables(handles), &stale);
    let slots = |handles: &mut [&mut _]| manager.slot_mappings(handles, &[0..1, 0..1, 0..1]);
    refuses(&manager, &mut handles, slots, &stale);

    let twice = [&handles[0], &handles[1], &handles[0]];
    let error = KvError::DuplicateHandle { cache_id: handles[0].cache_id() };
    assert_eq!(error.to_string(), format!("the handle {} is given twice", handles[0].cache_id()));
    assert_eq!(manager.free_many(&twice), Err(error));
    assert_eq!(manager.free_many(&twice[..2]), Ok(()));
    assert_eq!(manager.stats().num_in_use, 0);
}

#[test]
fn a_handle_of_another_manager_is_refused_by_every_call() {
    let (manager, other) = (manager(8), manager(8));
    let mut handles = vec![allocate(&manager, &[1]), allocate(&other, &[1])];
    let error = KvError::ForeignHandle { cache_id: handles[1].cache_id() };
    refuses(&manager, &mut handles, |handles| manager.extend_many(handles, &[1, 1]), &error);
    refuses(&manager, &mut handles, |handles| manager.commit_many(handles, &[&[], &[]]), &error);
    refuses(&manager, &mut handles, |handles| manager.free_many(handles), &error);
    refuses(&manager, &mut handles, |handles| manager.block_tables(handles), &error);
    let slots = |handles: &mut [&mut _]| manager.slot_mappings(handles, &[0..1, 0..1]);
    refuses(&manager, &mut handles, slots, &error);
}

#[test]
fn two_that_free_the_same_sequences_in_another_order_do_not_wait_for_each_other() {
    let manager = manager(64);
    for _ in 0..200 {
        let handles = [(); 8].map(|()| allocate(&manager, &[1]));
        let forwards = handles.iter().collect::<Vec<_>>();
        let backwards = handles.iter().rev().collect::<Vec<_>>();
        let freed = std::thread::scope(|scope| {
            let other = scope.spawn(|| manager.free_many(&backwards));
            [manager.free_many(&forwards), other.join().expect("it does not panic")]
        });
        assert_eq!(freed.iter().filter(|freed| freed.is_ok()).count(), 1, "{freed:?}");
        assert_eq!(manager.stats().num_in_use, 0);
    }
}

// Tables and slots

#[test]
fn tables_are_padded_with_the_null_block_and_slots_follow_them() {
    let manager = manager(8);
    let mut handles =
        vec![allocate(&manager, &[1; 5]), allocate(&manager, &[]), allocate(&manager, &[2])];
    let expected = BlockTables { blocks: vec![1, 2, 0, 0, 3, 0], width: 2 };
    assert_eq!(manager.block_tables(&refs(&mut handles)), Ok(expected));
    let slots = manager.slot_mappings(&refs(&mut handles), &[3..5, 0..0, 0..1]);
    assert_eq!(slots, Ok(vec![7, 8, 12]));

    let error = entry(2, KvError::RangeOutOfBounds { start: 0, end: 2, len: 1 });
    let far = |handles: &mut [&mut _]| manager.slot_mappings(handles, &[0..5, 0..0, 0..2]);
    refuses(&manager, &mut handles, far, &error);
    let error = entry(0, KvError::InvertedRange { start: 5, end: 3 });
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let inverted = |handles: &mut [&mut _]| manager.slot_mappings(handles, &[5..3, 0..0, 0..1]);
    refuses(&manager, &mut handles, inverted, &error);
    let count = KvError::CountMismatch { what: "ranges", given: 1, wanted: 3 };
    let few = |handles: &mut [&mut _]| manager.slot_mappings(handles, &[0..1; 1]);
    refuses(&manager, &mut handles, few, &count);
}

#[test]
fn nonsense_in_a_table_is_found_before_anything_happens() {
    let manager = manager(8);
    let mut handles = vec![allocate(&manager, &[1; 5]), allocate(&manager, &[2; 5])];
    handles[1].block_table_mut().physical_blocks.reverse();
    let reason = "its two lists of blocks differ";
    let error = entry(1, KvError::InconsistentTable { reason });
    refuses(&manager, &mut handles, |handles| manager.extend_many(handles, &[1, 1]), &error);
    refuses(&manager, &mut handles, |handles| manager.commit_many(handles, &[&[1], &[2]]), &error);
    refuses(&manager, &mut handles, |handles| manager.block_tables(handles), &error);
}

/// A reference whose code asks the manager something.
struct Curious<'a>(&'a KvCacheManager, &'a mut PagedKvCacheHandle);

impl Deref for Curious<'_> {
    type Target = PagedKvCacheHandle;

    fn deref(&self) -> &PagedKvCacheHandle {
        self.0.stats();
        self.1
    }
}

impl DerefMut for Curious<'_> {
    fn deref_mut(&mut self) -> &mut PagedKvCacheHandle {
        self.0.stats();
        self.1
    }
}

#[test]
fn what_refers_to_a_handle_may_ask_the_manager() {
    within(Duration::from_mins(1), || {
        let manager = manager(4);
        let mut handles = [allocate(&manager, &[1]), allocate(&manager, &[2])];
        let mut curious = handles
            .each_mut()
            .map(|handle| Curious(&manager, handle))
            .into_iter()
            .collect::<Vec<_>>();
        assert_eq!(manager.extend_many(&mut curious, &[1, 5]), Ok(vec![]));
        assert_eq!(manager.commit_many(&mut curious, &[&[1, 1], &[2]]), Ok(()));
        assert_eq!(manager.block_tables(&curious).map(|tables| tables.width), Ok(2));
        assert_eq!(manager.free_many(&curious), Ok(()));
    });
}

#[test]
fn guards_of_locks_are_as_good_as_references() {
    let manager = manager(8);
    let locks = [[1; 3], [2; 3]].map(|tokens| Mutex::new(allocate(&manager, &tokens)));
    let mut guards = locks.each_ref().map(|lock| lock.lock().unwrap());
    manager.extend_many(&mut guards, &[1, 2]).unwrap();
    manager.commit_many(&mut guards, &[&[1, 1, 1, 7], &[2; 3]]).unwrap();
    assert_eq!(manager.block_tables(&guards).unwrap().blocks, [1, 0, 2, 3]);
    manager.free_many(&guards).unwrap();
    assert_eq!(manager.stats().num_cached, 1);
}

// Against the calls for one

#[derive(Clone, Debug)]
enum Op {
    Allocate(Vec<(Vec<u32>, usize, u8)>),
    Extend(Vec<(Index, usize)>),
    Commit(Vec<(Index, usize)>, u32),
    Free(Vec<Index>),
    // The rest is the same on both sides, and there to make a difference.
    Fork(Index),
    Truncate(Index, Index),
    Write(Index, Index),
    View(Index),
    DropViews,
}

fn any_op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let request = (vec(0_u32..2, 0..11), 0_usize..4, 0_u8..40);
    prop_oneof![
        5 => vec(request, 0..4).prop_map(Op::Allocate),
        6 => vec((index(), 0_usize..6), 0..5).prop_map(Op::Extend),
        6 => (vec((index(), 0_usize..12), 0..5), 0_u32..2)
            .prop_map(|(commits, seed)| Op::Commit(commits, seed)),
        2 => vec(index(), 0..4).prop_map(Op::Free),
        3 => index().prop_map(Op::Fork),
        2 => (index(), index()).prop_map(|(at, len)| Op::Truncate(at, len)),
        4 => (index(), index()).prop_map(|(at, position)| Op::Write(at, position)),
        2 => index().prop_map(Op::View),
        1 => Just(Op::DropViews),
    ]
}

/// A manager and its sequences, and whether calls for many are made as such.
struct Side {
    manager: KvCacheManager,
    together: bool,
    handles: Vec<PagedKvCacheHandle>,
    views: Vec<PagedSpan>,
    num_written: u16,
}

impl Side {
    fn new(config: &KvCacheManagerConfig, together: bool) -> Self {
        let manager = KvCacheManager::new(config.clone()).expect("a small pool");
        Self { manager, together, handles: Vec::new(), views: Vec::new(), num_written: 0 }
    }

    fn at(&self, index: Index) -> Option<usize> {
        (!self.handles.is_empty()).then(|| index.index(self.handles.len()))
    }

    /// What is chosen of the sequences, none of them twice, in their order.
    fn choose<V>(&self, chosen: Vec<(Index, V)>) -> Vec<(usize, V)> {
        let places = chosen.into_iter().filter_map(|(index, value)| Some((self.at(index)?, value)));
        let mut places = places.collect::<Vec<_>>();
        places.sort_by_key(|&(place, _)| place);
        places.dedup_by_key(|&mut (place, _)| place);
        places
    }

    fn apply(&mut self, op: Op) -> Result<()> {
        let manager = self.manager.clone();
        match op {
            Op::Allocate(requests) => {
                let names = requests.iter().map(|(.., name)| format!("request {name}"));
                let names = names.collect::<Vec<_>>();
                let requests =
                    requests.iter().zip(&names).map(|((tokens, lookahead, name), text)| {
                        let request_id = (*name < 8).then_some(&**text);
                        let lookahead = *lookahead;
                        (&**tokens, RequestOptions { request_id, lookahead, ..Default::default() })
                    });
                let requests = requests.collect::<Vec<_>>();
                if self.together {
                    self.handles.append(&mut manager.allocate_many(&requests)?);
                } else {
                    for (tokens, options) in requests {
                        self.handles.push(manager.allocate(tokens, &options)?);
                    }
                }
            }
            Op::Extend(chosen) => {
                let chosen = self.choose(chosen);
                let numbers = chosen.iter().map(|&(_, number)| number).collect::<Vec<_>>();
                if self.together {
                    manager.extend_many(&mut self.pick(&chosen), &numbers)?;
                } else {
                    for (handle, number) in self.pick(&chosen).into_iter().zip(numbers) {
                        manager.extend(handle, number)?;
                    }
                }
            }
            Op::Commit(chosen, seed) => {
                let chosen = self.choose(chosen);
                let tokens = chosen.iter().map(|&(place, number)| {
                    let handle = &self.handles[place];
                    let start = handle.num_committed_tokens();
                    let end = (start + number).min(handle.num_tokens());
                    let known = handle.tokens().get(start..end.min(handle.tokens().len()));
                    let mut tokens = known.unwrap_or_default().to_vec();
                    tokens.resize(end - start, seed);
                    tokens
                });
                let tokens = tokens.collect::<Vec<_>>();
                let tokens = tokens.iter().map(|tokens| &**tokens).collect::<Vec<_>>();
                if self.together {
                    manager.commit_many(&mut self.pick(&chosen), &tokens)?;
                } else {
                    for (handle, tokens) in self.pick(&chosen).into_iter().zip(tokens) {
                        manager.commit(handle, tokens)?;
                    }
                }
            }
            Op::Free(chosen) => {
                let chosen = chosen.into_iter().map(|index| (index, ())).collect();
                let chosen = self.choose(chosen);
                if self.together {
                    manager.free_many(&self.pick(&chosen))?;
                } else {
                    self.pick(&chosen).into_iter().try_for_each(|handle| manager.free(handle))?;
                }
                self.handles.retain(KvCacheHandle::is_valid);
            }
            Op::Fork(index) => {
                if let Some(place) = self.at(index) {
                    self.handles.push(manager.fork(&self.handles[place], None)?);
                }
            }
            Op::Truncate(index, len) => {
                if let Some(place) = self.at(index) {
                    let len = len.index(self.handles[place].num_tokens() + 1);
                    manager.truncate(&mut self.handles[place], len)?;
                }
            }
            Op::Write(index, position) => {
                let place = self.at(index).filter(|&place| self.handles[place].num_tokens() > 0);
                if let Some(place) = place {
                    let position = position.index(self.handles[place].num_tokens());
                    let number = f32::from(self.num_written + 1);
                    write(&manager, &mut self.handles[place], 0, position, &[number])?;
                    self.num_written += 1;
                }
            }
            Op::View(index) => {
                if let Some(place) = self.at(index) {
                    let handle = &self.handles[place];
                    self.views.push(manager.view(handle, 0, 0, handle.num_tokens())?);
                }
            }
            Op::DropViews => self.views.clear(),
        }
        Ok(())
    }

    fn pick<V>(&mut self, chosen: &[(usize, V)]) -> Vec<&mut PagedKvCacheHandle> {
        let mut places = chosen.iter().map(|&(place, _)| place).peekable();
        let handles = self.handles.iter_mut().enumerate();
        handles.filter(|(place, _)| places.next_if_eq(place).is_some()).map(|(_, it)| it).collect()
    }

    /// All that can be seen.
    fn picture(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let of = |handle: &PagedKvCacheHandle| {
            let content = match self.manager.config().storage {
                Storage::Owned => read(&self.manager, handle, 0),
                Storage::Elsewhere => Vec::new(),
            };
            let numbers = (handle.num_cached_tokens(), handle.num_committed_tokens());
            (handle.block_table().clone(), handle.tokens().to_vec(), numbers, content)
        };
        let handles = self.handles.iter().map(of).collect::<Vec<_>>();
        (picture(&self.manager), handles, self.views.iter().map(numbers_of).collect::<Vec<_>>())
    }

    fn hits(&self) -> Vec<usize> {
        self.handles.iter().map(PagedKvCacheHandle::num_cached_tokens).collect()
    }
}

fn agrees(config: &KvCacheManagerConfig, ops: Vec<Op>) {
    let (mut many, mut one) = (Side::new(config, true), Side::new(config, false));
    let mut done = Vec::new();
    for op in ops {
        let before = many.picture();
        let result = many.apply(op.clone());
        if let Err(error) = result {
            assert_eq!(many.picture(), before, "{error} left a trace");
            // Then one of the calls for one sequence fails as well.
            let mut again = Side::new(config, false);
            for op in &done {
                again.apply(Op::clone(op)).expect("it succeeded before");
            }
            let one_by_one = again.apply(op);
            let strict = matches!(error, KvError::WrongBlockState { .. });
            assert!(one_by_one.is_err() || strict, "{error} is the error of none of them");
            continue;
        }
        let op_name = format!("{op:?}");
        one.apply(op.clone()).unwrap_or_else(|error| panic!("{op_name} gave {error}"));
        if many.hits() != one.hits() {
            // One took what another would have found.
            assert!(matches!(op, Op::Allocate(_)));
            assert!(many.hits().iter().zip(one.hits()).all(|(many, one)| *many >= one));
            return;
        }
        assert_eq!(many.picture(), one.picture(), "after {op_name}");
        done.push(op);
    }
}

proptest! {
    #![proptest_config(Config {
        cases: 300,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    })]

    #[test]
    fn a_call_for_many_does_what_the_calls_for_one_do(ops in vec(any_op(), 1..40)) {
        agrees(&config(NUM_BLOCKS), ops);
    }

    #[test]
    fn and_so_it_does_without_storage(ops in vec(any_op(), 1..40)) {
        let ops = ops.into_iter().filter(|op| !matches!(op, Op::Write(..) | Op::View(_)));
        agrees(&KvCacheManagerConfig { storage: Storage::Elsewhere, ..config(NUM_BLOCKS) }, ops.collect());
    }

    #[test]
    fn and_so_it_does_if_duplicates_are_kept(ops in vec(any_op(), 1..40)) {
        let config = KvCacheManagerConfig { duplicates: Duplicates::Keep, ..config(NUM_BLOCKS) };
        agrees(&config, ops);
    }

    #[test]
    fn and_so_it_does_if_nothing_is_shared(ops in vec(any_op(), 1..40)) {
        agrees(&KvCacheManagerConfig { prefix_caching: false, ..config(NUM_BLOCKS) }, ops);
    }
}
