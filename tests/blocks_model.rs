//! Random sequences of calls on a prefix cache and on a naive model of it, which knows no hashes and
//! searches lists. Results and everything that can be asked are compared after each call.

use kvspan::{
    BlockId, BlockKey, BlockState, Duplicates, KeyChain, KeyRoot, KvError, PrefixCache, Result,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError};

const NUM_BLOCKS: u32 = 6;
const BLOCK_SIZE: usize = 2;

/// Block ids go one beyond the pool.
#[derive(Clone, Debug)]
enum Op {
    /// Looks for the full blocks of some tokens, and has as many blocks in the end.
    Acquire(Vec<u32>, usize),
    /// Commits a block as the last full one of some tokens.
    Commit(BlockId, Vec<u32>),
    Hold(Vec<BlockId>),
    GiveBack(Vec<BlockId>),
    Pin(BlockId),
    Unpin(BlockId),
    Forget(BlockId),
    ClearDirty(BlockId),
    Reset,
}

fn any_op() -> impl Strategy<Value = Op> {
    let block = || (1..=NUM_BLOCKS + 1).prop_map(id);
    let blocks = || vec(block(), 0..4);
    // Few different tokens, so that beginnings are often equal.
    let tokens = |len| vec(0_u32..2, len);
    prop_oneof![
        6 => (tokens(0..8), 0_usize..6).prop_map(|(tokens, blocks)| Op::Acquire(tokens, blocks)),
        6 => (block(), tokens(2..6)).prop_map(|(block, tokens)| Op::Commit(block, tokens)),
        2 => blocks().prop_map(Op::Hold),
        6 => blocks().prop_map(Op::GiveBack),
        2 => block().prop_map(Op::Pin),
        2 => block().prop_map(Op::Unpin),
        1 => block().prop_map(Op::Forget),
        2 => block().prop_map(Op::ClearDirty),
        1 => Just(Op::Reset),
    ]
}

fn id(block: u32) -> BlockId {
    BlockId::new(block).expect("not the null block")
}

/// The beginnings of `tokens` that end where a block does.
fn prefixes(tokens: &[u32]) -> Vec<Vec<u32>> {
    (1..=tokens.len() / BLOCK_SIZE).map(|blocks| tokens[..blocks * BLOCK_SIZE].to_vec()).collect()
}

fn keys(tokens: &[u32]) -> Vec<BlockKey> {
    let root = KeyRoot::default().key();
    let mut chain =
        root.and_then(|root| KeyChain::new(root, BLOCK_SIZE)).expect("2 is a block size");
    chain.extend(tokens);
    chain.block_keys().to_vec()
}

#[derive(Debug)]
struct Model {
    duplicates: Duplicates,
    blocks: Vec<Block>,
    /// The one that is reused next first.
    queue: Vec<BlockId>,
    num_evictions: u64,
}

#[derive(Clone, Debug, Default)]
struct Block {
    holders: usize,
    pins: usize,
    /// The tokens that lead to the end of the block, if it is committed.
    content: Option<Vec<u32>>,
    used: bool,
    dirty: bool,
}

impl Block {
    fn state(&self) -> BlockState {
        if self.holders > 0 {
            BlockState::InUse
        } else if self.pins > 0 {
            BlockState::Pinned
        } else if self.content.is_some() {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }
}

impl Model {
    fn new(duplicates: Duplicates) -> Self {
        let queue = (1..=NUM_BLOCKS).map(id).collect::<Vec<_>>();
        Self { duplicates, blocks: vec![Block::default(); queue.len()], queue, num_evictions: 0 }
    }

    fn place(&self, block: BlockId) -> Result<usize> {
        let place = usize::try_from(block.get()).expect("a small number") - 1;
        if place >= self.blocks.len() {
            let num_blocks = self.blocks.len();
            return Err(KvError::UnknownBlock { block: block.get(), num_blocks });
        }
        Ok(place)
    }

    fn get(&self, block: BlockId) -> Result<&Block> {
        Ok(&self.blocks[self.place(block)?])
    }

    fn get_mut(&mut self, block: BlockId) -> Result<&mut Block> {
        let place = self.place(block)?;
        Ok(&mut self.blocks[place])
    }

    fn count(&self, state: BlockState) -> usize {
        self.blocks.iter().filter(|block| block.state() == state).count()
    }

    fn with_content(&self, content: &[u32]) -> impl Iterator<Item = BlockId> {
        let found = move |block: &BlockId| {
            self.get(*block).is_ok_and(|block| block.content.as_deref() == Some(content))
        };
        (1..=NUM_BLOCKS).map(id).filter(found)
    }

