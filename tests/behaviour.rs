//! What `initialize`, writes and reads do: the behaviour taken over from the original API, and what
//! was mended in it.

mod common {
    pub(crate) mod caches;
}

use common::caches::{CONFIG, contents, empty, holding, tokens, write, write_batch};
use kvspan::config::{DEFAULT_HIDDEN_DIM_PER_HEAD, DEFAULT_MAX_TOKENS_PER_SEQ, DEFAULT_NUM_HEADS};
use kvspan::{KVCacheConfig, KvError, LayerKvCache};

const WIDTH: usize = CONFIG.token_width();
const CAPACITY: usize = CONFIG.max_tokens_per_seq;

// Configuration

#[test]
fn the_default_configuration_is_8192_tokens_of_4_heads_of_64() {
    let config = KVCacheConfig::default();
    assert_eq!((DEFAULT_MAX_TOKENS_PER_SEQ, config.max_tokens_per_seq), (8192, 8192));
    assert_eq!((DEFAULT_NUM_HEADS, config.num_heads), (4, 4));
    assert_eq!((DEFAULT_HIDDEN_DIM_PER_HEAD, config.hidden_dim_per_head), (64, 64));
    assert_eq!(config.token_width(), 256);
    assert_eq!(LayerKvCache::default().config, config);
}

#[test]
fn the_token_width_saturates() {
    let config = KVCacheConfig { num_heads: usize::MAX, hidden_dim_per_head: 2, ..CONFIG };
    assert_eq!(config.token_width(), usize::MAX);
}

#[test]
fn a_new_cache_is_empty_and_holds_no_memory() {
    let cache = empty();
    assert_eq!((cache.len(), cache.is_empty(), cache.nbytes()), (0, true, 0));
    assert_eq!((cache.config, cache.capacity()), (CONFIG, CAPACITY));
}

#[test]
fn a_zero_in_the_configuration_is_reported_by_every_use() {
    for (field, config) in [
        ("max_tokens_per_seq", KVCacheConfig { max_tokens_per_seq: 0, ..CONFIG }),
        ("num_heads", KVCacheConfig { num_heads: 0, ..CONFIG }),
        ("hidden_dim_per_head", KVCacheConfig { hidden_dim_per_head: 0, ..CONFIG }),
    ] {
        assert_every_use_fails(config, &KvError::InvalidConfig { field });
    }
}

#[test]
fn a_size_that_overflows_is_reported_by_every_use() {
    let huge = usize::MAX / 2;
    for config in [
        KVCacheConfig { max_tokens_per_seq: huge, ..CONFIG },
        KVCacheConfig { num_heads: huge, ..CONFIG },
        KVCacheConfig { hidden_dim_per_head: huge, ..CONFIG },
    ] {
        let KVCacheConfig { max_tokens_per_seq: capacity, num_heads, hidden_dim_per_head } = config;
        let head_dim = hidden_dim_per_head;
        let error = KvError::SizeOverflow { capacity, num_heads, head_dim, itemsize: 4 };
        assert_every_use_fails(config, &error);
    }
}

fn assert_every_use_fails(config: KVCacheConfig, error: &KvError) {
    let cache = LayerKvCache::new(config);
    let uses: [(&str, kvspan::Result<()>); 15] = [
        ("initialize", cache.initialize(1)),
        ("write_kv", cache.write_kv(0, &[], &[])),
        ("write_kv_batch", cache.write_kv_batch(&[])),
        ("append", cache.append(&[], &[]).map(drop)),
        ("reserve", cache.reserve(0).map(drop)),
        ("truncate", cache.truncate(0)),
        ("reset", cache.reset()),
        ("with_read_kv", cache.with_read_kv(0, |_, _| ())),
        ("with_read_range", cache.with_read_range(0, 0, |_| ())),
        ("read_range_into", cache.read_range_into(0, 0, &mut [], &mut [])),
        ("read_kv", cache.read_kv(0).map(drop)),
        ("read_range", cache.read_range(0, 0).map(drop)),
        ("pin_range", cache.pin_range(0, 0).map(drop)),
        ("prefault", cache.prefault()),
        ("deep_clone", cache.deep_clone().map(drop)),
    ];
    for (name, result) in uses {
        assert_eq!(result.as_ref(), Err(error), "{name}");
    }
    assert_eq!((cache.len(), cache.capacity(), cache.nbytes()), (0, 0, 0));
}

