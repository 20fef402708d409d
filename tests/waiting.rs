//! Who waits for whom, and who never does. Races are made to happen: gates hold a thread where it
//! has to be, and each scenario runs under a watchdog, for what it must not do is hang.

mod common {
    pub(crate) mod asleep;
    pub(crate) mod caches;
    pub(crate) mod watchdog;
}

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Barrier, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use common::asleep::Sleeper;
use common::caches::{contents, holding, keys, tokens, values, write, write_batch};
use common::watchdog::within;
use kvspan::{KvError, LayerKvCache, Result};

const LIMIT: Duration = Duration::from_secs(20);

/// Longer than any wait that is meant to end.
const LONG: Duration = Duration::from_mins(1);

/// Starts `call` on a thread, and returns when it waits inside.
fn start_and_block<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    call: impl FnOnce() -> R + Send + 'scope,
) -> ScopedJoinHandle<'scope, R> {
    let (sender, receiver) = mpsc::channel();
    let thread = scope.spawn(move || {
        sender.send(Sleeper::current()).expect("the other thread waits for it");
        call()
    });
    receiver.recv().expect("the thread sends it").wait_until_asleep();
    assert!(!thread.is_finished(), "the call does not wait");
    thread
}

fn write_timeout(cache: &LayerKvCache, at: usize, token: u8, timeout: Duration) -> Result<()> {
    cache.write_kv_timeout(at, &keys(&[token]), &values(&[token]), timeout)
}

fn read(cache: &LayerKvCache, token: usize) -> u8 {
    cache.with_read_kv(token, |k, v| tokens(k, v)[0]).expect("the token is stored")
}

// Inside a closure

#[test]
fn changing_what_is_published_inside_a_closure_would_deadlock() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3]);
        let clone = cache.clone();
        let row = (keys(&[9]), values(&[9]));
        let batch = [(5, &*row.0, &*row.1), (1, &*row.0, &*row.1)];
        let changes: [&dyn Fn() -> Result<()>; 10] = [
            &|| write(&cache, 0, 9),
            &|| write(&clone, 2, 9),
            &|| write_timeout(&cache, 0, 9, LONG),
            &|| write_batch(&cache, &[(5, 9), (1, 9)]),
            &|| cache.write_kv_batch_timeout(&batch, LONG),
            &|| cache.truncate(1),
            &|| clone.truncate(1),
            &|| cache.truncate_timeout(1, LONG),
            &|| cache.reset(),
            &|| cache.reset_timeout(LONG),
        ];
        for change in changes {
            let refused = Ok(Err(KvError::WouldDeadlock));
            assert_eq!(cache.with_read_kv(0, |_, _| change()), refused);
            assert_eq!(cache.with_read_range(0, 0, |_| change()), refused);
            let nested = cache.with_read_kv(0, |_, _| clone.with_read_kv(1, |_, _| change()));
            assert_eq!(nested, Ok(refused.clone()));
            let after_nested = cache.with_read_kv(0, |_, _| {
                clone.with_read_kv(1, |_, _| ()).unwrap();
                change()
            });
            assert_eq!(after_nested, refused);
            assert_eq!(contents(&cache), [1, 2, 3]);
        }
        write(&cache, 0, 9).unwrap();
        cache.truncate(1).unwrap();
        assert_eq!(contents(&cache), [9]);
    });
}

#[test]
fn a_closure_of_another_cache_does_not_hide_the_one_around_it() {
    within(LIMIT, || {
        let (cache, other) = (holding(&[1]), holding(&[2]));
        let inside = |_: &[f32], _: &[f32]| other.with_read_kv(0, |_, _| write(&cache, 0, 9));
        assert_eq!(cache.with_read_kv(0, inside), Ok(Ok(Err(KvError::WouldDeadlock))));
    });
}

#[test]
fn a_closure_that_was_left_counts_no_more() {
    within(LIMIT, || {
        let (cache, other) = (holding(&[1]), holding(&[2]));
        let late = while_reading(&cache, || {
            cache.with_read_kv(0, |_, _| read(&cache, 0)).unwrap();
            let soon = Duration::from_millis(1);
            other.with_read_kv(0, |_, _| write_timeout(&cache, 0, 9, soon)).unwrap()
        });
        assert_eq!(late, Err(KvError::Timeout { range: 0..1, pins: 0 }));
    });
}

