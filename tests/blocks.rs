//! Who holds which block, what it means to share, and every refusal.

mod common {
    pub(crate) mod sequence;
}

use common::sequence::{Sequence, is_out_of_blocks};
use kvspan::{BlockId, BlockPool, BlockState, Duplicates, KvError, PrefixCache, Result};

fn id(block: u32) -> BlockId {
    BlockId::new(block).expect("not the null block")
}

fn take(pool: &mut BlockPool, num_blocks: usize) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    pool.take(num_blocks, &mut blocks, |_| ()).expect("there are enough");
    blocks
}

fn queue(pool: &BlockPool) -> Vec<u32> {
    pool.free_queue().map(BlockId::get).collect()
}

fn start(cache: &mut PrefixCache, tokens: &[u32]) -> Sequence {
    Sequence::start(cache, 2, tokens, 0, true).expect("there is room").0
}

fn blocks(sequence: &Sequence) -> &[u32] {
    &sequence.table.logical_to_physical
}

/// State, holders, pins and whether there is content, of each block; and the queue.
fn picture(pool: &BlockPool) -> impl PartialEq + std::fmt::Debug + use<> {
    let block = |block| {
        (pool.state(block), pool.reference_count(block), pool.pin_count(block), pool.is_kept(block))
    };
    (pool.blocks().map(block).collect::<Vec<_>>(), queue(pool))
}

/// Asserts that `call` fails with `error`, which reads `text`, and leaves the pool unchanged.
fn refuses<R: std::fmt::Debug>(
    pool: &BlockPool,
    call: impl FnOnce(&mut BlockPool) -> Result<R>,
    error: &KvError,
    text: &str,
) {
    let mut changed = pool.clone();
    assert_eq!(&call(&mut changed).expect_err("it is refused"), error);
    assert_eq!(error.to_string(), text);
    assert_eq!(picture(&changed), picture(pool));
    assert_eq!(changed.check_integrity(), Ok(()));
}

#[test]
fn a_new_pool_gives_out_consecutive_ids_and_so_does_one_that_forgot_everything() {
    let mut pool = BlockPool::new(6).unwrap();
    let first = take(&mut pool, 3);
    assert_eq!(first, [1, 2, 3].map(id));
    pool.give_back(&first).unwrap();
    assert_eq!(take(&mut pool, 6), [1, 2, 3, 4, 5, 6].map(id));
}

#[test]
fn free_blocks_go_first_then_the_least_recently_used_from_its_end() {
    let mut pool = BlockPool::new(6).unwrap();
    let (old, young) = (take(&mut pool, 2), take(&mut pool, 2));
    for &block in old.iter().chain(&young) {
        pool.keep(block).unwrap();
    }
    pool.give_back(&old).unwrap();
    pool.give_back(&young).unwrap();
    assert_eq!(queue(&pool), [5, 6, 2, 1, 4, 3]);

    let mut reused = Vec::new();
    let mut blocks = Vec::new();
    pool.take(3, &mut blocks, |block| reused.push(block)).unwrap();
    assert_eq!((blocks.as_slice(), reused.as_slice()), (&[5, 6, 2].map(id)[..], &[id(2)][..]));
}

#[test]
fn what_was_touched_last_is_reused_last() {
    let mut pool = BlockPool::new(3).unwrap();
    for block in take(&mut pool, 3) {
        pool.keep(block).unwrap();
        pool.give_back(&[block]).unwrap();
    }
    pool.hold(&[id(1)]).unwrap();
    assert_eq!(queue(&pool), [2, 3]);
    pool.give_back(&[id(1)]).unwrap();
    assert_eq!(queue(&pool), [2, 3, 1]);
}

#[test]
fn a_block_with_a_view_waits_until_the_view_is_gone() {
    let mut pool = BlockPool::new(3).unwrap();
    let blocks = take(&mut pool, 2);
    pool.keep(blocks[1]).unwrap();
    for &block in &blocks {
        pool.pin(block).unwrap();
    }
    pool.pin(blocks[0]).unwrap();
    pool.give_back(&blocks).unwrap();
    assert_eq!(
        blocks.iter().map(|&block| pool.state(block)).collect::<Result<Vec<_>>>(),
        Ok(vec![BlockState::Pinned; 2])
    );
    assert_eq!((pool.num_free(), pool.num_cached(), pool.num_in_use()), (1, 0, 2));
    refuses(
        &pool,
        |pool| pool.take(2, &mut Vec::new(), |_| ()),
        &KvError::OutOfBlocks { needed: 2, free: 1, evictable: 0, pinned: 2 },
        "out of blocks: 2 needed, but 1 are free and 0 evictable (2 more are only kept by views)",
    );

    pool.unpin(blocks[0]).unwrap();
    assert_eq!(queue(&pool), [3]);
    pool.unpin(blocks[0]).unwrap();
    assert_eq!(queue(&pool), [1, 3]);
    pool.unpin(blocks[1]).unwrap();
    assert_eq!(queue(&pool), [1, 3, 2]);
}