    /// Where a content is in more than one block, `found` says which one is to be used; else it is the
    /// one that leaves fewer to be taken.
    fn acquire(
        &mut self,
        tokens: &[u32],
        num_blocks: usize,
        found: &[BlockId],
    ) -> Result<Vec<BlockId>> {
        let mut hits = Vec::new();
        for (place, content) in prefixes(tokens).iter().take(num_blocks).enumerate() {
            let has_it = self.with_content(content).collect::<Vec<_>>();
            let queued = has_it.iter().find(|block| self.queue.contains(block));
            let Some(&first) = queued.or(has_it.first()) else { break };
            hits.push(
                found.get(place).copied().filter(|block| has_it.contains(block)).unwrap_or(first),
            );
        }
        let spared = |block: &&BlockId| self.queue.contains(block);
        let available = self.queue.len() - hits.iter().filter(spared).count();
        let needed = num_blocks - hits.len();
        if needed > available {
            let (free, pinned) = (self.count(BlockState::Free), self.count(BlockState::Pinned));
            return Err(KvError::OutOfBlocks { needed, free, evictable: available - free, pinned });
        }
        self.hold(&hits)?;
        for _ in 0..needed {
            let block = self.queue.remove(0);
            hits.push(block);
            let block = self.get_mut(block)?;
            block.holders = 1;
            block.dirty |= block.used;
            block.used = true;
            let evicted = block.content.take().is_some();
            self.num_evictions += u64::from(evicted);
        }
        Ok(hits)
    }

    fn hold(&mut self, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            let held = self.get(block)?;
            if held.holders == 0 && held.content.is_none() {
                return self.refuse(block, "in use or cached");
            }
        }
        for &block in blocks {
            self.get_mut(block)?.holders += 1;
            self.queue.retain(|&queued| queued != block);
        }
        Ok(())
    }

    fn give_back(&mut self, blocks: &[BlockId]) -> Result<()> {
        let mut left = self.blocks.clone();
        for &block in blocks.iter().rev() {
            let place = self.place(block)?;
            if left[place].holders == 0 {
                // The message tells of the state as it was when the call had come so far.
                let state = name(left[place].state());
                return Err(KvError::WrongBlockState {
                    block: block.get(),
                    state,
                    wanted: "in use",
                });
            }
            left[place].holders -= 1;
        }
        for &block in blocks.iter().rev() {
            self.get_mut(block)?.holders -= 1;
            self.enqueue_if_unused(block);
        }
        Ok(())
    }

    fn enqueue_if_unused(&mut self, block: BlockId) {
        match self.get(block).map(Block::state) {
            Ok(BlockState::Free) => self.queue.insert(0, block),
            Ok(BlockState::Cached) => self.queue.push(block),
            _ => {}
        }
    }

    fn pin(&mut self, block: BlockId) -> Result<()> {
        match self.get(block)?.state() {
            BlockState::InUse | BlockState::Pinned => self.get_mut(block)?.pins += 1,
            BlockState::Free | BlockState::Cached => return self.refuse(block, "in use"),
        }
        Ok(())
    }

    fn unpin(&mut self, block: BlockId) -> Result<()> {
        let waited = self.get(block)?.state() == BlockState::Pinned;
        if self.get(block)?.pins == 0 {
            return self.refuse(block, "pinned");
        }
        self.get_mut(block)?.pins -= 1;
        if waited {
            self.enqueue_if_unused(block);
        }
        Ok(())
    }

    fn commit(&mut self, block: BlockId, content: &[u32]) -> Result<BlockId> {
        if self.get(block)?.holders == 0 {
            return self.refuse(block, "in use");
        }
        match &self.get(block)?.content {
            Some(own) if own == content => return Ok(block),
            Some(_) => {
                let (state, wanted) = ("committed under another key", "uncommitted");
                return Err(KvError::WrongBlockState { block: block.get(), state, wanted });
            }
            None => {}
        }
        let other = self.with_content(content).next();
        if let (Some(other), Duplicates::Merge) = (other, self.duplicates) {
            self.hold(&[other])?;
            self.give_back(&[block])?;
            return Ok(other);
        }
        self.get_mut(block)?.content = Some(content.to_vec());
        Ok(block)
    }

    fn reset(&mut self) -> Result<()> {
        let in_use = self.blocks.len() - self.queue.len();
        if in_use > 0 {
            return Err(KvError::BlocksInUse { in_use });
        }
        (1..=NUM_BLOCKS).rev().try_for_each(|number| self.forget(id(number)))
    }

    fn forget(&mut self, block: BlockId) -> Result<()> {
        let was_cached = self.get(block)?.state() == BlockState::Cached;
        self.get_mut(block)?.content = None;
        if was_cached {
            self.queue.retain(|&queued| queued != block);
            self.queue.insert(0, block);
        }
        Ok(())
    }

    fn refuse<T>(&self, block: BlockId, wanted: &'static str) -> Result<T> {
        let state = name(self.get(block)?.state());
        Err(KvError::WrongBlockState { block: block.get(), state, wanted })
    }
}

