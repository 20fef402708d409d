//! What the original API does not have: appending, truncating, reserving, pinning and copying, and
//! that no byte of what was given up shows again.

mod common {
    pub(crate) mod caches;
    pub(crate) mod watchdog;
}

use std::time::Duration;

use common::caches::{CONFIG, contents, empty, holding, keys, tokens, values, write, write_batch};
use common::watchdog::within;
use kvspan::{KVCacheConfig, KvError, LayerKvCache, ReservedSpan};

const WIDTH: usize = CONFIG.token_width();
const CAPACITY: usize = CONFIG.max_tokens_per_seq;

fn append(cache: &LayerKvCache, tokens: &[u8]) -> kvspan::Result<std::ops::Range<usize>> {
    cache.append(&keys(tokens), &values(tokens))
}

/// A name, and what it does to a cache.
type Step = (&'static str, fn(&LayerKvCache));

fn fill(reserved: &mut ReservedSpan, tokens: &[u8]) {
    let (k, v) = reserved.keys_and_values_mut();
    k.copy_from_slice(&keys(tokens));
    v.copy_from_slice(&values(tokens));
}

// Append

#[test]
fn append_adds_one_or_many_tokens_and_returns_their_positions() {
    let cache = empty();
    assert_eq!(append(&cache, &[1]), Ok(0..1));
    assert_eq!(append(&cache, &[2, 3, 4]), Ok(1..4));
    assert_eq!(contents(&cache), [1, 2, 3, 4]);
}

#[test]
fn append_goes_on_after_initialized_tokens() {
    let cache = empty();
    cache.initialize(2).unwrap();
    assert_eq!(append(&cache, &[7]), Ok(2..3));
    assert_eq!(contents(&cache), [0, 0, 7]);
}

#[test]
fn append_fills_the_cache_to_the_last_token_and_never_clamps() {
    let cache = holding(&[1; CAPACITY - 2]);
    let range = CAPACITY - 2..CAPACITY + 1;
    let refused = Err(KvError::CapacityExceeded { range, capacity: CAPACITY });
    assert_eq!(append(&cache, &[2, 3, 4]), refused);
    assert_eq!(contents(&cache), [1; CAPACITY - 2]);
    assert_eq!(append(&cache, &[2, 3]), Ok(CAPACITY - 2..CAPACITY));
    assert!(matches!(append(&cache, &[4]), Err(KvError::CapacityExceeded { .. })));
}

#[test]
fn append_of_no_tokens_changes_nothing() {
    let cache = holding(&[1]);
    assert_eq!(append(&cache, &[]), Ok(1..1));
    let full = holding(&[1; CAPACITY]);
    assert_eq!(append(&full, &[]), Ok(CAPACITY..CAPACITY));
}

#[test]
fn append_refuses_part_of_a_token() {
    let cache = holding(&[1]);
    for given in [1, WIDTH - 1, WIDTH + 1, 3 * WIDTH - 1] {
        let row = vec![9.0; given];
        assert_eq!(cache.append(&row, &row), Err(KvError::WidthMismatch { given, width: WIDTH }));
    }
    let refused = Err(KvError::LengthMismatch { keys: WIDTH, values: 2 * WIDTH });
    assert_eq!(cache.append(&[9.0; WIDTH], &[9.0; 2 * WIDTH]), refused);
    assert_eq!(contents(&cache), [1]);
}

#[test]
fn a_write_works_once_an_append_has_begun_the_sequence() {
    let cache = holding(&[1]);
    write(&cache, 1, 2).unwrap();
    assert_eq!(contents(&cache), [1, 2]);
}

// Truncate and reset

#[test]
fn truncate_takes_the_new_length() {
    let cache = holding(&[1, 2, 3, 4]);
    cache.truncate(3).unwrap();
    assert_eq!(contents(&cache), [1, 2, 3]);
    cache.truncate(0).unwrap();
    assert!(cache.is_empty());
}

#[test]
fn truncate_refuses_to_grow() {
    let cache = holding(&[1, 2]);
    for new_len in [3, CAPACITY + 1, usize::MAX] {
        let refused = Err(KvError::RangeOutOfBounds { start: new_len, end: new_len, len: 2 });
        assert_eq!(cache.truncate(new_len), refused);
    }
    assert_eq!(contents(&cache), [1, 2]);
}

#[test]
fn truncate_to_the_present_length_always_succeeds() {
    empty().truncate(0).unwrap();
    empty().reset().unwrap();
    let cache = holding(&[1, 2]);
    let _pinned = cache.pin_range(0, 2).unwrap();
    let _reserved = cache.reserve(1).unwrap();
    cache.truncate(2).unwrap();
    cache.with_read_kv(0, |_, _| cache.truncate(2)).unwrap().unwrap();
}

#[test]
fn reset_empties_the_cache_and_keeps_the_buffer() {
    let cache = holding(&[1, 2, 3]);
    let (allocated, address) = (cache.nbytes(), cache.pin_range(0, 1).unwrap().keys().as_ptr());
    cache.reset().unwrap();
    assert_eq!((cache.len(), cache.is_empty(), cache.nbytes()), (0, true, allocated));
    write(&cache, 0, 4).unwrap();
    assert_eq!(contents(&cache), [4]);
    assert_eq!(cache.pin_range(0, 1).unwrap().keys().as_ptr(), address);
}

// What was given up

/// Everything that makes tokens readable without writing them.
#[test]
fn given_up_tokens_read_as_zeros_however_they_come_back() {
    let give_up: [Step; 3] = [
        ("truncate", |cache| cache.truncate(2).unwrap()),
        ("reset", |cache| {
            cache.reset().unwrap();
            append(cache, &[1, 2]).unwrap();
        }),
        ("drop of a reservation", |cache| {
            cache.truncate(2).unwrap();
            fill(&mut cache.reserve(6).unwrap(), &[8; 6]);
        }),
    ];
    let come_back: [(Step, &[u8]); 5] = [
        (("initialize", |cache| cache.initialize(7).unwrap()), &[1, 2, 0, 0, 0, 0, 0]),
        (("a gap", |cache| write(cache, 5, 7).unwrap()), &[1, 2, 0, 0, 0, 7]),
        (
            ("gaps in a batch", |cache| write_batch(cache, &[(6, 8), (3, 7)]).unwrap()),
            &[1, 2, 0, 7, 0, 0, 8],
        ),
        (
            ("a batch across the length", |cache| write_batch(cache, &[(0, 6), (4, 7)]).unwrap()),
            &[6, 2, 0, 0, 7],
        ),
        (
            ("a reservation", |cache| {
                let reserved = cache.reserve(5).unwrap();
                assert_eq!(tokens(reserved.span().keys, reserved.span().values), [0; 5]);
                reserved.commit();
            }),
            &[1, 2, 0, 0, 0, 0, 0],
        ),
    ];
    for (lost, give_up) in give_up {
        for ((back, come_back), expected) in come_back {
            let cache = holding(&[1, 2, 3, 4, 5, 6, 7, 8]);
            give_up(&cache);
            come_back(&cache);
            assert_eq!(contents(&cache), expected, "given up by {lost}, back by {back}");
        }
    }
}

#[test]
fn zeros_are_made_again_after_each_truncation() {
    let cache = holding(&[9; 6]);
    for _ in 0..3 {
        cache.truncate(1).unwrap();
        cache.initialize(4).unwrap();
        assert_eq!(contents(&cache), [9, 0, 0, 0]);
        append(&cache, &[5, 5]).unwrap();
    }
}

#[test]
fn what_a_dropped_reservation_held_never_shows() {
    let come_back: [Step; 3] = [
        ("initialize", |cache| cache.initialize(3).unwrap()),
        ("a gap", |cache| write(cache, 2, 0).unwrap()),
        ("a reservation", |cache| assert_eq!(cache.reserve(3).unwrap().commit(), 0..3)),
    ];
    for (back, come_back) in come_back {
        let cache = empty();
        fill(&mut cache.reserve(3).unwrap(), &[8; 3]);
        come_back(&cache);
        assert_eq!(contents(&cache), [0; 3], "back by {back}");
    }
}

#[test]
fn prefault_between_truncate_and_initialize_brings_nothing_back() {
    let cache = holding(&[9; 6]);
    cache.truncate(1).unwrap();
    cache.prefault().unwrap();
    cache.initialize(6).unwrap();
    assert_eq!(contents(&cache), [9, 0, 0, 0, 0, 0]);
}

// Reserve

#[test]
fn reserved_rows_are_zero_and_nobody_sees_them_before_commit() {
    let cache = holding(&[1]);
    let mut reserved = cache.reserve(2).unwrap();
    assert_eq!((reserved.range(), reserved.len(), reserved.is_empty()), (1..3, 2, false));
    assert_eq!(tokens(reserved.span().keys, reserved.span().values), [0, 0]);
    fill(&mut reserved, &[2, 3]);
    assert_eq!(tokens(reserved.span().keys, reserved.span().values), [2, 3]);
    assert_eq!((reserved.span().start(), reserved.span().end()), (1, 3));
    assert_eq!(contents(&cache), [1]);
    assert!(matches!(cache.read_kv(1), Err(KvError::TokenOutOfRange { .. })));
    assert_eq!(reserved.commit(), 1..3);
    assert_eq!(contents(&cache), [1, 2, 3]);
}

#[test]
fn a_dropped_reservation_leaves_the_length() {
    let cache = holding(&[1]);
    fill(&mut cache.reserve(2).unwrap(), &[2, 3]);
    assert_eq!(contents(&cache), [1]);
    assert_eq!(append(&cache, &[4]), Ok(1..2));
}

#[test]
fn reserve_is_strict_about_the_capacity() {
    let cache = holding(&[1]);
    for rows in [CAPACITY, usize::MAX - 1, usize::MAX] {
        let range = 1..rows.saturating_add(1);
        let refused = KvError::CapacityExceeded { range, capacity: CAPACITY };
        assert_eq!(cache.reserve(rows).unwrap_err(), refused);
    }
    assert_eq!(cache.reserve(CAPACITY - 1).unwrap().commit(), 1..CAPACITY);
}

#[test]
fn a_reservation_refuses_whatever_would_move_the_length() {
    let cache = holding(&[1, 2]);
    let reserved = cache.reserve(3).unwrap();
    let refused = KvError::Reserved { range: 2..5 };
    for (name, result) in [
        ("append", append(&cache, &[9]).map(drop)),
        ("reserve", cache.reserve(1).map(drop)),
        ("initialize", cache.initialize(3)),
        ("a write at the length", write(&cache, 2, 9)),
        ("a write past the reservation", write(&cache, 7, 9)),
        ("a batch across the length", write_batch(&cache, &[(0, 9), (2, 9)])),
        ("truncate", cache.truncate(1)),
        ("reset", cache.reset()),
    ] {
        assert_eq!(result, Err(refused.clone()), "{name}");
    }
    assert_eq!(contents(&cache), [1, 2]);
    reserved.commit();
    assert_eq!(contents(&cache), [1, 2, 0, 0, 0]);
    append(&cache, &[6]).unwrap();
}

#[test]
fn a_reservation_lets_reading_overwriting_and_pinning_go_on() {
    let cache = holding(&[1, 2]);
    let mut reserved = cache.reserve(2).unwrap();
    write(&cache, 0, 7).unwrap();
    cache.initialize(2).unwrap();
    cache.prefault().unwrap();
    let pinned = cache.pin_range(0, 2).unwrap();
    fill(&mut reserved, &[3, 4]);
    reserved.commit();
    assert_eq!(contents(&cache), [7, 2, 3, 4]);
    assert_eq!(tokens(pinned.keys(), pinned.values()), [7, 2]);
}

#[test]
fn prefault_leaves_reserved_rows_alone() {
    let cache = empty();
    let mut reserved = cache.reserve(2).unwrap();
    fill(&mut reserved, &[3, 4]);
    cache.prefault().unwrap();
    reserved.commit();
    assert_eq!(contents(&cache), [3, 4]);
}

#[test]
fn reserving_no_rows_is_a_reservation_of_nothing() {
    let cache = holding(&[1]);
    let mut reserved = cache.reserve(0).unwrap();
    assert!(reserved.is_empty() && reserved.keys_and_values_mut().0.is_empty());
    assert_eq!(reserved.commit(), 1..1);
    assert_eq!(contents(&cache), [1]);
}

#[test]
fn a_reservation_outlives_the_cache() {
    let cache = empty();
    let mut reserved = cache.reserve(2).unwrap();
    drop(cache);
    fill(&mut reserved, &[1, 2]);
    assert_eq!(tokens(reserved.span().keys, reserved.span().values), [1, 2]);
    assert_eq!(reserved.commit(), 0..2);
}

// Pin

#[test]
fn a_pin_refuses_overwriting_its_tokens_and_no_others() {
    let cache = holding(&[1, 2, 3, 4, 5]);
    let pinned = cache.pin_range(1, 3).unwrap();
    for at in [1, 2] {
        let refused = Err(KvError::Pinned { range: at..at + 1, pins: 1 });
        assert_eq!(write(&cache, at, 9), refused);
    }
    for at in [0, 3, 4, 5] {
        write(&cache, at, 9).unwrap();
    }
    assert_eq!(contents(&cache), [9, 2, 3, 9, 9, 9]);
    drop(pinned);
    write(&cache, 1, 9).unwrap();
}

#[test]
fn a_pin_refuses_a_batch_that_touches_it_and_no_entry_is_written() {
    let cache = holding(&[1, 2, 3]);
    let pinned = cache.pin_range(1, 2).unwrap();
    let refused = Err(KvError::Pinned { range: 1..2, pins: 1 });
    assert_eq!(write_batch(&cache, &[(0, 9), (1, 9), (4, 9)]), refused);
    assert_eq!(contents(&cache), [1, 2, 3]);
    write_batch(&cache, &[(0, 9), (2, 9), (4, 9)]).unwrap();
    assert_eq!(contents(&cache), [9, 2, 9, 0, 9]);
    drop(pinned);
}

#[test]
fn a_pin_refuses_truncating_into_it_and_not_behind_it() {
    let cache = holding(&[1, 2, 3, 4]);
    let pinned = cache.pin_range(1, 3).unwrap();
    for new_len in [0, 1, 2] {
        let refused = Err(KvError::Pinned { range: new_len..4, pins: 1 });
        assert_eq!(cache.truncate(new_len), refused);
    }
    assert_eq!(cache.reset(), Err(KvError::Pinned { range: 0..4, pins: 1 }));
    cache.truncate(3).unwrap();
    assert_eq!(contents(&cache), [1, 2, 3]);
    drop(pinned);
    cache.reset().unwrap();
}

#[test]
fn a_refusal_counts_the_pins_that_overlap() {
    let cache = holding(&[1, 2, 3, 4]);
    let pins: Vec<_> =
        [(0, 2), (1, 4), (1, 2), (3, 4)].map(|(a, b)| cache.pin_range(a, b).unwrap()).into();
    assert_eq!(write(&cache, 1, 9), Err(KvError::Pinned { range: 1..2, pins: 3 }));
    assert_eq!(cache.truncate(3), Err(KvError::Pinned { range: 3..4, pins: 2 }));
    assert_eq!(cache.reset(), Err(KvError::Pinned { range: 0..4, pins: 4 }));
    for (left, pin) in (0..pins.len()).rev().zip(pins) {
        drop(pin);
        let expected = if left == 0 { Ok(()) } else { Err(left) };
        let pins = |error| if let KvError::Pinned { pins, .. } = error { pins } else { 0 };
        assert_eq!(cache.reset().map_err(pins), expected);
    }
}

#[test]
fn an_empty_pin_holds_nothing() {
    let cache = holding(&[1, 2]);
    let _pinned = cache.pin_range(1, 1).unwrap();
    write(&cache, 0, 9).unwrap();
    write(&cache, 1, 9).unwrap();
    cache.reset().unwrap();
}

#[test]
fn a_pinned_span_tells_its_place_and_shape() {
    let cache = holding(&[1, 2, 3]);
    let pinned = cache.pin_range(1, 3).unwrap();
    assert_eq!((pinned.range(), pinned.len(), pinned.is_empty()), (1..3, 2, false));
    let span = pinned.span();
    assert_eq!((span.start(), span.end(), span.num_heads(), span.head_dim()), (1, 3, 2, 4));
    assert_eq!((span.keys, span.values), (pinned.keys(), pinned.values()));
    let token = span.token(0).unwrap();
    assert_eq!(tokens(token.0, token.1), [2]);
}

#[test]
fn a_pinned_span_stays_as_it_was_whatever_the_cache_does() {
    let cache = holding(&[1, 2]);
    let pinned = cache.pin_range(0, 2).unwrap();
    let address = pinned.keys().as_ptr();
    append(&cache, &[3; CAPACITY - 4]).unwrap();
    write(&cache, 3, 9).unwrap();
    cache.truncate(2).unwrap();
    cache.initialize(CAPACITY).unwrap();
    cache.prefault().unwrap();
    drop(cache);
    assert_eq!(tokens(pinned.keys(), pinned.values()), [1, 2]);
    assert_eq!(pinned.keys().as_ptr(), address);
}

#[test]
fn reading_in_place_copies_nothing() {
    let cache = holding(&[1, 2, 3]);
    let pinned = cache.pin_range(1, 3).unwrap();
    let addresses = cache.with_read_range(1, 3, |span| (span.keys.as_ptr(), span.values.as_ptr()));
    assert_eq!(addresses, Ok((pinned.keys().as_ptr(), pinned.values().as_ptr())));
}

#[test]
fn keys_and_values_begin_on_a_cache_line() {
    for head_dim in [1, 3, 5, 64] {
        let config =
            KVCacheConfig { max_tokens_per_seq: 3, num_heads: 1, hidden_dim_per_head: head_dim };
        let cache = LayerKvCache::new(config);
        cache.initialize(1).unwrap();
        let pinned = cache.pin_range(0, 1).unwrap();
        for address in [pinned.keys().as_ptr().addr(), pinned.values().as_ptr().addr()] {
            assert_eq!(address % 64, 0, "{head_dim} elements a token");
        }
        assert!((6 * 4 * head_dim..6 * 4 * head_dim + 64).contains(&cache.nbytes()));
    }
}

// Deep clone

#[test]
fn a_deep_clone_has_its_own_tokens() {
    let cache = holding(&[1, 2, 3]);
    let copy = cache.deep_clone().unwrap();
    write(&cache, 0, 8).unwrap();
    write(&copy, 2, 9).unwrap();
    copy.truncate(1).unwrap();
    append(&copy, &[7]).unwrap();
    assert_eq!(contents(&cache), [8, 2, 3]);
    assert_eq!(contents(&copy), [1, 7]);
    assert_eq!((copy.config, copy.capacity()), (cache.config, cache.capacity()));
}

#[test]
fn a_deep_clone_is_free_of_the_originals_pins_and_reservations() {
    let cache = holding(&[1, 2, 3]);
    let _pinned = cache.pin_range(0, 3).unwrap();
    let _reserved = cache.reserve(2).unwrap();
    let copy = cache.deep_clone().unwrap();
    write(&copy, 0, 9).unwrap();
    append(&copy, &[4]).unwrap();
    assert_eq!(contents(&copy), [9, 2, 3, 4]);
}

#[test]
fn a_deep_clone_is_initialized_if_the_original_is() {
    let copy = empty().deep_clone().unwrap();
    assert_eq!((copy.nbytes(), write(&copy, 0, 1)), (0, Err(KvError::NotInitialized)));
    let cache = holding(&[1]);
    cache.reset().unwrap();
    let copy = cache.deep_clone().unwrap();
    assert_eq!((copy.len(), copy.nbytes()), (0, cache.nbytes()));
    write(&copy, 0, 2).unwrap();
    assert_eq!(contents(&copy), [2]);
}

#[test]
fn a_deep_clone_knows_nothing_of_what_was_truncated() {
    let cache = holding(&[1, 2, 3]);
    cache.truncate(1).unwrap();
    let copy = cache.deep_clone().unwrap();
    copy.initialize(3).unwrap();
    assert_eq!(contents(&copy), [1, 0, 0]);
}

// Prefault

#[test]
fn prefault_allocates_and_changes_no_token() {
    let cache = empty();
    cache.prefault().unwrap();
    assert_eq!((cache.len(), cache.nbytes()), (0, 2 * CAPACITY * WIDTH * 4));
    append(&cache, &[1, 2]).unwrap();
    cache.prefault().unwrap();
    assert_eq!(contents(&cache), [1, 2]);
    cache.initialize(4).unwrap();
    assert_eq!(contents(&cache), [1, 2, 0, 0]);
}

// Timeouts

const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn the_variants_with_a_timeout_do_the_same_when_nothing_is_in_the_way() {
    within(LIMIT, || {
        let (k, v) = (keys(&[9]), values(&[9]));
        for timeout in [Duration::ZERO, Duration::from_secs(5), Duration::MAX] {
            let cache = holding(&[1, 2, 3]);
            cache.write_kv_timeout(0, &k, &v, timeout).unwrap();
            cache.write_kv_timeout(4, &k, &v, timeout).unwrap();
            cache.write_kv_batch_timeout(&[(1, &k, &v), (5, &k, &v)], timeout).unwrap();
            assert_eq!(contents(&cache), [9, 9, 3, 0, 9, 9]);
            cache.truncate_timeout(2, timeout).unwrap();
            assert_eq!(contents(&cache), [9, 9]);
            cache.reset_timeout(timeout).unwrap();
            assert!(cache.is_empty());
        }
    });
}

#[test]
fn the_variants_with_a_timeout_say_when_it_ran_out() {
    within(LIMIT, || {
        let cache = holding(&[1, 2, 3]);
        let pins = [cache.pin_range(1, 2).unwrap(), cache.pin_range(0, 2).unwrap()];
        let (k, v) = (keys(&[9]), values(&[9]));
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            let late = |range, pins| Err(KvError::Timeout { range, pins });
            assert_eq!(cache.write_kv_timeout(1, &k, &v, timeout), late(1..2, 2));
            let entries = [(2, &*k, &*v), (5, &*k, &*v), (0, &*k, &*v)];
            assert_eq!(cache.write_kv_batch_timeout(&entries, timeout), late(0..1, 1));
            assert_eq!(cache.truncate_timeout(1, timeout), late(1..3, 2));
            assert_eq!(cache.reset_timeout(timeout), late(0..3, 2));
        }
        assert_eq!(contents(&cache), [1, 2, 3]);
        drop(pins);
        cache.reset_timeout(Duration::ZERO).unwrap();
    });
}

#[test]
fn the_variants_with_a_timeout_report_bad_arguments_at_once() {
    within(LIMIT, || {
        let cache = holding(&[1]);
        let _pinned = cache.pin_range(0, 1).unwrap();
        let forever = Duration::MAX;
        let refused = Err(KvError::WidthMismatch { given: 1, width: WIDTH });
        assert_eq!(cache.write_kv_timeout(0, &[1.0], &[1.0], forever), refused);
        let source = Box::new(KvError::LengthMismatch { keys: 1, values: 0 });
        let refused = Err(KvError::BatchEntry { index: 0, source });
        assert_eq!(cache.write_kv_batch_timeout(&[(0, &[1.0], &[])], forever), refused);
        let refused = Err(KvError::RangeOutOfBounds { start: 2, end: 2, len: 1 });
        assert_eq!(cache.truncate_timeout(2, forever), refused);
    });
}
