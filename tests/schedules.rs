//! A few threads that use the same blocks, in many different orders. A scheduler decides before each
//! lock and each atomic operation who goes on, so that what takes a thread at the wrong moment is
//! found without luck, and can be played again.
//!
//! ```text
//! make schedules                          thousands of orders of each scenario
//! make schedules KVSPAN_SCHEDULES=100000  more of them
//! ```
//!
//! A scenario that fails prints its order; `shuttle::replay(scenario, order)` runs it again.
#![cfg(shuttle)]

mod common {
    pub(crate) mod sequences;
}

use std::env;

use common::sequences::{BLOCK_SIZE, config, keys, numbers, numbers_of, read, values, write};
use kvspan::{KvCacheHandle, KvCacheManager, KvError, PagedKvCacheHandle, RequestOptions, Result};
use shuttle::thread;

const PLAIN: RequestOptions<'_> = RequestOptions {
    request_id: None,
    cache_salt: None,
    lora_id: None,
    extra_keys: &[],
    lookahead: 0,
};
const NAMED: RequestOptions<'_> = RequestOptions { request_id: Some("a"), ..PLAIN };
/// Two full blocks and one token more.
const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
const PROMPT_ROWS: [f32; 9] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];

/// Tries many orders: some at random, and some with few switches between threads.
fn explore(scenario: fn()) {
    let orders = env::var("KVSPAN_SCHEDULES").map_or(1_000, |n| n.parse().expect("a number"));
    shuttle::check_random(scenario, orders);
    for switches in 1..4 {
        shuttle::check_pct(scenario, orders / 3, switches);
    }
}

fn manager(num_blocks: usize) -> KvCacheManager {
    KvCacheManager::new(config(num_blocks)).expect("a small pool")
}

/// A sequence of zeros with room for as many tokens. `None` without blocks, which is the only reason.
fn allocate(
    manager: &KvCacheManager,
    tokens: &[u32],
    options: &RequestOptions<'_>,
) -> Option<PagedKvCacheHandle> {
    if_there_is_room(manager.allocate(tokens, options))
}

