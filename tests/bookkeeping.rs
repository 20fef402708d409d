//! What a manager keeps count of: who has which blocks, what can be found, and what is refused without a
//! trace.

mod common {
    pub(crate) mod computed;
    pub(crate) mod sequences;
}

use common::computed::{PLAIN, blocks, check, compute, computed, manager, refuses, start};
use common::sequences::{BLOCK_SIZE, WIDTH, config, numbers_of, read, write};
use kvspan::{
    BlockState, KvCacheHandle, KvCacheManager, KvCacheManagerConfig, KvError, PagedKvCacheHandle,
    RequestOptions, Storage,
};

// Sharing

#[test]
fn only_who_knows_the_same_secrets_finds_anything() {
    let manager = manager(16);
    let tokens = [1, 2, 3, 4, 5];
    let image: &[(usize, &[&[u8]])] = &[(0, &[b"a cat"])];
    let others = [
        RequestOptions { cache_salt: Some(b"a"), ..PLAIN },
        RequestOptions { cache_salt: Some(b"b"), ..PLAIN },
        RequestOptions { lora_id: Some(b"a"), ..PLAIN },
        RequestOptions { extra_keys: image, ..PLAIN },
        PLAIN,
    ];
    for (index, options) in others.iter().enumerate() {
        let mut handle = manager.allocate(&tokens, options).unwrap();
        assert_eq!(handle.num_cached_tokens(), 0, "of {options:?}");
        compute(&manager, &mut handle, &tokens, 0);
        for known in &others[..=index] {
            assert_eq!(manager.probe(&tokens, known), Ok(4));
        }
        for unknown in &others[index + 1..] {
            assert_eq!(manager.probe(&tokens, unknown), Ok(0));
        }
    }
}

#[test]
fn without_prefix_caching_nothing_is_shared() {
    let config = KvCacheManagerConfig { prefix_caching: false, ..config(4) };
    let manager = KvCacheManager::new(config).unwrap();
    let first = start(&manager, &[1, 2, 3, 4, 5]);
    assert_eq!(manager.probe(&[1, 2, 3, 4, 5], &PLAIN), Ok(0));
    assert_eq!(start(&manager, &[1, 2, 3, 4, 5]).num_cached_tokens(), 0);
    assert_eq!((manager.stats().num_committed, first.num_committed_tokens()), (0, 5));
}

