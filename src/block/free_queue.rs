//! The order in which blocks without an owner are reused.

use super::per_block;
use crate::error::Result;
use crate::ids::BlockId;

/// A queue of blocks which any of them can leave in O(1), and that never allocates.
///
/// It can not tell who is in it. The pool can, and sees to it that a block enters only from outside
/// and leaves only from inside.
#[derive(Clone)]
pub(super) struct FreeQueue {
    /// A ring by block id, in which the entry of the null block joins the ends: its `next` is the
    /// first block of the queue, and its `prev` the last. Entries of blocks outside mean nothing.
    links: Vec<Link>,
    /// Blocks in the ring.
    len: usize,
}

/// The neighbours of a block; `None` is the joint.
#[derive(Clone, Copy)]
struct Link {
    prev: Option<BlockId>,
    next: Option<BlockId>,
}

impl FreeQueue {
    /// Makes the queue of all blocks of a pool, by number.
    pub(super) fn new(num_blocks: usize) -> Result<Self> {
        let mut queue =
            Self { links: per_block(num_blocks, Link { prev: None, next: None })?, len: 0 };
        for block in (1..=num_blocks).filter_map(BlockId::from_index) {
            queue.push_back(block);
        }
        Ok(queue)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_back(&mut self, block: BlockId) {
        let last = self.link(None).prev;
        self.join(last, Some(block));
        self.join(Some(block), None);
        self.len += 1;
    }

    pub(super) fn push_front(&mut self, block: BlockId) {
        let first = self.link(None).next;
        self.join(Some(block), first);
        self.join(None, Some(block));
        self.len += 1;
    }

    pub(super) fn pop_front(&mut self) -> Option<BlockId> {
        let first = self.link(None).next?;
        self.unlink(first);
        Some(first)
    }

    /// Takes a block out of the queue, wherever in it that is.
    pub(super) fn unlink(&mut self, block: BlockId) {
        let Link { prev, next } = *self.link(Some(block));
        self.join(prev, next);
        self.len -= 1;
    }

    /// The blocks from the first, which is reused next, to the last.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> {
        std::iter::successors(self.link(None).next, |&block| self.link(Some(block)).next)
    }

    /// Whether each neighbour of the first `len` says the same, as `iter` relies on.
    pub(super) fn is_ring(&self) -> bool {
        let backwards =
            std::iter::successors(self.link(None).prev, |&block| self.link(Some(block)).prev);
        let mut forwards = self.iter().take(self.len + 1).collect::<Vec<_>>();
        forwards.reverse();
        forwards.len() == self.len && backwards.take(self.len + 1).eq(forwards)
    }

    fn join(&mut self, left: Option<BlockId>, right: Option<BlockId>) {
        self.link_mut(left).next = right;
        self.link_mut(right).prev = left;
    }

    fn link(&self, place: Option<BlockId>) -> &Link {
        &self.links[place.map_or(0, BlockId::index)]
    }

    fn link_mut(&mut self, place: Option<BlockId>) -> &mut Link {
        &mut self.links[place.map_or(0, BlockId::index)]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn id(number: u32) -> BlockId {
        BlockId::new(number).unwrap()
    }

    fn numbers(queue: &FreeQueue) -> Vec<u32> {
        queue.iter().map(BlockId::get).collect()
    }

    #[test]
    fn a_new_queue_has_all_blocks_but_the_null_block_by_number() {
        let mut queue = FreeQueue::new(3).unwrap();
        assert_eq!(numbers(&queue), [1, 2, 3]);
        let popped = std::array::from_fn(|_| queue.pop_front().map(BlockId::get));
        assert_eq!(popped, [Some(1), Some(2), Some(3), None]);
        assert_eq!(queue.len(), 0);
    }

    proptest! {
        /// An operation is a choice and a block; it is left out where its contract does not hold.
        #[test]
        fn it_does_what_a_deque_does(ops in proptest::collection::vec((0..4, 1_u32..6), 0..60)) {
            let mut queue = FreeQueue::new(5).unwrap();
            let mut model = (1..=5).collect::<VecDeque<u32>>();
            for (op, block) in ops {
                let position = model.iter().position(|&queued| queued == block);
                match (op, position) {
                    (0, None) => {
                        queue.push_back(id(block));
                        model.push_back(block);
                    }
                    (1, None) => {
                        queue.push_front(id(block));
                        model.push_front(block);
                    }
                    (2, Some(position)) => {
                        queue.unlink(id(block));
                        model.remove(position);
                    }
                    (3, _) => {
                        prop_assert_eq!(queue.pop_front().map(BlockId::get), model.pop_front());
                    }
                    _ => {}
                }
                prop_assert_eq!(numbers(&queue), Vec::from(model.clone()));
                prop_assert_eq!(queue.len(), model.len());
                prop_assert!(queue.is_ring());
            }
        }
    }
}