#[test]
fn a_new_owner_is_told_of_a_former_one_and_a_sharer_is_not() {
    let mut pool = BlockPool::new(2).unwrap();
    let blocks = take(&mut pool, 2);
    assert_eq!(pool.clear_dirty(blocks[0]), Ok(false));
    pool.keep(blocks[1]).unwrap();
    pool.give_back(&blocks).unwrap();

    pool.hold(&[blocks[1]]).unwrap();
    assert_eq!(pool.clear_dirty(blocks[1]), Ok(false));
    assert_eq!(take(&mut pool, 1), [blocks[0]]);
    assert_eq!(pool.clear_dirty(blocks[0]), Ok(true));
    assert_eq!(pool.clear_dirty(blocks[0]), Ok(false));

    // An owner that never said so leaves the task to the next one.
    pool.give_back(&[blocks[0]]).unwrap();
    for _ in 0..2 {
        assert_eq!(take(&mut pool, 1), [blocks[0]]);
        pool.give_back(&[blocks[0]]).unwrap();
    }
    assert_eq!(take(&mut pool, 1), [blocks[0]]);
    assert_eq!(pool.clear_dirty(blocks[0]), Ok(true));
}

#[test]
fn a_pool_has_at_least_one_block_and_no_more_than_ids() {
    let none = BlockPool::new(0).map(drop);
    assert_eq!(none, Err(KvError::InvalidConfig { field: "num_blocks" }));
    let too_many = BlockPool::new(usize::MAX).map(drop);
    assert!(matches!(too_many, Err(KvError::TooLarge { what: "num_blocks", .. })));
    assert_eq!(
        KvError::TooLarge { what: "num_blocks", given: 9, max: 8 }.to_string(),
        "num_blocks is 9, but it can be at most 8"
    );
}

#[test]
fn giving_back_twice_is_refused_where_it_happens() {
    let mut pool = BlockPool::new(4).unwrap();
    let blocks = take(&mut pool, 3);
    let refused = |state| KvError::WrongBlockState { block: 1, state, wanted: "in use" };
    let twice_in_a_call = [blocks[0], blocks[1], blocks[0], blocks[2]];
    pool.keep(blocks[1]).unwrap();
    refuses(
        &pool,
        |pool| pool.give_back(&twice_in_a_call),
        &refused("free"),
        "block 1 is free, but it must be in use",
    );
    pool.keep(blocks[0]).unwrap();
    pool.give_back(&blocks[..1]).unwrap();
    refuses(
        &pool,
        |pool| pool.give_back(&blocks),
        &refused("cached"),
        "block 1 is cached, but it must be in use",
    );
}

#[test]
fn a_block_that_nobody_has_can_not_be_used() {
    let mut pool = BlockPool::new(2).unwrap();
    let refused = |wanted| KvError::WrongBlockState { block: 1, state: "free", wanted };
    let (in_use, pinned) = ("in use", "pinned");
    let cached = "in use or cached";
    refuses(
        &pool,
        |pool| pool.hold(&[id(1)]),
        &refused(cached),
        "block 1 is free, but it must be in use or cached",
    );
    refuses(
        &pool,
        |pool| pool.pin(id(1)),
        &refused(in_use),
        "block 1 is free, but it must be in use",
    );
    refuses(
        &pool,
        |pool| pool.keep(id(1)),
        &refused(in_use),
        "block 1 is free, but it must be in use",
    );
    refuses(
        &pool,
        |pool| pool.unpin(id(1)),
        &refused(pinned),
        "block 1 is free, but it must be pinned",
    );

    // Some of the blocks are all right.
    let block = take(&mut pool, 1)[0];
    assert_eq!(block, id(1));
    let refused = KvError::WrongBlockState { block: 2, state: "free", wanted: cached };
    refuses(
        &pool,
        |pool| pool.hold(&[block, id(2)]),
        &refused,
        "block 2 is free, but it must be in use or cached",
    );
}

