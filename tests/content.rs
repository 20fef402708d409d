//! What sequences of a manager hold: the rows of their own tokens, whoever shares, writes, views or frees
//! the blocks of others.

mod common {
    pub(crate) mod computed;
    pub(crate) mod sequences;
    pub(crate) mod watchdog;
}

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use common::computed::{PLAIN, blocks, check, compute, computed, manager, refuses, start};
use common::sequences::{
    BLOCK_SIZE, NUM_LAYERS, WIDTH, config, keys, numbers_of, read, values, write,
};
use common::watchdog::within;
use kvspan::{
    BlockCopy, Duplicates, KvCacheHandle, KvCacheManager, KvCacheManagerConfig, KvError,
    RequestOptions,
};

const LIMIT: Duration = Duration::from_mins(1);

// Sharing

#[test]
fn an_equal_beginning_is_found_with_its_content_up_to_the_last_token() {
    let manager = manager(8);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let first = start(&manager, &tokens);
    let second = manager.allocate(&tokens, &PLAIN).unwrap();
    assert_eq!((second.num_cached_tokens(), second.num_committed_tokens()), (4, 4));
    assert_eq!(blocks(&second)[0], blocks(&first)[0]);
    assert_ne!(blocks(&second)[1], blocks(&first)[1]);
    for layer in 0..NUM_LAYERS {
        let expected = read(&manager, &first, layer)[..4].to_vec();
        assert_eq!(read(&manager, &second, layer), [expected, vec![0.0; 4]].concat());
    }

    drop((first, second));
    assert_eq!(manager.probe(&[&tokens[..], &[9]].concat(), &PLAIN), Ok(8));
    let third = start(&manager, &[&tokens[..], &[9]].concat());
    assert_eq!(third.num_cached_tokens(), 8);
    check(&manager, &third, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn an_equal_block_is_merged_at_commit_unless_duplicates_are_kept() {
    let tokens = [1, 2, 3, 4, 5];
    for (duplicates, merged) in [(Duplicates::Merge, true), (Duplicates::Keep, false)] {
        let config = KvCacheManagerConfig { duplicates, ..config(8) };
        let manager = KvCacheManager::new(config).unwrap();
        let mut handles = [(), ()].map(|()| manager.allocate(&tokens, &PLAIN).unwrap());
        for handle in &mut handles {
            compute(&manager, handle, &tokens, 0);
        }
        assert_eq!(blocks(&handles[0])[0] == blocks(&handles[1])[0], merged);
        for handle in &handles {
            check(&manager, handle, &tokens);
        }
        manager.check_integrity().unwrap();
    }
}

// Blocks that change hands

#[test]
fn a_new_owner_finds_zeros() {
    let manager = manager(3);
    for canary in 1..50_u16 {
        let mut handle = manager.allocate(&[0; 3 * BLOCK_SIZE], &PLAIN).unwrap();
        for layer in 0..NUM_LAYERS {
            assert_eq!(read(&manager, &handle, layer), [0.0; 3 * BLOCK_SIZE]);
            let numbers = [f32::from(canary); 3 * BLOCK_SIZE];
            write(&manager, &mut handle, layer, 0, &numbers).unwrap();
        }
    }
}

// Growing, cutting and forking

#[test]
fn what_was_truncated_does_not_come_back() {
    let manager = manager(4);
    let mut handle = start(&manager, &[1, 2, 3, 4, 5, 6, 7]);
    let fork = manager.fork(&handle, None).unwrap();
    manager.truncate(&mut handle, 2).unwrap();
    manager.extend(&mut handle, 4).unwrap();
    for layer in 0..NUM_LAYERS {
        assert_eq!(read(&manager, &handle, layer)[2..], [0.0; 4]);
    }
    check(&manager, &fork, &[1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_fork_copies_the_one_block_that_is_written() {
    let manager = manager(8);
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut handle = start(&manager, &tokens);
    let mut fork = manager.fork(&handle, Some("fork")).unwrap();
    assert_eq!((blocks(&fork), manager.stats().num_in_use), (blocks(&handle), 2));

    let copy = manager.extend(&mut fork, 1).unwrap().expect("the block is shared");
    assert_eq!((copy.block_index, copy.from.get()), (1, blocks(&handle)[1]));
    assert_eq!(blocks(&fork), [blocks(&handle)[0], copy.to.get()]);
    compute(&manager, &mut fork, &[1, 2, 3, 4, 5, 6, 70], 6);
    // The other one is alone with its block by now.
    assert_eq!(manager.extend(&mut handle, 1), Ok(None));
    compute(&manager, &mut handle, &[1, 2, 3, 4, 5, 6, 7], 6);
    check(&manager, &fork, &[1, 2, 3, 4, 5, 6, 70]);
    check(&manager, &handle, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(manager.stats().num_copies, 1);
}

#[test]
fn a_fork_leaves_the_blocks_of_a_lookahead_to_the_original() {
    for lookahead in 1..=4 {
        let manager = manager(3);
        let mut handle =
            manager.allocate(&[1, 2, 3, 4], &RequestOptions { lookahead, ..PLAIN }).unwrap();
        compute(&manager, &mut handle, &[1, 2, 3, 4], 0);
        let mut fork = manager.fork(&handle, None).unwrap();
        assert_eq!((blocks(&handle).len(), blocks(&fork)), (2, blocks(&handle)[..1].to_vec()));

        assert_eq!(manager.extend(&mut fork, 4), Ok(None));
        assert_eq!(manager.stats().num_free, 0);
        assert_eq!(manager.extend(&mut handle, lookahead), Ok(None));
        for (number, one) in [(7.0, &mut handle), (8.0, &mut fork)] {
            let numbers = vec![number; one.num_tokens() - 4];
            write(&manager, one, 0, 4, &numbers).unwrap();
            assert_eq!(read(&manager, one, 0)[4..], numbers);
        }
        assert_eq!(manager.stats().num_copies, 0);
    }
}

#[test]
fn a_fork_of_a_sequence_that_was_longer_has_zeros_behind_its_end() {
    let manager = manager(6);
    let mut handle = start(&manager, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    manager.truncate(&mut handle, 8).unwrap();
    let mut fork = manager.fork(&handle, None).unwrap();
    manager.truncate(&mut fork, 6).unwrap();
    let mut forked = manager.fork(&fork, None).unwrap();
    for one in [&mut fork, &mut forked] {
        manager.extend(one, 5).unwrap();
        let rows = read(&manager, one, 0);
        assert_eq!((rows.len(), &rows[6..]), (11, &[0.0; 5][..]));
    }
    check(&manager, &handle, &[1, 2, 3, 4, 5, 6, 7, 8]);
}

// Writing

#[test]
fn a_committed_block_that_is_cut_is_shared_no_more() {
    let manager = manager(3);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let mut handle = start(&manager, &tokens);
    // Nobody else has it: it can not be found any more.
    assert_eq!(manager.truncate(&mut handle, 7), Ok(None));
    assert_eq!(manager.stats().num_committed, 1);
    assert_eq!(handle.num_committed_tokens(), 7);
    manager.extend(&mut handle, 2).unwrap();
    compute(&manager, &mut handle, &tokens, 7);

    // A fork has it, and of the three blocks none is free before the cut.
    let fork = manager.fork(&handle, None).unwrap();
    let none = KvError::OutOfBlocks { needed: 1, free: 0, evictable: 0, pinned: 0 };
    refuses(&manager, || manager.truncate(&mut handle, 6), &none);
    drop(fork);
    let mut fork = manager.fork(&handle, None).unwrap();
    manager.truncate(&mut fork, 8).unwrap();
    let copy = manager.truncate(&mut handle, 6).unwrap().expect("the cut frees a block");
    assert_eq!(copy, BlockCopy { block_index: 1, ..copy });
    check(&manager, &handle, &tokens[..6]);
    check(&manager, &fork, &tokens[..8]);
    assert_eq!(manager.probe(&tokens, &PLAIN), Ok(8));
}

#[test]
fn a_committed_block_that_is_overwritten_can_not_be_found() {
    let manager = manager(8);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let mut handle = start(&manager, &tokens);
    write(&manager, &mut handle, 0, 5, &[0.5]).unwrap();
    assert_eq!(manager.probe(&tokens, &PLAIN), Ok(4));
    assert_eq!(handle.num_committed_tokens(), 4);
    compute(&manager, &mut handle, &tokens, 4);
    assert_eq!(manager.probe(&tokens, &PLAIN), Ok(8));
    check(&manager, &handle, &tokens);
}

#[test]
fn tokens_of_a_block_that_is_not_full_stay_committed_when_it_is_written() {
    let manager = manager(8);
    let mut handle = start(&manager, &[1, 2, 3, 4, 5, 6]);
    write(&manager, &mut handle, 0, 4, &[0.5, 0.5]).unwrap();
    manager.prepare_write(&mut handle, 4, 6).unwrap();
    assert_eq!(handle.num_committed_tokens(), 6);
    let refused = KvError::NoRoomToCommit { range: 6..8, len: 6 };
    assert_eq!(manager.commit(&mut handle, &[5, 6]), Err(refused));
}

#[test]
fn a_write_of_no_tokens_changes_nothing() {
    let manager = manager(8);
    let tokens = (0..9).collect::<Vec<_>>();
    let mut handle = start(&manager, &tokens);
    let before = (manager.inspect(), handle.num_committed_tokens());
    manager.write(&mut handle, 0, 0, &[], &[]).expect("there is nothing to write");
    assert_eq!((manager.inspect(), handle.num_committed_tokens()), before);
}

#[test]
fn many_sequences_are_written_in_one_call_as_they_are_one_by_one() {
    let manager = manager(8);
    let handle = start(&manager, &[1, 2, 3, 4, 5]);
    let mut handles = (0..3).map(|_| manager.fork(&handle, None).unwrap()).collect::<Vec<_>>();
    let numbers = [7.0, 8.0, 9.0];
    let mut all = handles.iter_mut().collect::<Vec<_>>();
    manager.write_many(0, &mut all, &[4, 1, 4], &keys(&numbers), &values(&numbers)).unwrap();
    for (handle, (at, number)) in handles.iter().zip([(4, 7.0), (1, 8.0), (4, 9.0)]) {
        assert_eq!(read(&manager, handle, 0)[at..=at], [number]);
        assert_eq!(read(&manager, handle, 1), read(&manager, &handles[0], 1));
    }
    check(&manager, &handle, &[1, 2, 3, 4, 5]);
    manager.check_integrity().unwrap();
}

#[test]
fn the_last_of_those_who_write_a_shared_block_keeps_it() {
    let manager = manager(3);
    let tokens = [1, 2, 3, 4];
    let mut handles = vec![start(&manager, &tokens)];
    handles.extend((1..3).map(|_| manager.fork(&handles[0], None).unwrap()).collect::<Vec<_>>());
    let rows = keys(&[7.0, 8.0, 9.0]);
    let mut all = handles.iter_mut().collect::<Vec<_>>();
    manager.write_many(0, &mut all, &[3, 3, 0], &rows, &rows).expect("two more blocks will do");
    assert_eq!(handles.iter().map(blocks).collect::<Vec<_>>(), [[2], [3], [1]]);
    for (handle, (at, number)) in handles.iter().zip([(3, 7.0), (3, 8.0), (0, 9.0)]) {
        let span = manager.view(handle, 0, 0, 4).unwrap();
        let keys = span.segment(0).unwrap().keys.to_vec();
        let mut expected = (1..=4).map(|end| computed(&tokens[..end], 0)).collect::<Vec<_>>();
        expected[at] = number;
        assert_eq!(keys, common::sequences::keys(&expected));
    }
    // What it was committed as is nobody's content any more.
    assert_eq!(manager.stats().num_committed, 0);
    assert_eq!(manager.stats().num_copies, 2);
    manager.check_integrity().unwrap();
}

// Views

#[test]
fn a_view_stays_whatever_happens_to_the_sequence() {
    let manager = manager(8);
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut handle = start(&manager, &tokens);
    let view = manager.view(&handle, 0, 1, 6).unwrap();
    let expected = read(&manager, &handle, 0)[1..].to_vec();
    let seen = view.segments().map(|segment| (segment.start(), segment.end()));
    assert_eq!(seen.collect::<Vec<_>>(), [(1, 4), (4, 6)]);
    assert_eq!((view.range(), view.len(), view.shape()), (1..6, 5, [5, 1, WIDTH]));

    // Behind it, and in another layer: in place.
    let before = blocks(&handle);
    manager.extend(&mut handle, 1).unwrap();
    write(&manager, &mut handle, 0, 6, &[7.0]).unwrap();
    assert_eq!(blocks(&handle), before);
    // In its way: in a copy.
    write(&manager, &mut handle, 0, 5, &[0.5]).unwrap();
    assert_ne!(blocks(&handle)[1], before[1]);
    assert_eq!(read(&manager, &handle, 0)[5..], [0.5, 7.0]);
    assert_eq!(numbers_of(&view), expected);

    drop(handle);
    let _others = [(), ()].map(|()| manager.allocate(&[0; 12], &PLAIN).unwrap());
    assert_eq!(manager.stats().num_pinned, 2);
    assert_eq!(numbers_of(&view), expected);
    let full = KvError::OutOfBlocks { needed: 1, free: 0, evictable: 0, pinned: 2 };
    refuses(&manager, || manager.allocate(&[9], &PLAIN), &full);
    drop(manager);
    assert_eq!(numbers_of(&view), expected);
}

#[test]
fn a_view_of_one_layer_does_not_hold_up_the_next() {
    let manager = manager(4);
    let mut handle = manager.allocate(&[1, 2, 3], &PLAIN).unwrap();
    let before = blocks(&handle);
    write(&manager, &mut handle, 0, 2, &[3.0]).unwrap();
    let view = manager.view(&handle, 0, 0, 3).unwrap();
    write(&manager, &mut handle, 1, 2, &[3.0]).unwrap();
    assert_eq!((blocks(&handle), view.len()), (before, 3));
}

#[test]
fn a_shared_block_that_a_view_pins_is_left_by_all_who_write_it() {
    let manager = manager(3);
    let mut one = start(&manager, &[1, 2, 3, 4]);
    let mut other = manager.fork(&one, None).unwrap();
    let view = manager.view(&one, 0, 0, 4).unwrap();
    let before = numbers_of(&view);
    let (rows, negated) = (keys(&[7.0, 8.0]), values(&[7.0, 8.0]));
    manager.write_many(0, &mut [&mut one, &mut other], &[3, 3], &rows, &negated).unwrap();
    assert_eq!([blocks(&one), blocks(&other)], [[2], [3]]);
    assert_eq!(numbers_of(&view), before);
    assert_eq!((read(&manager, &one, 0)[3], read(&manager, &other, 0)[3]), (7.0, 8.0));
    manager.check_integrity().unwrap();
}

// Threads

#[test]
fn who_matches_a_prefix_has_it_whatever_is_evicted_meanwhile() {
    within(LIMIT, || {
        let manager = manager(6);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        drop(start(&manager, &tokens));
        thread::scope(|scope| {
            scope.spawn(|| {
                for other in 100..400 {
                    // Takes all that is not in use, and so evicts.
                    drop(manager.allocate(&[other; 12], &PLAIN));
                }
            });
            for _ in 0..300 {
                let Ok(handle) = manager.allocate(&tokens, &PLAIN) else { continue };
                let cached = handle.num_cached_tokens();
                for layer in 0..NUM_LAYERS {
                    let found = read(&manager, &handle, layer);
                    let expected = (0..cached).map(|at| computed(&tokens[..=at], layer));
                    assert_eq!(found[..cached], expected.collect::<Vec<_>>());
                    assert_eq!(found[cached..], vec![0.0; 9 - cached]);
                }
                let mut handle = handle;
                compute(&manager, &mut handle, &tokens, cached);
            }
        });
        manager.check_integrity().unwrap();
        assert_eq!(manager.stats().num_in_use, 0);
    });
}

#[test]
fn a_sequence_that_is_freed_while_it_is_viewed_and_written_harms_nobody() {
    within(LIMIT, || {
        let manager = manager(4);
        for round in 0..200_u16 {
            let named = RequestOptions { request_id: Some("a"), ..PLAIN };
            let mut handle = manager.allocate(&[1; 8], &named).unwrap();
            let gate = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    gate.wait();
                    manager.free_request("a").unwrap();
                    let other = manager.allocate(&[2; 8], &PLAIN).unwrap();
                    for _ in 0..4 {
                        assert_eq!(read(&manager, &other, 0), [0.0; 8]);
                    }
                });
                gate.wait();
                let numbers = [f32::from(round + 1); 8];
                let written = write(&manager, &mut handle, 0, 0, &numbers);
                match (written, manager.view(&handle, 0, 0, 8)) {
                    (Ok(()), Ok(view)) => assert_eq!(numbers_of(&view), numbers),
                    (_, Err(error)) => assert!(matches!(error, KvError::StaleHandle { .. })),
                    (Err(error), Ok(_)) => panic!("{error}, and then it was alive again"),
                }
            });
            manager.check_integrity().unwrap();
            assert_eq!(manager.stats().num_in_use, 0);
        }
    });
}

#[test]
fn forks_that_are_written_at_once_do_not_see_each_other() {
    within(LIMIT, || {
        let manager = manager(24);
        let tokens = [1, 2, 3, 4, 5, 6];
        for _ in 0..50 {
            let handle = start(&manager, &tokens);
            let mut forks =
                (0..4).map(|_| manager.fork(&handle, None).unwrap()).collect::<Vec<_>>();
            let gate = Barrier::new(forks.len());
            thread::scope(|scope| {
                for (number, fork) in (1_u16..).zip(&mut forks) {
                    let (manager, gate) = (&manager, &gate);
                    scope.spawn(move || {
                        gate.wait();
                        let numbers = [f32::from(number); 3];
                        write(manager, fork, 1, 3, &numbers).unwrap();
                        assert_eq!(read(manager, fork, 1)[3..], numbers);
                    });
                }
            });
            for (number, fork) in (1_u16..).zip(&forks) {
                assert_eq!(read(&manager, fork, 1)[3..], [f32::from(number); 3]);
            }
            check(&manager, &handle, &tokens);
            manager.check_integrity().unwrap();
        }
    });
}