#[test]
fn everything_else_works_inside_a_closure() {
    within(LIMIT, || {
        let (cache, other) = (holding(&[1, 2]), holding(&[1, 2]));
        cache
            .with_read_range(0, 2, |span| {
                cache.append(&keys(&[3]), &values(&[3])).unwrap();
                write(&cache, 4, 5).unwrap();
                write_batch(&cache, &[(6, 7), (5, 6)]).unwrap();
                cache.initialize(8).unwrap();
                cache.prefault().unwrap();
                let mut reserved = cache.reserve(1).unwrap();
                reserved.keys_and_values_mut().0.copy_from_slice(&keys(&[9]));
                reserved.keys_and_values_mut().1.copy_from_slice(&values(&[9]));
                reserved.commit();
                drop(cache.reserve(1).unwrap());
                assert_eq!(contents(&cache), [1, 2, 3, 0, 5, 6, 7, 0, 9]);

                let pinned = cache.pin_range(1, 3).unwrap();
                assert_eq!(tokens(pinned.keys(), pinned.values()), [2, 3]);
                let (mut k, mut v) = (keys(&[0]), values(&[0]));
                cache.read_range_into(2, 3, &mut k, &mut v).unwrap();
                assert_eq!(tokens(&k, &v), [3]);
                assert_eq!(contents(&cache.deep_clone().unwrap()).len(), 9);
                cache.truncate(9).unwrap();

                write(&other, 0, 9).unwrap();
                other.truncate(1).unwrap();
                assert_eq!(tokens(span.keys, span.values), [1, 2]);
            })
            .unwrap();
        assert_eq!(contents(&other), [9]);
    });
}

#[test]
fn a_closure_that_panics_releases_everything() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3]);
        let outer_pin = cache.pin_range(2, 3).unwrap();
        let panicking = || {
            cache.with_read_kv(0, |_, _| {
                let _pinned = cache.pin_range(0, 2).unwrap();
                let _reserved = cache.reserve(2).unwrap();
                cache.with_read_range(0, 3, |_| panic!("in a closure")).unwrap()
            })
        };
        panic::catch_unwind(AssertUnwindSafe(panicking)).unwrap_err();
        assert_eq!(write(&cache, 2, 9), Err(KvError::Pinned { range: 2..3, pins: 1 }));
        drop(outer_pin);
        thread::scope(|scope| scope.spawn(|| write(&cache, 0, 9)).join().unwrap()).unwrap();
        // Nor does this thread pass for one that is still inside.
        let gate = Barrier::new(2);
        let wait = |_: &[f32], _: &[f32]| [gate.wait(), gate.wait()];
        thread::scope(|scope| {
            let reader = scope.spawn(|| cache.with_read_kv(0, wait).map(drop));
            gate.wait();
            let late = write_timeout(&cache, 0, 9, Duration::from_millis(1));
            assert_eq!(late, Err(KvError::Timeout { range: 0..1, pins: 0 }));
            gate.wait();
            reader.join().unwrap().unwrap();
        });
        cache.append(&keys(&[4]), &values(&[4])).unwrap();
        assert_eq!(contents(&cache), [9, 2, 3, 4]);
        cache.reset().unwrap();
    });
}

#[test]
fn a_panic_that_is_caught_inside_a_closure_leaves_the_outer_closure_protected() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        cache
            .with_read_kv(0, |_, _| {
                let panicking = || cache.with_read_kv(1, |_, _| panic!("deeper"));
                panic::catch_unwind(AssertUnwindSafe(panicking)).unwrap_err();
                assert_eq!(write(&cache, 0, 9), Err(KvError::WouldDeadlock));
            })
            .unwrap();
        write(&cache, 0, 9).unwrap();
    });
}

#[test]
fn closures_run_side_by_side() {
    within(LIMIT, || {
        let cache = holding(&[1]);
        let all_inside = Barrier::new(3);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| cache.with_read_kv(0, |_, _| all_inside.wait()).map(drop).unwrap());
            }
        });
    });
}

// Overwriters wait for closures