#[test]
fn a_prompt_can_be_committed_in_chunks_and_only_with_its_own_tokens() {
    let manager = manager(8);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let mut handle = manager.allocate(&tokens, &PLAIN).unwrap();
    manager.commit(&mut handle, &tokens[..5]).unwrap();
    assert_eq!(manager.stats().num_committed, 1);
    let wrong = KvError::TokenMismatch { token: 6 };
    refuses(&manager, || manager.commit(&mut handle, &[6, 9]), &wrong);
    let too_many = KvError::NoRoomToCommit { range: 5..10, len: 9 };
    refuses(&manager, || manager.commit(&mut handle, &[6, 7, 8, 9, 10]), &too_many);
    manager.commit(&mut handle, &tokens[5..]).unwrap();
    assert_eq!(manager.stats().num_committed, 2);

    manager.extend(&mut handle, 3).unwrap();
    manager.commit(&mut handle, &[10, 11, 12]).unwrap();
    assert_eq!((manager.stats().num_committed, handle.num_committed_tokens()), (3, 12));
    assert_eq!(handle.tokens(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
}

#[test]
fn two_forks_that_disagree_about_a_shared_block_are_told() {
    let manager = manager(8);
    let mut handle = manager.allocate(&[], &PLAIN).unwrap();
    manager.extend(&mut handle, 4).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    manager.commit(&mut handle, &[1, 2, 3, 4]).unwrap();
    let block = blocks(&fork)[0];
    let (state, wanted) = ("committed under another key", "uncommitted");
    let differs = KvError::WrongBlockState { block, state, wanted };
    refuses(&manager, || manager.commit(&mut fork, &[1, 2, 3, 5]), &differs);
    assert_eq!(fork.tokens(), [0_u32; 0]);
    manager.commit(&mut fork, &[1, 2, 3, 4]).unwrap();
}

#[test]
fn extra_keys_of_blocks_that_are_not_there_yet_are_not_lost() {
    let manager = manager(16);
    let image: &[(usize, &[&[u8]])] = &[(1, &[b"a cat"])];
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let of_the_image = RequestOptions { extra_keys: image, ..PLAIN };
    let mut all = Vec::new();
    for way in 0..4 {
        let mut handle = manager.allocate(&tokens[..3], &of_the_image).unwrap();
        match way {
            0 => {}
            1 => handle = manager.fork(&handle, None).unwrap(),
            2 => {
                manager.extend(&mut handle, 6).unwrap();
                manager.truncate(&mut handle, 8).unwrap();
            }
            _ => {
                let fork = manager.fork(&handle, None).unwrap();
                manager.extend(&mut handle, 1).unwrap();
                // Of the blocks that the two share, one has a key that the other does not know.
                let mut other = manager.fork(&handle, None).unwrap();
                manager.commit(&mut other, &[1, 2, 3, 0]).unwrap();
                drop(fork);
                let differs = manager.commit(&mut handle, &tokens[..4]).unwrap_err();
                assert!(matches!(differs, KvError::WrongBlockState { .. }), "{differs}");
                drop(other);
                write(&manager, &mut handle, 0, 0, &[1.0]).unwrap();
            }
        }
        let missing = tokens.len() - handle.num_tokens();
        manager.extend(&mut handle, missing).unwrap();
        compute(&manager, &mut handle, &tokens, 0);
        assert_eq!(manager.probe(&tokens, &PLAIN), Ok(4), "in way {way}");
        assert_eq!(manager.probe(&tokens, &of_the_image), Ok(8), "in way {way}");
        all.push(handle);
    }
}

#[test]
fn a_commit_that_is_refused_at_its_second_block_has_not_committed_the_first() {
    let manager = manager(8);
    let mut handle = manager.allocate(&[], &PLAIN).unwrap();
    manager.extend(&mut handle, 8).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    manager.commit(&mut fork, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    // From here on the first block of the two differs, and the second is still shared.
    write(&manager, &mut handle, 0, 0, &[9.0]).unwrap();
    let block = blocks(&handle)[1];
    let (state, wanted) = ("committed under another key", "uncommitted");
    let differs = KvError::WrongBlockState { block, state, wanted };
    let call = || manager.commit(&mut handle, &[9, 2, 3, 4, 5, 6, 7, 8]);
    refuses(&manager, call, &differs);
    assert_eq!((handle.num_committed_tokens(), handle.tokens()), (0, &[][..]));
}

// All or nothing

#[test]
fn a_refused_call_leaves_no_trace() {
    let manager = manager(4);
    let tokens = [1, 2, 3, 4, 5];
    let mut handle = start(&manager, &tokens);
    let full = |needed| KvError::OutOfBlocks { needed, free: 2, evictable: 0, pinned: 0 };
    refuses(&manager, || manager.allocate(&[9; 12], &PLAIN), &full(3));
    let more = RequestOptions { lookahead: 8, ..PLAIN };
    refuses(&manager, || manager.allocate(&[9; 4], &more), &full(3));
    refuses(&manager, || manager.extend(&mut handle, 12), &full(3));
    refuses(&manager, || manager.extend(&mut handle, usize::MAX), &full(usize::MAX / 4 + 1 - 2));
    let stats = manager.stats();
    assert_eq!((stats.num_allocations, stats.num_failures, stats.query_tokens), (1, 2, 5));

    // To write to a block that is shared takes one for the copy.
    let mut forks = [(), ()].map(|()| manager.fork(&handle, None).unwrap());
    let _rest = manager.allocate(&[8; 8], &PLAIN).unwrap();
    let none = KvError::OutOfBlocks { needed: 1, free: 0, evictable: 0, pinned: 0 };
    let [fork, other] = &mut forks;
    refuses(&manager, || write(&manager, fork, 0, 4, &[7.0]), &none);
    refuses(&manager, || manager.extend(fork, 1), &none);
    refuses(&manager, || manager.truncate(fork, 3), &none);
    let two = KvError::OutOfBlocks { needed: 2, free: 0, evictable: 0, pinned: 0 };
    let rows = [1.0; 2 * WIDTH];
    refuses(&manager, || manager.write_many(0, &mut [fork, other], &[4, 4], &rows, &rows), &two);
    check(&manager, &handle, &tokens);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let manager = manager(4);
    let mut handle = start(&manager, &[1, 2, 3]);
    let row = [1.0; WIDTH];
    let differ = KvError::LengthMismatch { keys: 2, values: 1 };
    refuses(&manager, || manager.write(&mut handle, 9, 9, &row, &row[1..]), &differ);
    let narrow = KvError::WidthMismatch { given: 1, width: WIDTH };
    refuses(&manager, || manager.write(&mut handle, 9, 9, &row[1..], &row[1..]), &narrow);
    let layer = KvError::LayerOutOfRange { layer: 2, num_layers: 2 };
    refuses(&manager, || manager.write(&mut handle, 2, 9, &row, &row), &layer);
    refuses(&manager, || manager.view(&handle, 2, 0, 1), &layer);
    let past = KvError::RangeOutOfBounds { start: 3, end: 4, len: 3 };
    refuses(&manager, || manager.write(&mut handle, 0, 3, &row, &row), &past);
    refuses(&manager, || manager.view(&handle, 0, 3, 4), &past);
    let inverted = KvError::InvertedRange { start: 2, end: 1 };
    refuses(&manager, || manager.view(&handle, 0, 2, 1), &inverted);
    let longer = KvError::RangeOutOfBounds { start: 0, end: 4, len: 3 };
    refuses(&manager, || manager.truncate(&mut handle, 4), &longer);
    let short = KvError::OutputTooShort { plane: "values", given: 1, wanted: 2 };
    let (mut k, mut v) = (row, [0.0; 1]);
    refuses(&manager, || manager.read_range_into(&handle, 0, 0, 1, &mut k, &mut v), &short);
    for (what, positions) in [("positions", vec![0, 1]), ("rows", vec![0])] {
        let rows = [0.0; 2 * WIDTH];
        let counts = KvError::CountMismatch { what, given: 2, wanted: 1 };
        let mut handles = [&mut handle];
        let call = || manager.write_many(0, &mut handles, &positions, &rows, &rows);
        refuses(&manager, call, &counts);
    }
    assert_eq!(manager.write_many(0, &mut [], &[], &[], &[]), Ok(()));
}

#[test]
fn a_manager_without_dimensions_is_refused() {
    for (field, config) in [
        ("num_blocks", config(0)),
        ("block_size", KvCacheManagerConfig { block_size: 0, ..config(1) }),
        ("num_layers", KvCacheManagerConfig { num_layers: 0, ..config(1) }),
        ("num_kv_heads", KvCacheManagerConfig { num_kv_heads: 0, ..config(1) }),
        ("head_dim", KvCacheManagerConfig { head_dim: 0, ..config(1) }),
    ] {
        for storage in [Storage::Owned, Storage::Elsewhere] {
            let made = KvCacheManager::new(KvCacheManagerConfig { storage, ..config.clone() });
            assert_eq!(made.err(), Some(KvError::InvalidConfig { field }));
        }
    }
    let long =
        KvCacheManagerConfig { block_size: usize::MAX, storage: Storage::Elsewhere, ..config(1) };
    assert!(matches!(KvCacheManager::new(long), Err(KvError::TooLarge { what: "block_size", .. })));
    let huge = KvCacheManagerConfig { head_dim: usize::MAX / 2, ..config(1) };
    assert!(matches!(KvCacheManager::new(huge), Err(KvError::PoolSizeOverflow { .. })));
    let block_size = usize::MAX;
    let keyless = KvCacheManagerConfig { block_size, storage: Storage::Elsewhere, ..config(1) };
    let made = KvCacheManager::new(keyless).err();
    assert!(matches!(made, Some(KvError::TooLarge { what: "block_size", .. })));
}

#[test]
fn a_cut_does_not_count_on_blocks_that_somebody_else_keeps() {
    let manager = manager(3);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let mut handle = start(&manager, &tokens);
    let fork = manager.fork(&handle, None).unwrap();
    // The last block is the handle's alone, and the second is shared.
    manager.truncate(&mut handle, 8).unwrap();
    manager.extend(&mut handle, 1).unwrap_err();
    drop(fork);
    manager.extend(&mut handle, 1).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    manager.truncate(&mut fork, 8).unwrap();
    let view = manager.view(&handle, 0, 8, 9).unwrap();
    let none = KvError::OutOfBlocks { needed: 1, free: 0, evictable: 0, pinned: 0 };
    refuses(&manager, || manager.truncate(&mut handle, 6), &none);
    drop(view);
    let copy = manager.truncate(&mut handle, 6).unwrap().expect("the cut frees a block");
    assert_eq!(copy.block_index, 1);
    check(&manager, &fork, &tokens[..8]);
}

#[test]
fn what_was_made_room_for_is_given_back_at_any_length() {
    let manager = manager(8);
    let more = RequestOptions { lookahead: 10, ..PLAIN };
    for len in [5, 4, 0] {
        let mut handle = manager.allocate(&[1, 2, 3, 4, 5], &more).unwrap();
        assert_eq!(manager.stats().num_in_use, 4);
        manager.truncate(&mut handle, len).unwrap();
        let needed = len.div_ceil(BLOCK_SIZE);
        assert_eq!((manager.stats().num_in_use, blocks(&handle).len()), (needed, needed));
        manager.truncate(&mut handle, len).unwrap();
        assert_eq!(manager.stats().num_in_use, needed);
    }
}

#[test]
fn the_table_can_be_edited_only_within_what_the_sequence_has() {
    let manager = manager(8);
    let mut handle = start(&manager, &[1, 2, 3, 4, 5, 6]);
    let mut victim = start(&manager, &[7, 8, 9]);
    let own = handle.block_table().clone();

    let table = handle.block_table_mut();
    table.physical_blocks[1] = victim.block_table().physical_blocks[0];
    table.logical_to_physical[1] = victim.block_table().logical_to_physical[0];
    let reason = "it names blocks that the sequence does not have there";
    let foreign = KvError::InconsistentTable { reason };
    refuses(&manager, || write(&manager, &mut handle, 0, 5, &[0.5]), &foreign);
    refuses(&manager, || manager.view(&handle, 0, 0, 5), &foreign);
    refuses(&manager, || manager.fork(&handle, None), &foreign);
    refuses(&manager, || handle.key_cache(0), &foreign);
    handle.block_table_mut().block_size = 1;
    refuses(
        &manager,
        || manager.extend(&mut handle, 1),
        &KvError::InconsistentTable { reason: "it has more tokens than its blocks can hold" },
    );

    // Put right again, and made longer as the original's callers do.
    *handle.block_table_mut() = own;
    handle.block_table_mut().extend_sequence(2).unwrap();
    write(&manager, &mut handle, 0, 7, &[8.0]).unwrap();
    assert_eq!(read(&manager, &handle, 0)[6..], [0.0, 8.0]);
    handle.block_table_mut().truncate(3).unwrap();
    check(&manager, &manager.fork(&handle, None).unwrap(), &[1, 2, 3]);
    manager.extend(&mut handle, 0).unwrap();
    assert_eq!((handle.num_tokens(), handle.stats().blocks_allocated), (3, 1));

    *handle.block_table_mut() = victim.block_table().clone();
    drop(handle); // gives back its own blocks, whatever its table says
    manager.extend(&mut victim, 1).unwrap();
    assert_eq!(read(&manager, &victim, 0)[..3], [1, 2, 3].map(|n| computed(&[7, 8, 9][..n], 0)));
    manager.check_integrity().unwrap();
}

// Lifetimes

#[test]
fn freeing_twice_is_an_error_and_closing_twice_is_not() {
    let manager = manager(4);
    let named = RequestOptions { request_id: Some("a"), ..PLAIN };
    let handle = manager.allocate(&[1, 2], &named).unwrap();
    let taken = KvError::RequestExists { request_id: "a".to_owned() };
    refuses(&manager, || manager.allocate(&[1], &named), &taken);
    refuses(&manager, || manager.fork(&handle, Some("a")), &taken);
    manager.free(&handle).unwrap();
    let stale = KvError::StaleHandle { cache_id: handle.cache_id() };
    refuses(&manager, || manager.free(&handle), &stale);
    let unknown = KvError::UnknownRequest { request_id: "a".to_owned() };
    refuses(&manager, || manager.free_request("a"), &unknown);
    handle.close();

    let again = manager.allocate(&[1, 2], &named).unwrap();
    drop(handle); // gives nothing back that is not its own
    assert_eq!(manager.stats().num_in_use, 1);
    manager.free_request("a").unwrap();
    assert!(!again.is_valid());
    again.close();
    assert_eq!(manager.stats().num_free, 4);
}

#[test]
fn a_stale_handle_can_do_nothing() {
    let manager = manager(4);
    let mut handle = start(&manager, &[1, 2, 3]);
    let mut other = start(&manager, &[4, 5, 6]);
    manager.free(&handle).unwrap();
    let stale = KvError::StaleHandle { cache_id: handle.cache_id() };
    let row = [1.0; WIDTH];
    refuses(&manager, || write(&manager, &mut handle, 0, 0, &[9.0]), &stale);
    refuses(&manager, || manager.extend(&mut handle, 1), &stale);
    refuses(&manager, || manager.truncate(&mut handle, 1), &stale);
    refuses(&manager, || manager.commit(&mut handle, &[]), &stale);
    refuses(&manager, || manager.fork(&handle, None), &stale);
    refuses(&manager, || manager.prepare_write(&mut handle, 0, 1), &stale);
    refuses(&manager, || manager.view(&handle, 0, 0, 1), &stale);
    refuses(&manager, || handle.key_cache(0), &stale);
    refuses(&manager, || handle.clone_handle(), &stale);
    let (mut k, mut v) = (row, row);
    refuses(&manager, || manager.read_range_into(&handle, 0, 0, 1, &mut k, &mut v), &stale);
    let rows = [1.0; 2 * WIDTH];
    let mut both = [&mut other, &mut handle];
    refuses(&manager, || manager.write_many(0, &mut both, &[0, 0], &rows, &rows), &stale);
    check(&manager, &other, &[4, 5, 6]);

    // Whatever else is wrong.
    refuses(&manager, || write(&manager, &mut handle, 9, 9, &[9.0]), &stale);
    refuses(&manager, || manager.truncate(&mut handle, 9), &stale);
    refuses(&manager, || manager.commit(&mut handle, &[0; 9]), &stale);
    refuses(&manager, || manager.view(&handle, 9, 9, 8), &stale);
    refuses(&manager, || manager.write_many(0, &mut [&mut handle], &[9], &row, &row), &stale);
}

#[test]
fn a_handle_of_another_manager_is_refused() {
    let (manager, other) = (manager(4), manager(4));
    let mut handle = start(&manager, &[1, 2, 3]);
    let foreign = KvError::ForeignHandle { cache_id: handle.cache_id() };
    refuses(&other, || other.extend(&mut handle, 1), &foreign);
    refuses(&other, || other.free(&handle), &foreign);
    let clone = manager.clone();
    assert_eq!(clone.free(&handle), Ok(()));
}

#[test]
fn the_prefix_cache_is_not_reset_while_blocks_are_in_use() {
    let manager = manager(4);
    let handle = start(&manager, &[1, 2, 3, 4, 5]);
    refuses(&manager, || manager.reset_prefix_cache(), &KvError::BlocksInUse { in_use: 2 });
    let view = manager.view(&handle, 0, 0, 4).unwrap();
    drop(handle);
    refuses(&manager, || manager.reset_prefix_cache(), &KvError::BlocksInUse { in_use: 1 });
    drop(view);
    manager.reset_prefix_cache().unwrap();
    assert_eq!(manager.probe(&[1, 2, 3, 4, 5], &PLAIN), Ok(0));
}

#[test]
fn nothing_older_than_the_epoch_is_found_and_all_that_live_go_on() {
    let manager = KvCacheManager::new(KvCacheManagerConfig { epoch: 7, ..config(12) }).unwrap();
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    drop(start(&manager, &tokens[..5]));
    let old_keys = manager.block_keys(&tokens, &PLAIN).unwrap();
    let mut old = manager.allocate(&tokens, &PLAIN).unwrap();
    assert_eq!((old.num_cached_tokens(), manager.epoch()), (4, 7));

    let clone = manager.clone();
    assert_eq!(clone.advance_epoch(), Ok(8));
    assert_eq!((manager.epoch(), manager.probe(&tokens, &PLAIN)), (8, Ok(0)));
    compute(&manager, &mut old, &tokens, 4);
    let mut fork = manager.fork(&old, None).unwrap();
    manager.extend(&mut fork, 3).unwrap();
    compute(&manager, &mut fork, &[&tokens[..], &[10, 11, 12]].concat(), 9);
    check(&manager, &old, &tokens);
    assert_eq!(manager.probe(&tokens, &PLAIN), Ok(0));
    assert_eq!(manager.probe_keyed(&old_keys), Ok(8));

    // A new one computes all of it, and shares it with the next.
    let new = start(&manager, &tokens);
    assert_eq!(new.num_cached_tokens(), 0);
    assert!(blocks(&new).iter().all(|block| !blocks(&old).contains(block)));
    assert_eq!(manager.probe(&tokens, &PLAIN), Ok(8));
    let new_keys = manager.block_keys(&tokens, &PLAIN).unwrap();
    assert_eq!(manager.probe_keyed(&new_keys), Ok(8));
    assert_ne!(new_keys.block_keys(), old_keys.block_keys());
    manager.check_integrity().unwrap();
}

#[test]
fn the_last_epoch_is_not_followed_by_the_first() {
    let config = KvCacheManagerConfig { epoch: u64::MAX - 1, ..config(1) };
    let manager = KvCacheManager::new(config).unwrap();
    assert_eq!(manager.advance_epoch(), Ok(u64::MAX));
    refuses(&manager, || manager.advance_epoch(), &KvError::LastEpoch { epoch: u64::MAX });
    assert_eq!(manager.epoch(), u64::MAX);
}

#[test]
fn what_holds_blocks_is_reported() {
    let manager = manager(4);
    let named = RequestOptions { request_id: Some("a"), ..PLAIN };
    let handle = manager.allocate(&[1, 2, 3, 4, 5], &named).unwrap();
    let view = manager.view(&handle, 1, 3, 5).unwrap();
    let report = manager.leak_report();
    assert_eq!(report.sequences.len(), 1);
    assert_eq!(report.sequences[0].request_id.as_deref(), Some("a"));
    assert_eq!(report.sequences[0].cache_id, handle.cache_id());
    assert_eq!(report.sequences[0].blocks, handle.block_table().physical_blocks);
    assert_eq!(report.pinned_blocks.iter().map(|&(_, pins)| pins).collect::<Vec<_>>(), [1, 1]);
    drop((handle, view));
    assert!(manager.leak_report().is_empty());
}

#[test]
fn what_a_server_shares_can_be_sent_to_other_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    let manager = manager(1);
    let handle = manager.allocate(&[1], &PLAIN).unwrap();
    shared(&manager);
    shared(&manager.view(&handle, 0, 0, 1));
    shared(&handle);
}

// What is to be copied

#[test]
fn without_storage_the_bookkeeping_says_what_to_copy() {
    let config = KvCacheManagerConfig { storage: Storage::Elsewhere, ..config(4) };
    let manager = KvCacheManager::new(config).unwrap();
    let mut handle = manager.allocate(&[1, 2, 3, 4, 5], &PLAIN).unwrap();
    manager.commit(&mut handle, &[1, 2, 3, 4, 5]).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    let [first, second] = *handle.block_table().physical_blocks.as_slice() else { panic!() };
    let copied = manager.extend(&mut fork, 1).unwrap().unwrap();
    assert_eq!((copied.block_index, copied.from), (1, second));
    let cut = manager.truncate(&mut fork, 3).unwrap().unwrap();
    assert_eq!((cut.block_index, cut.from), (0, first));

    refuses(&manager, || manager.view(&handle, 0, 0, 1), &KvError::NoStorage);
    refuses(&manager, || write(&manager, &mut fork, 0, 0, &[1.0]), &KvError::NoStorage);
    assert!(handle.key_cache(0).unwrap().is_none());
    assert!(matches!(handle.key_cache(2), Err(KvError::LayerOutOfRange { .. })));
    assert_eq!((manager.stats().block_bytes, handle.stats().memory_bytes), (0, 0));
}

#[test]
fn who_is_about_to_write_elsewhere_gets_slots_of_its_own() {
    let elsewhere = KvCacheManagerConfig { storage: Storage::Elsewhere, ..config(4) };
    let manager = KvCacheManager::<f32>::new(elsewhere).unwrap();
    let mut handle = manager.allocate(&[1, 2, 3], &PLAIN).unwrap();
    manager.extend(&mut handle, 3).unwrap();
    // Both have the room that was made.
    let mut fork = manager.fork(&handle, None).unwrap();
    let slots = |handle: &PagedKvCacheHandle| handle.block_table().slot_mapping(3..6).unwrap();
    assert_eq!(slots(&handle), slots(&fork));

    let copies = manager.prepare_write(&mut fork, 3, 6).unwrap();
    let replaced = copies.iter().map(|copy| (copy.block_index, copy.from.get()));
    assert!(replaced.eq([0, 1].map(|index| (index, blocks(&handle)[index]))), "{copies:?}");
    assert_eq!(blocks(&fork), [copies[0].to.get(), copies[1].to.get()]);
    assert!(slots(&handle).iter().all(|slot| !slots(&fork).contains(slot)));
    for one in [&mut fork, &mut handle] {
        assert_eq!(manager.prepare_write(one, 0, 6), Ok(vec![]));
    }

    manager.commit(&mut handle, &[1, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(manager.prepare_write(&mut handle, 2, 2), Ok(vec![]));
    assert_eq!(
        (manager.probe(&[1, 2, 3, 4, 5], &PLAIN), handle.num_committed_tokens()),
        (Ok(4), 6)
    );
    assert_eq!(manager.prepare_write(&mut handle, 3, 4), Ok(vec![]));
    assert_eq!(
        (manager.probe(&[1, 2, 3, 4, 5], &PLAIN), handle.num_committed_tokens()),
        (Ok(0), 0)
    );

    let inverted = KvError::InvertedRange { start: 2, end: 1 };
    refuses(&manager, || manager.prepare_write(&mut handle, 2, 1), &inverted);
    let outside = KvError::RangeOutOfBounds { start: 5, end: 7, len: 6 };
    refuses(&manager, || manager.prepare_write(&mut handle, 5, 7), &outside);
    let mut shared = manager.fork(&handle, None).unwrap();
    let none = KvError::OutOfBlocks { needed: 2, free: 0, evictable: 0, pinned: 0 };
    refuses(&manager, || manager.prepare_write(&mut shared, 0, 5), &none);
}

#[test]
fn what_is_prepared_is_written_in_place() {
    let manager = manager(6);
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut handle = start(&manager, &tokens);
    let fork = manager.fork(&handle, None).unwrap();
    let view = manager.view(&handle, 1, 5, 6).unwrap();
    let copies = manager.prepare_write(&mut handle, 4, 6).unwrap();
    assert_eq!((copies.len(), copies[0].block_index, handle.num_committed_tokens()), (1, 1, 6));
    check(&manager, &handle, &tokens);
    let before = blocks(&handle);
    write(&manager, &mut handle, 1, 4, &[8.0, 9.0]).unwrap();
    assert_eq!(blocks(&handle), before);
    check(&manager, &fork, &tokens);
    assert_eq!(numbers_of(&view), [computed(&tokens, 1)]);
}

#[test]
fn without_storage_no_copy_goes_unreported_when_a_table_is_edited() {
    let elsewhere = KvCacheManagerConfig { storage: Storage::Elsewhere, ..config(8) };
    let manager = KvCacheManager::<f32>::new(elsewhere).unwrap();
    let mut handle = manager.allocate(&[1, 2, 3, 4, 5, 6, 7], &PLAIN).unwrap();
    manager.commit(&mut handle, &[1, 2, 3, 4, 5, 6, 7]).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    let reason = "its new length needs a block to be copied, which without storage only extend and \
                  truncate can report";
    // The first cuts a committed block, and the second goes on in one that is not full.
    for len in [3, 8] {
        fork.block_table_mut().sequence_length = len;
        let refused = KvError::InconsistentTable { reason };
        refuses(&manager, || manager.extend(&mut fork, 0), &refused);
        fork.block_table_mut().sequence_length = 7;
        assert_eq!(manager.extend(&mut fork, 0), Ok(None));
    }
    // What nobody shares can be edited.
    fork.block_table_mut().sequence_length = 4;
    assert_eq!((manager.extend(&mut fork, 0), fork.num_tokens()), (Ok(None), 4));
    handle.block_table_mut().sequence_length = 8;
    assert_eq!((manager.extend(&mut handle, 0), handle.num_tokens()), (Ok(None), 8));
    let copy = manager.truncate(&mut fork, 3).unwrap().expect("the block is shared");
    assert_eq!(blocks(&fork), [copy.to.get()]);
}

// Numbers

#[test]
fn every_token_that_was_asked_for_is_a_hit_or_a_miss() {
    let manager = manager(4);
    drop(start(&manager, &[1, 2, 3, 4, 5]));
    drop(start(&manager, &[1, 2, 3, 4, 6, 7]));
    assert!(manager.allocate(&[0; 20], &PLAIN).is_err());
    let stats = manager.stats();
    assert_eq!((stats.query_tokens, stats.hit_tokens, stats.miss_tokens), (11, 4, 7));
    assert_eq!((stats.num_free, stats.num_cached, stats.num_in_use), (3, 1, 0));
    drop(manager.allocate(&[9; 16], &PLAIN).unwrap());
    assert_eq!((manager.stats().num_evictions, manager.stats().num_cached), (1, 0));
}

#[test]
fn a_picture_shows_holders_pins_keys_and_the_queue() {
    let manager = manager(3);
    let handle = start(&manager, &[1, 2, 3, 4, 5]);
    let _fork = manager.fork(&handle, None).unwrap();
    let _views = [0, 1].map(|layer| manager.view(&handle, layer, 0, 4).unwrap());
    let picture = manager.inspect();
    assert_eq!(picture.free_queue.iter().map(|block| block.get()).collect::<Vec<_>>(), [3]);
    let [first, second, third] = *picture.blocks.as_slice() else { panic!() };
    assert_eq!((first.state, first.reference_count, first.pin_count), (BlockState::InUse, 2, 2));
    assert!(first.key.is_some() && second.key.is_none());
    assert_eq!((third.state, third.reference_count, third.pin_count), (BlockState::Free, 0, 0));
}

#[test]
fn debug_output_has_no_content() {
    let manager = manager(3);
    let handle =
        manager.allocate(&[123_456], &RequestOptions { cache_salt: Some(b"salt"), ..PLAIN });
    let view = manager.view(handle.as_ref().unwrap(), 0, 0, 1);
    let text = format!("{manager:?} {handle:?} {view:?}");
    assert!(text.contains("num_free: 2") && !text.contains("123456"), "{text}");
}

#[test]
fn the_errors_read_well() {
    let name = || "a".to_owned();
    for (error, text) in [
        (KvError::LayerOutOfRange { layer: 2, num_layers: 2 }, "there is no layer 2: there are 2"),
        (
            KvError::LayersDiffer { layer: 1 },
            "layer 1 does not have the shape and element type of layer 0",
        ),
        (
            KvError::CountMismatch { what: "positions", given: 1, wanted: 2 },
            "got 1 positions, but there are 2 sequences",
        ),
        (
            KvError::StaleHandle { cache_id: name() },
            "the handle a is stale: its sequence was freed",
        ),
        (KvError::ForeignHandle { cache_id: name() }, "the handle a belongs to another manager"),
        (KvError::RequestExists { request_id: name() }, "there is a live request \"a\" already"),
        (KvError::UnknownRequest { request_id: name() }, "there is no live request \"a\""),
        (
            KvError::TokenMismatch { token: 3 },
            "the token at position 3 is not the one that the sequence was allocated with",
        ),
        (
            KvError::NoRoomToCommit { range: 2..5, len: 3 },
            "tokens 2..5 can not be committed: the sequence has 3; make room with extend first",
        ),
        (
            KvError::LastEpoch { epoch: u64::MAX },
            "the epoch is 18446744073709551615, and can not be raised",
        ),
        (KvError::NoStorage, "the manager has no storage: it keeps count of blocks alone"),
        (
            KvError::UnreportedCopy { block: 3 },
            "block 3 has to be copied where its content is, since the manager has no storage, but \
             the call does not report copies",
        ),
    ] {
        assert_eq!(error.to_string(), text);
    }
}