#[test]
fn a_block_that_does_not_exist_is_refused_everywhere() {
    let mut pool = BlockPool::new(2).unwrap();
    take(&mut pool, 1);
    let (error, text) = (
        KvError::UnknownBlock { block: 3, num_blocks: 2 },
        "there is no block 3: the blocks are 1 to 2",
    );
    refuses(&pool, |pool| pool.hold(&[id(1), id(3)]), &error, text);
    refuses(&pool, |pool| pool.give_back(&[id(3), id(1)]), &error, text);
    refuses(&pool, |pool| pool.pin(id(3)), &error, text);
    refuses(&pool, |pool| pool.unpin(id(3)), &error, text);
    refuses(&pool, |pool| pool.keep(id(3)), &error, text);
    refuses(&pool, |pool| pool.forget(id(3)), &error, text);
    refuses(&pool, |pool| pool.clear_dirty(id(3)), &error, text);
    refuses(&pool, |pool| pool.state(id(3)), &error, text);
    refuses(&pool, |pool| pool.check_holders([id(3)]), &error, text);
}

#[test]
fn a_holder_that_is_not_accounted_for_is_found() {
    let mut pool = BlockPool::new(2).unwrap();
    let blocks = take(&mut pool, 1);
    assert_eq!(pool.check_holders(blocks), Ok(()));
    let leaked = KvError::Corrupted { what: "holders of a block", recorded: 1, counted: 0 };
    assert_eq!(pool.check_holders([]), Err(leaked.clone()));
    assert_eq!(
        leaked.to_string(),
        "the bookkeeping is corrupted: holders of a block should be 1, but 0 were counted"
    );
}

#[test]
fn equal_blocks_are_merged_at_commit_unless_told_otherwise() {
    for (duplicates, second, in_use) in
        [(Duplicates::Merge, [1, 4], 3), (Duplicates::Keep, [3, 4], 4)]
    {
        let mut cache = PrefixCache::new(9, duplicates).unwrap();
        let tokens = [1, 2, 3];
        // Both start before either has anything to share.
        let mut a = Sequence::start(&mut cache, 2, &[1], 2, true).unwrap().0;
        let mut b = Sequence::start(&mut cache, 2, &[1], 2, true).unwrap().0;
        a.append(&mut cache, &tokens[1..]).unwrap();
        b.append(&mut cache, &tokens[1..]).unwrap();
        assert_eq!((blocks(&a), blocks(&b)), (&[1, 2][..], &second[..]), "{duplicates:?}");
        assert_eq!(cache.pool().num_in_use(), in_use);
        cache.check_integrity().unwrap();
    }
}

#[test]
fn a_merged_block_with_a_view_waits_for_it() {
    let mut cache = PrefixCache::new(9, Duplicates::Merge).unwrap();
    let mut a = start(&mut cache, &[1]);
    start(&mut cache, &[1, 2]);
    cache.pin(id(1)).unwrap();
    a.append(&mut cache, &[2]).unwrap();
    assert_eq!(blocks(&a), [2]);
    assert_eq!(cache.pool().state(id(1)), Ok(BlockState::Pinned));
    cache.unpin(id(1)).unwrap();
    assert_eq!(cache.pool().state(id(1)), Ok(BlockState::Free));
}

#[test]
fn of_two_equal_blocks_the_other_is_found_when_one_is_reused() {
    let mut cache = PrefixCache::new(3, Duplicates::Keep).unwrap();
    let mut a = start(&mut cache, &[1]);
    let mut b = start(&mut cache, &[1]);
    a.append(&mut cache, &[2]).unwrap();
    b.append(&mut cache, &[2]).unwrap();
    a.free(&mut cache).unwrap();
    let keys = b.chain.block_keys();
    assert_eq!(cache.key(id(1)), cache.key(id(2)));

    let c = start(&mut cache, &[7, 8, 9]);
    assert_eq!((blocks(&c), cache.num_evictions()), (&[3, 1][..], 1));
    assert_eq!(cache.match_prefix(keys).collect::<Vec<_>>(), [id(2)]);
}

#[test]
fn a_pinned_block_without_an_owner_can_be_shared_again() {
    let mut cache = PrefixCache::new(4, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3]);
    cache.pin(id(1)).unwrap();
    a.free(&mut cache).unwrap();
    let b = start(&mut cache, &[1, 2, 4]);
    assert_eq!(blocks(&b), [1, 2]);
    assert_eq!(cache.pool().num_pinned(), 0);
}

#[test]
fn a_refused_sequence_leaves_no_trace() {
    let mut cache = PrefixCache::new(4, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3, 4, 5]);
    a.free(&mut cache).unwrap();
    let before = picture(cache.pool());
    // Two blocks would hit, so that two are left for the three that are new.
    let refused = Sequence::start(&mut cache, 2, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 0, true);
    assert!(is_out_of_blocks(&refused));
    assert_eq!(
        refused.unwrap_err(),
        KvError::OutOfBlocks { needed: 3, free: 2, evictable: 0, pinned: 0 }
    );
    assert_eq!(picture(cache.pool()), before);
}