#[test]
fn an_overwriter_waits_for_the_closure_and_then_succeeds() {
    within(LIMIT, || {
        let changes: [fn(&LayerKvCache) -> Result<()>; 4] = [
            |cache| write(cache, 1, 9),
            |cache| write_batch(cache, &[(4, 9), (1, 9)]),
            |cache| cache.truncate(1),
            |cache| write_timeout(cache, 1, 9, LONG),
        ];
        let expected: [&[u8]; 4] = [&[1, 9, 3], &[1, 9, 3, 0, 9], &[1], &[1, 9, 3]];
        for (change, expected) in changes.into_iter().zip(expected) {
            let cache = holding(&[1, 2, 3]);
            thread::scope(|scope| {
                let read = |k: &[f32], v: &[f32]| {
                    let overwriter = start_and_block(scope, || change(&cache));
                    assert_eq!((tokens(k, v), contents(&cache)), (vec![1], vec![1, 2, 3]));
                    overwriter
                };
                cache.with_read_kv(0, read).unwrap().join().unwrap().unwrap();
            });
            assert_eq!(contents(&cache), expected);
        }
    });
}

#[test]
fn an_overwriter_gives_up_on_a_closure_when_its_time_is_over() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let late = while_reading(&cache, || {
            let late = write_timeout(&cache, 0, 9, Duration::from_millis(5));
            (late, read(&cache, 0))
        });
        assert_eq!(late, (Err(KvError::Timeout { range: 0..1, pins: 0 }), 1));
        write(&cache, 0, 9).unwrap();
        assert_eq!(contents(&cache), [9, 2]);
    });
}

/// As for a pin: what is past the length can not be in use.
#[test]
fn a_truncation_that_gives_up_on_a_closure_names_the_tokens_it_would_have_taken() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let soon = Duration::from_millis(5);
        let late = while_reading(&cache, || cache.truncate_timeout(1, soon));
        assert_eq!(late, Err(KvError::Timeout { range: 1..2, pins: 0 }));
        assert_eq!(contents(&cache), [1, 2]);
    });
}

/// Makes `call` on another thread while this one is in a closure.
fn while_reading<R: Send>(cache: &LayerKvCache, call: impl FnOnce() -> R + Send) -> R {
    let in_closure = |_: &[f32], _: &[f32]| thread::scope(|scope| scope.spawn(call).join());
    cache.with_read_kv(0, in_closure).expect("the token is stored").expect("the call is well")
}

#[test]
fn an_overwriter_behind_another_gives_up_when_its_time_is_over() {
    within(LIMIT, || {
        let cache = holding(&[1]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let first = start_and_block(scope, || write(&cache, 0, 8));
                let second = scope.spawn(|| write_timeout(&cache, 0, 9, Duration::from_millis(5)));
                let expected = Err(KvError::Timeout { range: 0..1, pins: 0 });
                assert_eq!(second.join().unwrap(), expected);
                first
            };
            cache.with_read_kv(0, inside).unwrap().join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [8]);
    });
}

#[test]
fn a_read_inside_a_read_does_not_hang_behind_an_overwriter() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let overwriter = start_and_block(scope, || write(&cache, 0, 9));
                // On this thread, and on another that this closure waits for.
                assert_eq!((read(&cache, 0), read(&cache, 1)), (1, 2));
                assert_eq!(contents(&cache), [1, 2]);
                drop(cache.pin_range(0, 1).unwrap());
                scope.spawn(|| assert_eq!(contents(&cache), [1, 2])).join().unwrap();
                scope.spawn(|| drop(cache.pin_range(0, 1).unwrap())).join().unwrap();
                scope.spawn(|| drop(cache.deep_clone().unwrap())).join().unwrap();
                assert!(!overwriter.is_finished());
                overwriter
            };
            cache.with_read_kv(0, inside).unwrap().join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [9, 2]);
    });
}

#[test]
fn an_append_waits_neither_for_a_closure_nor_for_an_overwriter_that_does() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let overwriter = start_and_block(scope, || write(&cache, 0, 9));
                let grow = || {
                    cache.append(&keys(&[3]), &values(&[3])).unwrap();
                    write(&cache, 4, 5).unwrap();
                    cache.initialize(6).unwrap();
                    cache.reserve(1).unwrap().commit();
                };
                scope.spawn(grow).join().unwrap();
                assert!(!overwriter.is_finished());
                assert_eq!(contents(&cache), [1, 2, 3, 0, 5, 0, 0]);
                overwriter
            };
            cache.with_read_kv(0, inside).unwrap().join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [9, 2, 3, 0, 5, 0, 0]);
    });
}