#[test]
fn changing_the_configuration_of_a_clone_changes_nothing() {
    let cache = holding(&[1, 2, 3]);
    let mut clone = cache.clone();
    clone.config = KVCacheConfig { max_tokens_per_seq: 1000, num_heads: 1, hidden_dim_per_head: 2 };

    let range = CAPACITY..CAPACITY + 1;
    let refused = Err(KvError::CapacityExceeded { range, capacity: CAPACITY });
    assert_eq!(write(&clone, CAPACITY, 9), refused);
    let refused = Err(KvError::WidthMismatch { given: 2, width: WIDTH });
    assert_eq!(clone.write_kv(0, &[0.0; 2], &[0.0; 2]), refused);
    clone
        .with_read_range(0, 3, |span| assert_eq!((span.num_heads(), span.head_dim()), (2, 4)))
        .unwrap();
    write(&clone, 1, 7).unwrap();
    assert_eq!((contents(&clone), contents(&cache)), (vec![1, 7, 3], vec![1, 7, 3]));
}

// Initialize

#[test]
fn initialize_makes_tokens_of_zeros_and_allocates_for_the_whole_capacity() {
    let cache = empty();
    cache.initialize(5).unwrap();
    assert_eq!((cache.len(), cache.is_empty()), (5, false));
    assert_eq!(contents(&cache), [0; 5]);
    assert_eq!(cache.nbytes(), 2 * CAPACITY * WIDTH * 4);
}

#[test]
fn initialize_with_no_tokens_is_refused_and_allocates_nothing() {
    let cache = empty();
    assert_eq!(cache.initialize(0), Err(KvError::EmptyInitialize));
    assert_eq!((cache.len(), cache.nbytes()), (0, 0));
}

#[test]
fn an_over_long_initialize_clamps_to_the_capacity() {
    for seq_len in [CAPACITY, CAPACITY + 1, usize::MAX] {
        let cache = empty();
        cache.initialize(seq_len).unwrap();
        assert_eq!(cache.len(), CAPACITY);
    }
}