#[test]
fn a_prefix_ends_where_a_block_is_missing() {
    let mut cache = PrefixCache::new(8, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3, 4, 5, 6]);
    cache.forget(id(2)).unwrap();
    let found = cache.match_prefix(a.chain.block_keys()).collect::<Vec<_>>();
    assert_eq!(found, [id(1)]);
    assert_eq!((cache.num_committed(), cache.key(id(2))), (2, Ok(None)));
    // It is not a reason to give the block another key, for it can be committed again.
    assert_eq!(cache.commit(id(2), &a.chain.block_keys()[1]), Ok(id(2)));
    assert_eq!(cache.match_prefix(a.chain.block_keys()).count(), 3);
}

#[test]
fn a_block_that_is_forgotten_waits_behind_no_cached_one() {
    let mut cache = PrefixCache::new(4, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3, 4, 5, 6]);
    a.free(&mut cache).unwrap();
    assert_eq!(queue(cache.pool()), [4, 3, 2, 1]);
    cache.forget(id(2)).unwrap();
    assert_eq!(queue(cache.pool()), [2, 4, 3, 1]);
    cache.forget(id(2)).unwrap();
    assert_eq!(queue(cache.pool()), [2, 4, 3, 1]);
    let mut taken = Vec::new();
    cache.acquire(&[], 2, &mut taken).unwrap();
    assert_eq!((taken, cache.num_evictions()), (vec![id(2), id(4)], 0));
    cache.check_integrity().unwrap();
}

#[test]
fn a_block_has_one_key() {
    let mut cache = PrefixCache::new(8, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3, 4]);
    let keys = a.chain.block_keys();
    assert_eq!(cache.commit(id(1), &keys[0]), Ok(id(1)));
    let (state, wanted) = ("committed under another key", "uncommitted");
    let refused = cache.commit(id(1), &keys[1]);
    assert_eq!(refused, Err(KvError::WrongBlockState { block: 1, state, wanted }));
    assert_eq!(cache.key(id(1)), Ok(Some(&keys[0])));
}

#[test]
fn a_reset_forgets_everything_but_not_while_blocks_are_in_use() {
    let mut cache = PrefixCache::new(8, Duplicates::Merge).unwrap();
    let a = start(&mut cache, &[1, 2, 3, 4]);
    let refused = cache.reset();
    assert_eq!(refused, Err(KvError::BlocksInUse { in_use: 2 }));
    let text = "the prefix cache can not be reset: 2 blocks are in use, or pinned by views";
    assert_eq!(refused.unwrap_err().to_string(), text);
    a.free(&mut cache).unwrap();
    cache.reset().unwrap();
    assert_eq!((cache.num_committed(), cache.pool().num_free()), (0, 8));
    assert_eq!(cache.match_prefix(a.chain.block_keys()).count(), 0);
    assert_eq!(queue(cache.pool()), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn the_other_errors_read_well() {
    let texts = [
        (KvError::DuplicateBlock { block: 7 }, "block 7 would be in the block table twice"),
        (
            KvError::BlockIndexOutOfRange { block_index: 2, num_blocks: 2 },
            "the sequence has no block at index 2: it has 2",
        ),
        (
            KvError::InconsistentTable { reason: "a block is in it twice" },
            "the block table is inconsistent: a block is in it twice",
        ),
        (KvError::SlotOverflow { token: 5 }, "the slot of token 5 overflows"),
        (KvError::AlreadyKeyed { block_index: 1 }, "block 1 of the sequence has its key already"),
    ];
    for (error, text) in texts {
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn debug_output_gives_numbers_and_not_a_line_for_each_block() {
    let mut cache = PrefixCache::new(8, Duplicates::Merge).unwrap();
    start(&mut cache, &[1, 2, 3]);
    assert_eq!(
        format!("{:?}", cache.pool()),
        "BlockPool { num_blocks: 8, num_free: 6, num_cached: 0, num_in_use: 2, num_pinned: 0, .. }"
    );
    assert!(format!("{cache:?}").ends_with("num_committed: 1, num_evictions: 0, .. }"));
}

#[test]
fn what_a_server_shares_can_be_sent_to_other_threads() {
    fn is_send_and_sync<T: Send + Sync + 'static>() {}
    is_send_and_sync::<PrefixCache>();
    is_send_and_sync::<Sequence>();
}