fn name(state: BlockState) -> &'static str {
    match state {
        BlockState::Free => "free",
        BlockState::Cached => "cached",
        BlockState::InUse => "in use",
        BlockState::Pinned => "given back and pinned",
    }
}

/// Does `op` to both and compares what they return.
fn step(cache: &mut PrefixCache, model: &mut Model, op: &Op) -> Result<(), TestCaseError> {
    match op {
        Op::Acquire(tokens, num_blocks) => {
            let num_blocks = *num_blocks;
            let mut blocks = vec![id(1)];
            let hits = cache.acquire(&keys(tokens), num_blocks, &mut blocks);
            prop_assert_eq!(blocks.remove(0), id(1));
            let expected = model.acquire(tokens, num_blocks, &blocks);
            match (hits, expected) {
                (Ok(hits), Ok(expected)) => {
                    prop_assert_eq!(&blocks, &expected);
                    prop_assert!(hits <= blocks.len());
                }
                (Err(error), Err(expected)) => {
                    prop_assert!(blocks.is_empty());
                    // How many blocks were evictable depends on which duplicates would have hit.
                    if model.duplicates == Duplicates::Merge {
                        prop_assert_eq!(error, expected);
                    }
                }
                (hits, expected) => prop_assert!(false, "{hits:?} is not {expected:?}"),
            }
        }
        Op::Commit(block, tokens) => {
            let keys = keys(tokens);
            let content = prefixes(tokens).pop().unwrap_or_default();
            let committed = cache.commit(*block, &keys[keys.len() - 1]);
            prop_assert_eq!(committed, model.commit(*block, &content));
        }
        Op::Hold(blocks) => prop_assert_eq!(cache.hold(blocks), model.hold(blocks)),
        Op::GiveBack(blocks) => prop_assert_eq!(cache.give_back(blocks), model.give_back(blocks)),
        Op::Pin(block) => prop_assert_eq!(cache.pin(*block), model.pin(*block)),
        Op::Unpin(block) => prop_assert_eq!(cache.unpin(*block), model.unpin(*block)),
        Op::Forget(block) => {
            prop_assert_eq!(cache.forget(*block), model.forget(*block));
        }
        Op::ClearDirty(block) => {
            let dirty = model.get_mut(*block).map(|block| std::mem::take(&mut block.dirty));
            prop_assert_eq!(cache.clear_dirty(*block), dirty);
        }
        Op::Reset => prop_assert_eq!(cache.reset(), model.reset()),
    }
    Ok(())
}

/// Compares everything that can be asked.
fn compare(cache: &PrefixCache, model: &Model) -> Result<(), TestCaseError> {
    let pool = cache.pool();
    prop_assert_eq!(cache.check_integrity(), Ok(()));
    prop_assert_eq!(pool.free_queue().collect::<Vec<_>>(), model.queue.clone());
    prop_assert_eq!(cache.num_evictions(), model.num_evictions);
    let mut num_committed = 0;
    let mut held = Vec::new();
    for block in pool.blocks() {
        let expected = model.get(block).expect("it is in the pool");
        prop_assert_eq!(pool.state(block), Ok(expected.state()));
        prop_assert_eq!(pool.reference_count(block), Ok(expected.holders));
        prop_assert_eq!(pool.pin_count(block), Ok(expected.pins));
        let key = expected.content.as_deref().and_then(|content| keys(content).last().copied());
        prop_assert_eq!(cache.key(block), Ok(key.as_ref()));
        num_committed += usize::from(key.is_some());
        held.extend(std::iter::repeat_n(block, expected.holders));
    }
    prop_assert_eq!(pool.check_holders(held), Ok(()));
    prop_assert_eq!(cache.num_committed(), num_committed);
    prop_assert_eq!(pool.num_free(), model.count(BlockState::Free));
    prop_assert_eq!(pool.num_cached(), model.count(BlockState::Cached));
    prop_assert_eq!(pool.num_pinned(), model.count(BlockState::Pinned));
    prop_assert_eq!(pool.num_free() + pool.num_cached() + pool.num_in_use(), pool.num_blocks());
    Ok(())
}

proptest! {
    #![proptest_config(Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/blocks_model.txt",
        ))),
        ..Config::default()
    })]

    #[test]
    fn a_prefix_cache_does_what_its_model_does(
        merge in any::<bool>(),
        ops in vec(any_op(), 0..80),
    ) {
        let duplicates = if merge { Duplicates::Merge } else { Duplicates::Keep };
        let num_blocks = NUM_BLOCKS.try_into().expect("a small number");
        let mut cache = PrefixCache::new(num_blocks, duplicates).expect("a small pool");
        let mut model = Model::new(duplicates);
        for op in &ops {
            step(&mut cache, &mut model, op)?;
            compare(&cache, &model)?;
        }
    }
}