#[test]
fn a_later_initialize_grows_the_length_and_keeps_what_was_written() {
    let cache = empty();
    cache.initialize(4).unwrap();
    write(&cache, 1, 7).unwrap();
    cache.initialize(10).unwrap();
    assert_eq!(contents(&cache), [0, 7, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn initialize_never_shrinks_the_length() {
    let cache = holding(&[1, 2, 3, 4]);
    let allocated = cache.nbytes();
    for seq_len in [1, 3, 4] {
        cache.initialize(seq_len).unwrap();
        assert_eq!((contents(&cache), cache.nbytes()), (vec![1, 2, 3, 4], allocated));
    }
}

// Writing one token

#[test]
fn a_written_token_reads_back_equal() {
    let cache = empty();
    cache.initialize(8).unwrap();
    write(&cache, 2, 5).unwrap();
    assert_eq!(contents(&cache), [0, 0, 5, 0, 0, 0, 0, 0]);
}

#[test]
fn every_bit_of_an_element_is_kept() {
    let bits = [0x8000_0000, 0x7fc0_1234, 0xff80_0000, 1, 0x7f7f_ffff, 0x3f80_0000, 0, 0xffff_ffff];
    let row = bits.map(f32::from_bits);
    let cache = empty();
    cache.append(&row, &row).unwrap();
    let entry = cache.read_kv(0).unwrap();
    assert_eq!(entry.keys.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits);
    assert_eq!(entry.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits);
}

#[test]
fn a_write_below_the_length_replaces_the_token_and_only_it() {
    let cache = holding(&[1, 2, 3]);
    write(&cache, 1, 9).unwrap();
    assert_eq!(contents(&cache), [1, 9, 3]);
}

#[test]
fn a_write_past_the_length_moves_it_and_the_gap_reads_as_zeros() {
    let cache = empty();
    cache.initialize(1).unwrap();
    write(&cache, 3, 9).unwrap();
    assert_eq!(contents(&cache), [0, 0, 0, 9]);
}

#[test]
fn the_bound_of_a_write_is_the_capacity_and_not_the_length() {
    let cache = empty();
    cache.initialize(1).unwrap();
    write(&cache, CAPACITY - 1, 9).unwrap();
    assert_eq!(cache.len(), CAPACITY);
    for at in [CAPACITY, 999, usize::MAX - 1, usize::MAX] {
        let range = at..at.saturating_add(1);
        let refused = Err(KvError::CapacityExceeded { range, capacity: CAPACITY });
        assert_eq!(write(&cache, at, 1), refused);
    }
}

#[test]
fn a_write_before_initialize_is_refused() {
    let cache = empty();
    assert_eq!(write(&cache, 0, 1), Err(KvError::NotInitialized));
    assert_eq!((cache.len(), cache.nbytes()), (0, 0));
}

#[test]
fn a_write_reports_lengths_then_width_then_capacity_then_the_missing_initialize() {
    let cache = empty();
    let (narrow, row) = ([0.0; WIDTH - 1], [0.0; WIDTH]);
    let errors = [
        cache.write_kv(999, &narrow, &row),
        cache.write_kv(999, &narrow, &narrow),
        cache.write_kv(999, &row, &row),
        cache.write_kv(0, &row, &row),
    ];
    assert_eq!(
        errors,
        [
            Err(KvError::LengthMismatch { keys: WIDTH - 1, values: WIDTH }),
            Err(KvError::WidthMismatch { given: WIDTH - 1, width: WIDTH }),
            Err(KvError::CapacityExceeded { range: 999..1000, capacity: CAPACITY }),
            Err(KvError::NotInitialized),
        ]
    );
}

#[test]
fn rows_that_are_not_one_token_wide_are_refused() {
    let cache = holding(&[1]);
    for given in [0, 1, WIDTH - 1, WIDTH + 1, 2 * WIDTH] {
        let row = vec![9.0; given];
        let refused = Err(KvError::WidthMismatch { given, width: WIDTH });
        assert_eq!(cache.write_kv(0, &row, &row), refused);
    }
    assert_eq!(contents(&cache), [1]);
}

// Writing a batch

#[test]
fn a_batch_writes_every_entry_in_any_order_and_with_gaps() {
    let cache = holding(&[1, 2]);
    write_batch(&cache, &[(6, 8), (0, 9), (3, 7)]).unwrap();
    assert_eq!(contents(&cache), [9, 2, 0, 7, 0, 0, 8]);
}

#[test]
fn the_last_of_duplicates_in_a_batch_wins() {
    let cache = holding(&[1, 2]);
    write_batch(&cache, &[(1, 3), (2, 4), (1, 5), (2, 6), (1, 7)]).unwrap();
    assert_eq!(contents(&cache), [1, 7, 6]);
}

#[test]
fn an_empty_batch_succeeds_even_before_initialize() {
    let cache = empty();
    cache.write_kv_batch(&[]).unwrap();
    assert_eq!((cache.len(), cache.nbytes()), (0, 0));
}

#[test]
fn a_batch_before_initialize_is_refused_as_a_whole_and_not_for_an_entry() {
    let cache = empty();
    assert_eq!(write_batch(&cache, &[(0, 1), (1, 2)]), Err(KvError::NotInitialized));
    assert_eq!((cache.len(), cache.nbytes()), (0, 0));
}

#[test]
fn a_batch_with_a_bad_entry_anywhere_leaves_the_cache_unchanged() {
    let cache = holding(&[1, 2]);
    let (good, wide) = ([9.0; WIDTH], [9.0; WIDTH + 1]);
    for bad in 0..4 {
        for entry in [
            (0, good.as_slice(), wide.as_slice()),
            (0, wide.as_slice(), wide.as_slice()),
            (CAPACITY, good.as_slice(), good.as_slice()),
        ] {
            let mut entries = [(0, good.as_slice(), good.as_slice()); 4];
            entries[3].0 = 5;
            entries[bad] = entry;
            let error = cache.write_kv_batch(&entries).unwrap_err();
            assert!(matches!(error, KvError::BatchEntry { index, .. } if index == bad), "{error}");
            assert_eq!(contents(&cache), [1, 2]);
        }
    }
}

#[test]
fn a_batch_checks_entry_by_entry_and_reports_the_first_bad_one() {
    let cache = empty();
    let (row, wide) = ([0.0; WIDTH], [0.0; WIDTH + 1]);
    let past = (CAPACITY, row.as_slice(), row.as_slice());
    let unequal = (0, row.as_slice(), wide.as_slice());
    let index_of = |error| match error {
        Err(KvError::BatchEntry { index, source }) => (index, *source),
        other => panic!("{other:?}"),
    };
    let range = CAPACITY..CAPACITY + 1;
    let too_far = KvError::CapacityExceeded { range, capacity: CAPACITY };
    let mismatch = KvError::LengthMismatch { keys: WIDTH, values: WIDTH + 1 };
    assert_eq!(index_of(cache.write_kv_batch(&[past, unequal])), (0, too_far));
    assert_eq!(index_of(cache.write_kv_batch(&[unequal, past])), (0, mismatch));
}

// Reading

#[test]
fn elements_lie_token_by_token_then_head_by_head() {
    let cache = empty();
    let ramp = |from: u16| (from..).map(f32::from).take(3 * WIDTH).collect::<Vec<_>>();
    cache.append(&ramp(0), &ramp(1000)).unwrap();
    cache
        .with_read_range(1, 3, |span| {
            let (token, head, dim) = (1, 1, 2);
            let at = (token * span.num_heads() + head) * span.head_dim() + dim;
            assert_eq!([span.keys[at], span.values[at]].as_slice(), [22.0, 1022.0]);
            let (k, v) = span.token(1).unwrap();
            assert_eq!((k, v), (&ramp(0)[16..], &ramp(1000)[16..]));
        })
        .unwrap();
}

#[test]
fn a_range_is_contiguous_and_half_open() {
    let cache = holding(&[1, 2, 3, 4]);
    let (k, v) = cache.read_range(1, 3).unwrap();
    assert_eq!(tokens(&k, &v), [2, 3]);
}

#[test]
fn a_span_tells_its_place_and_shape() {
    let cache = holding(&[1, 2, 3, 4]);
    cache
        .with_read_range(1, 3, |span| {
            assert_eq!((span.start(), span.end(), span.len(), span.is_empty()), (1, 3, 2, false));
            assert_eq!((span.num_heads(), span.head_dim()), (2, 4));
            let (k, v) = span.token(1).unwrap();
            assert_eq!(tokens(k, v), [3]);
            assert_eq!((span.token(2), span.token(usize::MAX)), (None, None));
        })
        .unwrap();
}

#[test]
fn all_ways_to_read_see_the_same() {
    let cache = holding(&[1, 2, 3, 4, 5]);
    for start in 0..=5 {
        for end in start..=5 {
            let owned = cache.read_range(start, end).unwrap();
            let closure = |span: kvspan::KVSpan<'_>| (span.keys.to_vec(), span.values.to_vec());
            assert_eq!(cache.with_read_range(start, end, closure).unwrap(), owned);
            let mut into = (vec![0.0; owned.0.len()], vec![0.0; owned.1.len()]);
            cache.read_range_into(start, end, &mut into.0, &mut into.1).unwrap();
            assert_eq!(into, owned);
            let pinned = cache.pin_range(start, end).unwrap();
            assert_eq!((pinned.keys(), pinned.values()), (&*owned.0, &*owned.1));
        }
    }
    for token in 0..5 {
        let owned = cache.read_kv(token).unwrap();
        assert_eq!(
            (owned.keys.clone(), owned.values.clone()),
            cache.read_range(token, token + 1).unwrap()
        );
        cache
            .with_read_kv(token, |k, v| assert_eq!((k, v), (&*owned.keys, &*owned.values)))
            .unwrap();
    }
}

#[test]
fn a_closure_returns_what_it_computes() {
    let cache = holding(&[3]);
    let sum = cache.with_read_kv(0, |k, v| k.iter().chain(v).map(|x| x.abs()).sum::<f32>());
    assert_eq!(sum.map(|sum| sum.to_string()), Ok("48".to_owned()));
    assert_eq!(cache.with_read_range(0, 1, |span| span.len()), Ok(1));
}

#[test]
fn a_token_at_or_past_the_length_is_out_of_range_and_the_closure_does_not_run() {
    for (cache, len) in [(empty(), 0), (holding(&[1, 2]), 2)] {
        for token in [len, len + 1, CAPACITY, usize::MAX - 1, usize::MAX] {
            let refused = KvError::TokenOutOfRange { token, len };
            assert_eq!(cache.read_kv(token), Err(refused.clone()));
            let result = cache.with_read_kv(token, |_, _| panic!("the closure ran"));
            assert_eq!(result, Err::<(), _>(refused));
        }
    }
}

#[test]
fn a_range_past_the_length_is_out_of_bounds_and_the_closure_does_not_run() {
    for (cache, len) in [(empty(), 0), (holding(&[1, 2]), 2)] {
        for (start, end) in
            [(0, len + 1), (len + 1, len + 1), (0, usize::MAX), (usize::MAX, usize::MAX)]
        {
            let refused = KvError::RangeOutOfBounds { start, end, len };
            assert_eq!(cache.read_range(start, end), Err(refused.clone()));
            let result = cache.with_read_range(start, end, |_| panic!("the closure ran"));
            assert_eq!(result, Err::<(), _>(refused.clone()));
            assert_eq!(cache.pin_range(start, end).map(drop), Err(refused));
        }
    }
}

#[test]
fn a_range_that_ends_before_it_starts_is_reported_as_such_even_past_the_length() {
    let cache = holding(&[1, 2]);
    for (start, end) in [(1, 0), (2, 1), (9, 3), (usize::MAX, 0)] {
        let refused = KvError::InvertedRange { start, end };
        assert_eq!(cache.read_range(start, end), Err(refused.clone()));
        assert_eq!(cache.read_range_into(start, end, &mut [], &mut []), Err(refused.clone()));
        assert_eq!(cache.pin_range(start, end).map(drop), Err(refused));
    }
}

#[test]
fn the_empty_range_up_to_the_length_is_fine_even_before_initialize() {
    for (cache, len) in [(empty(), 0), (holding(&[1, 2]), 2)] {
        for at in 0..=len {
            let ran = cache.with_read_range(at, at, |span| {
                assert!(span.is_empty() && span.keys.is_empty() && span.values.is_empty());
                (span.start(), span.end())
            });
            assert_eq!(ran, Ok((at, at)));
            assert_eq!(cache.read_range(at, at), Ok((vec![], vec![])));
            assert_eq!(cache.read_range_into(at, at, &mut [], &mut []), Ok(()));
            assert!(cache.pin_range(at, at).unwrap().is_empty());
        }
    }
}

#[test]
fn read_range_into_leaves_the_tails_of_longer_buffers_alone() {
    let cache = holding(&[1, 2, 3]);
    let (mut k, mut v) = (vec![99.0; 2 * WIDTH + 5], vec![88.0; 2 * WIDTH + 1]);
    cache.read_range_into(1, 3, &mut k, &mut v).unwrap();
    assert_eq!(tokens(&k[..2 * WIDTH], &v[..2 * WIDTH]), [2, 3]);
    assert_eq!(k[2 * WIDTH..], vec![99.0; 5]);
    assert_eq!(v[2 * WIDTH..], vec![88.0; 1]);
}

#[test]
fn read_range_into_checks_order_then_keys_then_values_then_bounds_and_writes_nothing() {
    let cache = holding(&[1, 2]);
    let read = |start, end, room_k: usize, room_v: usize| {
        let (mut k, mut v) = (vec![99.0; room_k], vec![99.0; room_v]);
        let result = cache.read_range_into(start, end, &mut k, &mut v);
        assert!(k.iter().chain(&v).all(|x| x.to_bits() == 99.0_f32.to_bits()));
        result.unwrap_err()
    };
    let short = |plane, given, wanted| KvError::OutputTooShort { plane, given, wanted };
    assert_eq!(read(3, 0, 0, 0), KvError::InvertedRange { start: 3, end: 0 });
    assert_eq!(read(0, 3, 3 * WIDTH - 1, 0), short("keys", 3 * WIDTH - 1, 3 * WIDTH));
    assert_eq!(read(0, 3, 3 * WIDTH, 3 * WIDTH - 1), short("values", 3 * WIDTH - 1, 3 * WIDTH));
    let outside = KvError::RangeOutOfBounds { start: 0, end: 3, len: 2 };
    assert_eq!(read(0, 3, 3 * WIDTH, 3 * WIDTH), outside);
    assert_eq!(read(0, usize::MAX, WIDTH, WIDTH), short("keys", WIDTH, usize::MAX));
}

// Sharing

#[test]
fn clones_share_the_tokens() {
    let cache = empty();
    let clone = cache.clone();
    clone.initialize(2).unwrap();
    write(&clone, 1, 7).unwrap();
    assert_eq!(contents(&cache), [0, 7]);
    drop(cache);
    assert_eq!(contents(&clone), [0, 7]);
}
