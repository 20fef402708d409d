//! A sequence over a prefix cache, as the manager above it would have one.

use kvspan::{BlockId, BlockTable, KeyChain, KeyRoot, KvError, PrefixCache, Result};

#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) table: BlockTable,
    pub(crate) chain: KeyChain,
    /// Whether it looks for shared blocks and commits its own.
    caching: bool,
}

impl Sequence {
    /// Starts one on its tokens, with room for `lookahead` more; returns also how many blocks hit.
    pub(crate) fn start(
        cache: &mut PrefixCache,
        block_size: usize,
        tokens: &[u32],
        lookahead: usize,
        caching: bool,
    ) -> Result<(Self, usize)> {
        let mut chain = KeyChain::new(KeyRoot::default().key()?, block_size)?;
        chain.extend(tokens);
        let mut table = BlockTable::new(block_size);
        let needed = BlockTable::blocks_needed_for_length(tokens.len() + lookahead, block_size);
        let keys = if caching { chain.reusable_keys() } else { &[] };
        let mut blocks = Vec::new();
        let hits = cache.acquire(keys, needed, &mut blocks)?;
        table.add_blocks(&blocks)?;
        table.extend_sequence(tokens.len())?;
        let mut sequence = Self { table, chain, caching };
        sequence.commit(cache, hits)?;
        Ok((sequence, hits))
    }

    /// Appends tokens; returns the blocks that it took for them.
    pub(crate) fn append(
        &mut self,
        cache: &mut PrefixCache,
        tokens: &[u32],
    ) -> Result<Vec<BlockId>> {
        let Self { table, chain, .. } = self;
        let len = table.sequence_length + tokens.len();
        let needed = BlockTable::blocks_needed_for_length(len, table.block_size);
        let mut blocks = Vec::new();
        cache.acquire(&[], needed.saturating_sub(table.num_blocks()), &mut blocks)?;
        table.add_blocks(&blocks)?;
        table.extend_sequence(tokens.len())?;
        let keyed = chain.block_keys().len();
        chain.extend(tokens);
        self.commit(cache, keyed)?;
        Ok(blocks)
    }

    fn commit(&mut self, cache: &mut PrefixCache, from: usize) -> Result<()> {
        let keys = if self.caching { self.chain.block_keys() } else { &[] };
        for (index, key) in keys.iter().enumerate().skip(from) {
            let block = cache.commit(self.table.physical_blocks[index], key)?;
            self.table.replace_block(index, block)?;
        }
        Ok(())
    }

    pub(crate) fn free(&self, cache: &mut PrefixCache) -> Result<()> {
        cache.give_back(&self.table.physical_blocks)
    }
}

/// Whether `result` is a refusal for want of blocks.
pub(crate) fn is_out_of_blocks<T>(result: &Result<T>) -> bool {
    matches!(result, Err(KvError::OutOfBlocks { .. }))
}