#[test]
fn a_truncation_that_waited_also_takes_what_was_appended_meanwhile() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let truncation = start_and_block(scope, || cache.truncate(1));
                cache.append(&keys(&[4]), &values(&[4])).unwrap();
                truncation
            };
            cache.with_read_kv(0, inside).unwrap().join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [1]);
    });
}

// Overwriters and pins

#[test]
fn changing_a_pinned_token_fails_at_once_even_while_a_closure_reads() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let _pinned = cache.pin_range(0, 1).unwrap();
        let refused = while_reading(&cache, || [write(&cache, 0, 9), cache.truncate(0)]);
        let pinned = |range| Err(KvError::Pinned { range, pins: 1 });
        assert_eq!(refused, [pinned(0..1), pinned(0..2)]);
    });
}

#[test]
fn an_overwriter_finds_a_pin_that_was_made_while_it_waited_for_a_closure() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let changes: [fn(&LayerKvCache) -> Result<()>; 2] =
            [|cache| write(cache, 0, 9), |cache| cache.reset()];
        for (change, range) in changes.into_iter().zip([0..1, 0..2]) {
            thread::scope(|scope| {
                let inside = |_: &[f32], _: &[f32]| {
                    let overwriter = start_and_block(scope, || change(&cache));
                    (overwriter, cache.pin_range(0, 1).unwrap())
                };
                let (overwriter, pinned) = cache.with_read_kv(1, inside).unwrap();
                assert_eq!(overwriter.join().unwrap(), Err(KvError::Pinned { range, pins: 1 }));
                assert_eq!(tokens(pinned.keys(), pinned.values()), [1]);
            });
        }
    });
}

#[test]
fn a_truncation_finds_a_pin_on_what_was_appended_while_it_waited() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let truncation = start_and_block(scope, || cache.truncate(1));
                cache.append(&keys(&[3]), &values(&[3])).unwrap();
                (truncation, cache.pin_range(2, 3).unwrap())
            };
            let (truncation, pinned) = cache.with_read_kv(0, inside).unwrap();
            let refused = Err(KvError::Pinned { range: 1..3, pins: 1 });
            assert_eq!(truncation.join().unwrap(), refused);
            assert_eq!(tokens(pinned.keys(), pinned.values()), [3]);
        });
        assert_eq!(contents(&cache), [1, 2, 3]);
    });
}

#[test]
fn an_overwriter_with_time_waits_for_a_pin_that_another_thread_drops() {
    within(LIMIT, || {
        let changes: [fn(&LayerKvCache) -> Result<()>; 4] = [
            |cache| write_timeout(cache, 1, 9, LONG),
            |cache| {
                let (k, v) = (keys(&[9]), values(&[9]));
                cache.write_kv_batch_timeout(&[(0, &k, &v), (1, &k, &v)], LONG)
            },
            |cache| cache.truncate_timeout(1, LONG),
            |cache| cache.reset_timeout(LONG),
        ];
        let expected: [&[u8]; 4] = [&[1, 9, 3], &[9, 9, 3], &[1], &[]];
        for (change, expected) in changes.into_iter().zip(expected) {
            let cache = holding(&[1, 2, 3]);
            thread::scope(|scope| {
                let pins = [cache.pin_range(0, 2).unwrap(), cache.pin_range(1, 3).unwrap()];
                let overwriter = start_and_block(scope, || change(&cache));
                for pin in pins {
                    // It waits for all of them, and in its wait it keeps nobody out.
                    assert_eq!(
                        (contents(&cache), overwriter.is_finished()),
                        (vec![1, 2, 3], false)
                    );
                    scope.spawn(move || drop(pin)).join().unwrap();
                }
                overwriter.join().unwrap().unwrap();
            });
            assert_eq!(contents(&cache), expected);
        }
    });
}