fn if_there_is_room<R>(result: Result<R>) -> Option<R> {
    match result {
        Ok(value) => Some(value),
        Err(KvError::OutOfBlocks { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The prompt, computed as far as it was not cached, and committed.
fn compute(manager: &KvCacheManager, mut handle: PagedKvCacheHandle) -> PagedKvCacheHandle {
    let start = handle.num_cached_tokens();
    for layer in 0..2 {
        write(manager, &mut handle, layer, start, &PROMPT_ROWS[start..]).expect("it is alone");
    }
    manager.commit(&mut handle, &PROMPT[start..]).expect("the tokens are its own");
    handle
}

fn start(manager: &KvCacheManager) -> PagedKvCacheHandle {
    compute(manager, manager.allocate(&PROMPT, &PLAIN).expect("there is room"))
}

/// Takes blocks, if there are as many, finds them zero, fills them, and has them for itself.
fn use_blocks(manager: &KvCacheManager, num_blocks: usize, number: f32) {
    let tokens = vec![99; num_blocks * BLOCK_SIZE];
    let Some(mut handle) = allocate(manager, &tokens, &PLAIN) else { return };
    for layer in 0..2 {
        assert_eq!(
            read(manager, &handle, layer),
            vec![0.0; tokens.len()],
            "a new owner finds zeros"
        );
        write(manager, &mut handle, layer, 0, &vec![number; tokens.len()]).expect("it is alone");
    }
    thread::yield_now();
    for layer in 0..2 {
        assert_eq!(read(manager, &handle, layer), vec![number; tokens.len()], "nobody else writes");
    }
}

/// Ends well, or because somebody freed the sequence.
fn unless_freed<R>(result: Result<R>) -> Option<R> {
    match result {
        Ok(value) => Some(value),
        Err(KvError::StaleHandle { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn all_is_given_back(manager: &KvCacheManager) {
    manager.check_integrity().expect("nothing is lost");
    assert!(manager.leak_report().is_empty());
    assert_eq!(manager.stats().num_in_use, 0);
}

#[test]
fn who_matches_a_prefix_has_it_whatever_is_evicted_meanwhile() {
    explore(|| {
        let manager = &manager(4);
        drop(start(manager));
        let matches = || {
            let Some(handle) = allocate(manager, &PROMPT, &PLAIN) else { return };
            let cached = handle.num_cached_tokens();
            for layer in 0..2 {
                let rows = read(manager, &handle, layer);
                assert_eq!(rows[..cached], PROMPT_ROWS[..cached], "what hits is what was written");
                assert_eq!(rows[cached..], vec![0.0; PROMPT.len() - cached]);
            }
            drop(compute(manager, handle));
        };
        thread::scope(|scope| {
            scope.spawn(matches);
            scope.spawn(|| use_blocks(manager, 3, 50.0));
            matches();
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_view_of_a_sequence_that_is_freed_stays_as_it_is() {
    explore(|| {
        let manager = &manager(3);
        let mut handle = manager.allocate(&PROMPT, &NAMED).expect("there is room");
        write(manager, &mut handle, 0, 0, &PROMPT_ROWS).expect("it is alone");
        thread::scope(|scope| {
            scope.spawn(|| {
                manager.free_request("a").expect("nobody else frees it");
                use_blocks(manager, 1, 50.0);
            });
            scope.spawn(|| use_blocks(manager, 2, 60.0));
            let (mut k, mut v) = ([0.0; 10], [0.0; 10]);
            let copied = manager.read_range_into(&handle, 0, 0, 5, &mut k, &mut v);
            if unless_freed(copied).is_some() {
                assert_eq!(numbers(&k, &v), PROMPT_ROWS[..5], "it is read before it is freed");
            }
            if let Some(view) = unless_freed(manager.view(&handle, 0, 2, 7)) {
                for _ in 0..3 {
                    assert_eq!(numbers_of(&view), PROMPT_ROWS[2..7], "a view changed");
                    thread::yield_now();
                }
            }
        });
        all_is_given_back(manager);
    });
}

#[test]
fn forks_that_are_written_at_once_do_not_see_each_other() {
    explore(|| {
        let manager = &manager(6);
        let mut handle = manager.allocate(&PROMPT[..3], &PLAIN).expect("there is room");
        write(manager, &mut handle, 1, 0, &PROMPT_ROWS[..3]).expect("it is alone");
        let forks = [manager.fork(&handle, None), manager.fork(&handle, None)];
        thread::scope(|scope| {
            for (fork, number) in forks.into_iter().zip([50.0, 60.0]) {
                let mut fork = fork.expect("there is room");
                scope.spawn(move || {
                    write(manager, &mut fork, 1, 1, &[number]).expect("there is room");
                    assert_eq!(read(manager, &fork, 1), [1.0, number, 3.0]);
                    let other = manager.fork(&fork, None).expect("it has no name");
                    manager.extend(&mut fork, 1).expect("there is room");
                    write(manager, &mut fork, 1, 3, &[number]).expect("there is room");
                    assert_eq!(read(manager, &other, 1), [1.0, number, 3.0]);
                    assert_eq!(read(manager, &fork, 1), [1.0, number, 3.0, number]);
                });
            }
            write(manager, &mut handle, 1, 2, &[70.0]).expect("there is room");
            assert_eq!(read(manager, &handle, 1), [1.0, 2.0, 70.0]);
            drop(handle);
            use_blocks(manager, 1, 80.0);
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_block_that_two_copy_and_the_third_frees_goes_to_nobody_meanwhile() {
    explore(|| {
        let manager = &manager(4);
        let mut handle = manager.allocate(&PROMPT[..4], &PLAIN).expect("there is room");
        write(manager, &mut handle, 0, 0, &PROMPT_ROWS[..4]).expect("it is alone");
        let forks = [manager.fork(&handle, None), manager.fork(&handle, None)];
        thread::scope(|scope| {
            for (fork, number) in forks.into_iter().zip([50.0, 60.0]) {
                let mut fork = fork.expect("there is room");
                scope.spawn(move || {
                    let written = write(manager, &mut fork, 0, 3, &[number]);
                    let last = if if_there_is_room(written).is_some() { number } else { 4.0 };
                    assert_eq!(read(manager, &fork, 0), [1.0, 2.0, 3.0, last]);
                });
            }
            drop(handle);
            use_blocks(manager, 1, 70.0);
            use_blocks(manager, 2, 80.0);
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_sequence_that_is_freed_before_its_blocks_are_zero_harms_nobody() {
    explore(|| {
        let manager = &manager(2);
        use_blocks(manager, 2, 40.0);
        thread::scope(|scope| {
            scope.spawn(|| {
                // It may be there, not yet, or not any more.
                for _ in 0..6 {
                    if manager.free_request("a").is_ok() {
                        break;
                    }
                }
                use_blocks(manager, 2, 50.0);
            });
            let Some(mut handle) = allocate(manager, &[0; 8], &NAMED) else { return };
            if unless_freed(write(manager, &mut handle, 0, 0, &[60.0; 8])).is_some() {
                let view = unless_freed(manager.view(&handle, 0, 0, 8));
                assert!(view.is_none_or(|view| numbers_of(&view) == [60.0; 8]));
            }
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_sequence_that_is_closed_while_it_is_written_harms_nobody() {
    explore(|| {
        let manager = &manager(2);
        let mut handle = manager.allocate(&[0; 4], &NAMED).expect("there is room");
        let mut other = manager.allocate(&[0; 4], &PLAIN).expect("there is room");
        thread::scope(|scope| {
            scope.spawn(|| {
                manager.free_request("a").expect("nobody else frees it");
                use_blocks(manager, 1, 50.0);
            });
            scope.spawn(|| use_blocks(manager, 1, 60.0));
            // In a call for many, too.
            let rows = [70.0, 80.0];
            let mut both = [&mut handle, &mut other];
            let written = manager.write_many(0, &mut both, &[1, 2], &keys(&rows), &values(&rows));
            let expected = if unless_freed(written).is_some() { 80.0 } else { 0.0 };
            assert_eq!(read(manager, &other, 0), [0.0, 0.0, expected, 0.0], "all or nothing");
            unless_freed(manager.extend(&mut handle, 0));
            unless_freed(write(manager, &mut handle, 0, 0, &[90.0; 4]));
            unless_freed(manager.commit(&mut handle, &[0; 4]));
            unless_freed(manager.truncate(&mut handle, 1));
        });
        drop((handle, other));
        all_is_given_back(manager);
    });
}

#[test]
fn of_two_that_free_the_same_sequences_one_does_and_nobody_reads_what_is_gone() {
    explore(|| {
        let manager = &manager(4);
        let handles = [40.0, 50.0].map(|number| {
            let mut handle = manager.allocate(&[0; 4], &PLAIN).expect("there is room");
            write(manager, &mut handle, 0, 0, &[number; 4]).expect("it is alone");
            handle
        });
        let [one, other] = &handles;
        thread::scope(|scope| {
            let freed = scope.spawn(|| manager.free_many(&[one, other]).is_ok());
            scope.spawn(|| {
                let (mut k, mut v) = ([0.0; 8], [0.0; 8]);
                let copied = manager.read_range_into(other, 0, 0, 4, &mut k, &mut v);
                if unless_freed(copied).is_some() {
                    assert_eq!(numbers(&k, &v), [50.0; 4], "it is read before it is freed");
                }
                use_blocks(manager, 3, 60.0);
            });
            let also_freed = manager.free_many(&[other, one]).is_ok();
            use_blocks(manager, 1, 70.0);
            assert!(freed.join().expect("it is well") != also_freed, "one of the two frees both");
        });
        all_is_given_back(manager);
    });
}

#[test]
fn calls_for_many_do_all_or_nothing_whoever_is_freed_meanwhile() {
    explore(|| {
        let manager = &manager(6);
        let options = [NAMED, PLAIN];
        let requests = options.map(|options| (&PROMPT[..6], options));
        let mut handles = manager.allocate_many(&requests).expect("there is room");
        thread::scope(|scope| {
            scope.spawn(|| {
                manager.free_request("a").expect("nobody else frees it");
                use_blocks(manager, 2, 50.0);
            });
            let mut both = handles.iter_mut().collect::<Vec<_>>();
            // Within a block, and past its end.
            let inside = unless_freed(manager.extend_many(&mut both, &[1, 1]));
            let extended = unless_freed(manager.extend_many(&mut both, &[1, 3]));
            let committed = unless_freed(manager.commit_many(&mut both, &[&PROMPT[..5]; 2]));
            let expected = 6 + usize::from(inside.is_some()) + 3 * usize::from(extended.is_some());
            assert_eq!(handles[1].num_tokens(), expected, "all or nothing");
            let expected = 5 * usize::from(committed.is_some());
            assert_eq!(handles[1].num_committed_tokens(), expected, "all or nothing");
        });
        drop(handles);
        all_is_given_back(manager);
    });
}

#[test]
fn a_view_that_ends_elsewhere_gives_its_blocks_back_whole() {
    explore(|| {
        let manager = &manager(2);
        let mut handle = manager.allocate(&[0; 8], &PLAIN).expect("there is room");
        write(manager, &mut handle, 0, 0, &[40.0; 8]).expect("it is alone");
        let views = [(0, 3), (2, 6)].map(|(start, end)| manager.view(&handle, 0, start, end));
        drop(handle);
        thread::scope(|scope| {
            for view in views {
                scope.spawn(move || {
                    let view = view.expect("it is alive");
                    assert_eq!(numbers_of(&view), vec![40.0; view.len()], "a view changed");
                });
            }
            use_blocks(manager, 1, 50.0);
            use_blocks(manager, 2, 60.0);
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_view_keeps_its_rows_from_a_later_owner_of_the_block() {
    explore(|| {
        let manager = &manager(4);
        let handle = start(manager);
        thread::scope(|scope| {
            let view = manager.view(&handle, 1, 4, 8).expect("it is alive");
            drop(handle);
            scope.spawn(|| {
                // The same block, by its key; and the view is in the way of the write.
                let Some(mut other) = allocate(manager, &PROMPT, &PLAIN) else { return };
                let cached = other.num_cached_tokens();
                let written = write(manager, &mut other, 1, 5, &[50.0]);
                if if_there_is_room(written).is_some() {
                    let row = if cached == 8 { 5.0 } else { 0.0 };
                    assert_eq!(read(manager, &other, 1)[4..6], [row, 50.0]);
                }
            });
            scope.spawn(|| use_blocks(manager, 1, 60.0));
            assert_eq!(numbers_of(&view), PROMPT_ROWS[4..8], "a view changed");
            thread::yield_now();
            assert_eq!(numbers_of(&view), PROMPT_ROWS[4..8], "a view changed");
        });
        all_is_given_back(manager);
    });
}

#[test]
fn a_block_that_is_overwritten_is_found_as_it_was_or_not_at_all() {
    explore(|| {
        let manager = &manager(5);
        let mut handle = start(manager);
        let find = || {
            let Some(other) = allocate(manager, &PROMPT, &PLAIN) else { return };
            let cached = other.num_cached_tokens();
            for layer in [0, 1, 0] {
                assert_eq!(read(manager, &other, layer)[..cached], PROMPT_ROWS[..cached]);
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(find);
            write(manager, &mut handle, 0, 6, &[50.0]).expect("there is room");
            assert_eq!(read(manager, &handle, 0)[5..], [6.0, 50.0, 8.0, 9.0]);
            find();
        });
        drop(handle);
        all_is_given_back(manager);
    });
}

#[test]
fn equal_blocks_that_are_committed_at_once_become_one() {
    explore(|| {
        let manager = &manager(9);
        let computed = || {
            let handle = start(manager);
            thread::yield_now();
            for layer in 0..2 {
                assert_eq!(read(manager, &handle, layer), PROMPT_ROWS);
            }
            handle
        };
        let handles = thread::scope(|scope| {
            let others = [scope.spawn(computed), scope.spawn(computed)];
            let own = computed();
            let [one, other] = others.map(|other| other.join().expect("it is well"));
            [own, one, other]
        });
        let first_two =
            |handle: &PagedKvCacheHandle| handle.block_table().physical_blocks[..2].to_vec();
        assert!(handles.iter().all(|handle| first_two(handle) == first_two(&handles[0])));
        assert_eq!((manager.stats().num_committed, manager.stats().num_in_use), (2, 5));
        drop(handles);
        all_is_given_back(manager);
    });
}

#[test]
fn the_numbers_add_up_at_every_instant() {
    explore(|| {
        let manager = &manager(5);
        drop(start(manager));
        thread::scope(|scope| {
            scope.spawn(|| {
                let handle = start(manager);
                let mut fork = manager.fork(&handle, Some("fork")).expect("the name is free");
                drop(handle);
                let _ = manager.truncate(&mut fork, 6);
            });
            scope.spawn(|| use_blocks(manager, 2, 50.0));
            for _ in 0..4 {
                manager.check_integrity().expect("nothing is lost");
                let stats = manager.stats();
                assert_eq!(stats.num_free + stats.num_cached + stats.num_in_use, 5);
                assert_eq!(stats.hit_tokens + stats.miss_tokens, stats.query_tokens);
                let picture = manager.inspect();
                assert_eq!(picture.blocks.len(), 5);
                let _ = manager.reset_prefix_cache();
            }
        });
        all_is_given_back(manager);
    });
}
