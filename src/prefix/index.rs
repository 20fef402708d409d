//! Where the content of a key is.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::block::per_block;
use crate::error::{KvError, Result};
use crate::hash::BlockKey;
use crate::ids::BlockId;

/// The keys of blocks, and the way from a key to a block that has it.
///
/// It can not tell which blocks have a key. Its owner can, and sees to it that a block is inserted
/// only without one and removed only with one.
#[derive(Clone)]
pub(super) struct KeyIndex {
    /// By block id. The entries of blocks without a key mean nothing.
    keys: Vec<BlockKey>,
    /// The blocks with a key, by its leading bytes, which are as good as any hash of it. Blocks whose
    /// keys are equal have an entry each.
    blocks: HashTable<BlockId>,
}

impl KeyIndex {
    pub(super) fn new(num_blocks: usize) -> Result<Self> {
        let keys = per_block(num_blocks, BlockKey::BLANK)?;
        // Twice as many as there can be, so that it never grows and is seldom tidied of what removed
        // entries leave behind.
        let capacity = num_blocks.saturating_mul(2);
        let bytes = capacity.saturating_mul(size_of::<BlockId>());
        let mut blocks = HashTable::new();
        blocks.try_reserve(capacity, |_| 0).map_err(|_| KvError::OutOfMemory { bytes })?;
        Ok(Self { keys, blocks })
    }

    /// Blocks with a key.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn key(&self, block: BlockId) -> &BlockKey {
        &self.keys[block.index()]
    }

    /// A block that has `key`.
    pub(super) fn find(&self, key: &BlockKey) -> Option<BlockId> {
        self.blocks.find(key.leading(), |&block| self.key(block) == key).copied()
    }

    /// A block that has `key` and is `preferred`; another one that has it if there is none.
    pub(super) fn find_preferred(
        &self,
        key: &BlockKey,
        preferred: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        let mut found = None;
        for &block in self.blocks.iter_hash(key.leading()) {
            if self.key(block) == key {
                if preferred(block) {
                    return Some(block);
                }
                found = found.or(Some(block));
            }
        }
        found
    }

    /// Gives `block` the key if no block has it yet; otherwise says which one does.
    pub(super) fn find_or_insert(&mut self, block: BlockId, key: &BlockKey) -> Option<BlockId> {
        let Self { keys, blocks } = self;
        let equal = |other: &BlockId| keys[other.index()] == *key;
        match blocks.entry(key.leading(), equal, |other| keys[other.index()].leading()) {
            Entry::Occupied(entry) => return Some(*entry.get()),
            Entry::Vacant(entry) => entry.insert(block),
        };
        keys[block.index()] = *key;
        None
    }

    /// Gives `block` a key that another block has as well.
    pub(super) fn insert_another(&mut self, block: BlockId, key: &BlockKey) {
        let Self { keys, blocks } = self;
        keys[block.index()] = *key;
        blocks.insert_unique(key.leading(), block, |other| keys[other.index()].leading());
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        let hash = self.key(block).leading();
        if let Ok(entry) = self.blocks.find_entry(hash, |&other| other == block) {
            entry.remove();
        }
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Whether the way from the block's key leads to it.
    pub(super) fn leads_to(&self, block: BlockId) -> bool {
        self.blocks.find(self.key(block).leading(), |&other| other == block).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_differ_in_one_bit_are_two() {
        let [one, other] = [1, 2].map(|id| BlockId::new(id).unwrap());
        for bit in 0..256 {
            let mut bytes = [0; 32];
            bytes[bit / 8] = 1 << (bit % 8);
            let key = BlockKey::of(bytes);
            let mut index = KeyIndex::new(2).unwrap();
            assert_eq!(index.find_or_insert(one, &BlockKey::BLANK), None);
            assert_eq!(index.find(&key), None, "bit {bit} counts");
            assert_eq!(index.find_or_insert(other, &key), None);
            assert_eq!((index.find(&key), index.find(&BlockKey::BLANK)), (Some(other), Some(one)));
            index.remove(one);
            assert_eq!((index.find(&key), index.find(&BlockKey::BLANK)), (Some(other), None));
        }
    }
}