#[test]
fn an_overwriter_that_waits_for_a_pin_holds_up_nobody() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        thread::scope(|scope| {
            let pinned = cache.pin_range(0, 1).unwrap();
            let overwriter = start_and_block(scope, || write_timeout(&cache, 0, 9, LONG));
            write(&cache, 1, 8).unwrap();
            cache.append(&keys(&[3]), &values(&[3])).unwrap();
            cache.truncate(2).unwrap();
            drop(cache.pin_range(1, 2).unwrap());
            assert_eq!((contents(&cache), overwriter.is_finished()), (vec![1, 8], false));
            drop(pinned);
            overwriter.join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [9, 8]);
    });
}

#[test]
fn an_overwriter_with_time_waits_for_a_closure_and_then_for_a_pin() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        thread::scope(|scope| {
            let inside = |_: &[f32], _: &[f32]| {
                let overwriter = start_and_block(scope, || write_timeout(&cache, 0, 9, LONG));
                (overwriter, cache.pin_range(0, 1).unwrap())
            };
            let (overwriter, pinned) = cache.with_read_kv(1, inside).unwrap();
            assert_eq!((read(&cache, 0), overwriter.is_finished()), (1, false));
            drop(pinned);
            overwriter.join().unwrap().unwrap();
        });
        assert_eq!(contents(&cache), [9, 2]);
    });
}

#[test]
fn a_view_outlives_all_caches_and_ends_on_another_thread() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3]);
        let clone = cache.clone();
        let (pinned, also) = (cache.pin_range(0, 2).unwrap(), clone.pin_range(1, 3).unwrap());
        drop((cache, clone));
        let reader = thread::spawn(move || {
            assert_eq!(tokens(pinned.keys(), pinned.values()), [1, 2]);
        });
        reader.join().unwrap();
        assert_eq!(tokens(also.keys(), also.values()), [2, 3]);
    });
}

#[test]
fn a_reservation_made_on_one_thread_is_committed_on_another() {
    within(LIMIT, || {
        let cache = holding(&[1]);
        let mut reserved = cache.reserve(1).unwrap();
        let commit = move || {
            reserved.keys_and_values_mut().0.copy_from_slice(&keys(&[2]));
            reserved.keys_and_values_mut().1.copy_from_slice(&values(&[2]));
            reserved.commit()
        };
        assert_eq!(thread::spawn(commit).join().unwrap(), 1..2);
        assert_eq!(contents(&cache), [1, 2]);
    });
}

// Several at once

#[test]
fn two_caches_locked_crosswise_end_by_their_timeouts() {
    within(LIMIT, || {
        let caches = [holding(&[1]), holding(&[2])];
        let both_inside = Barrier::new(2);
        let cross = |mine: &LayerKvCache, other: &LayerKvCache| {
            let inside = |_: &[f32], _: &[f32]| {
                both_inside.wait();
                let result = write_timeout(other, 0, 9, Duration::from_millis(20));
                both_inside.wait();
                result
            };
            mine.with_read_kv(0, inside).unwrap()
        };
        let results = thread::scope(|scope| {
            let threads = [
                scope.spawn(|| cross(&caches[0], &caches[1])),
                scope.spawn(|| cross(&caches[1], &caches[0])),
            ];
            threads.map(|thread| thread.join().unwrap())
        });
        let late = Err(KvError::Timeout { range: 0..1, pins: 0 });
        assert_eq!(results, [late.clone(), late]);
        assert_eq!((contents(&caches[0]), contents(&caches[1])), (vec![1], vec![2]));
    });
}

/// Each closure stays until another one is inside, or until nobody comes any more: unless readers
/// stand back for an overwriter, there never is a moment without a reader.
#[test]
fn readers_do_not_starve_an_overwriter() {
    within(LIMIT, || {
        let cache = holding(&[1, 2]);
        let (entered, done) = (AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(SeqCst) {
                        let hand_over = |_: &[f32], _: &[f32]| {
                            let me = entered.fetch_add(1, SeqCst);
                            let alone = || entered.load(SeqCst) == me + 1;
                            (0..2_000).take_while(|_| alone()).for_each(|_| thread::yield_now());
                        };
                        cache.with_read_kv(0, hand_over).unwrap();
                    }
                });
            }
            for token in 0..20 {
                write(&cache, 1, token).unwrap();
            }
            done.store(true, SeqCst);
        });
        assert_eq!(contents(&cache), [1, 19]);
    });
}
