//! The rows of many blocks in one allocation, guarded where they lie.

#![expect(unsafe_code, reason = "slices of the shared buffer are made here, over claimed rows")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::buffer::{Buffer, Source, Stored, Target};
use super::pins::{PinKey, Pins};
use crate::config::{BlockGeometry, BlockShape, Place};
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::ids::BlockId;
use crate::sync::RwLock;

/// The bytes of all blocks, block after block: `[block][layer][K or V][slot][head][dim]`.
///
/// A *row* is one slot of one layer: its keys and its values. Who a block belongs to is for the
/// layers above. Whatever they do, rows that are pinned do not change, and nobody reads a row while
/// it is written.
///
/// # Complexity
///
/// A block costs about 100 bytes besides its own.
#[derive(Debug)]
pub(crate) struct BlockRows<T> {
    geometry: BlockGeometry,
    buffer: Buffer,
    /// By block id.
    guards: Vec<Guard>,
    _elements: PhantomData<T>,
}

/// What keeps the users of one block apart.
#[derive(Debug, Default)]
struct Guard {
    /// Held shared by whoever copies rows or pins them, exclusively by whoever changes rows. Only
    /// copies happen meanwhile, never a caller's code.
    lock: RwLock<()>,
    /// Ranges of `layer * block_size + slot`.
    pins: Pins,
}

/// Some slots of one block, in one layer.
#[derive(Clone, Debug)]
pub(crate) struct BlockSlots {
    pub(crate) block: BlockId,
    pub(crate) layer: usize,
    pub(crate) slots: Range<usize>,
}

impl<T: Element> BlockRows<T> {
    /// All rows are zeros.
    pub(crate) fn new(geometry: BlockGeometry) -> Result<Self> {
        let mut guards = Vec::new();
        let bytes = geometry.num_places.saturating_mul(size_of::<Guard>());
        let reserved = guards.try_reserve_exact(geometry.num_places);
        reserved.map_err(|_| KvError::OutOfMemory { bytes })?;
        guards.resize_with(geometry.num_places, Guard::default);
        let buffer = Buffer::zeroed(geometry.num_bytes)?;
        Ok(Self { geometry, buffer, guards, _elements: PhantomData })
    }

    pub(crate) fn geometry(&self) -> &BlockGeometry {
        &self.geometry
    }

    /// Writes the rows of `at`.
    pub(crate) fn write(
        &self,
        at: &BlockSlots,
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) -> Result<()> {
        let (guard, places) = self.locate(at)?;
        let wanted = at.slots.len() * self.geometry.width;
        for given in [keys.len(), values.len()] {
            if given != wanted {
                return Err(KvError::WidthMismatch { given, width: wanted });
            }
        }
        let _exclusive = guard.lock.write();
        self.check_unpinned(guard, at.layer..at.layer + 1, &at.slots)?;
        for (place, source) in places.iter().zip([&keys, &values]) {
            // SAFETY: the lock is held exclusively, and no pin overlaps the rows.
            unsafe { self.buffer.write(place, source) };
        }
        Ok(())
    }

    /// Copies the rows of `at` to the start of two buffers, which have room for them.
    pub(crate) fn read(
        &self,
        at: &BlockSlots,
        keys: &mut Target<'_, T>,
        values: &mut Target<'_, T>,
    ) -> Result<()> {
        let (guard, [keys_at, values_at]) = self.locate(at)?;
        let wanted = at.slots.len() * self.geometry.width;
        for (plane, given) in [("keys", keys.len()), ("values", values.len())] {
            if given < wanted {
                return Err(KvError::OutputTooShort { plane, given, wanted });
            }
        }
        let _shared = guard.lock.read();
        // SAFETY: the lock is held shared.
        unsafe { self.buffer.read(&keys_at, keys) };
        // SAFETY: likewise.
        unsafe { self.buffer.read(&values_at, values) };
        Ok(())
    }

    /// Zeroes some slots of a block in all layers.
    pub(crate) fn zero(&self, block: BlockId, slots: Range<usize>) -> Result<()> {
        let BlockGeometry { shape, block_bytes, .. } = self.geometry;
        let first = BlockSlots { block, layer: 0, slots: slots.clone() };
        let (guard, _) = self.locate(&first)?;
        let _exclusive = guard.lock.write();
        self.check_unpinned(guard, 0..shape.num_layers, &slots)?;
        if slots.len() == shape.block_size {
            // SAFETY: the lock is held exclusively, and the block has no pin.
            unsafe { self.buffer.zero_bytes(self.geometry.block_at(block), block_bytes) };
            return Ok(());
        }
        for layer in 0..shape.num_layers {
            for place in self.geometry.places(block, layer, &slots) {
                // SAFETY: the lock is held exclusively, and no pin overlaps the rows.
                unsafe { self.buffer.zero::<T>(&place) };
            }
        }
        Ok(())
    }

    /// Makes `to` a copy of `from`.
    pub(crate) fn copy(&self, from: BlockId, to: BlockId) -> Result<()> {
        let all = |block| BlockSlots { block, layer: 0, slots: 0..self.geometry.shape.block_size };
        let (source, _) = self.locate(&all(from))?;
        let (target, _) = self.locate(&all(to))?;
        if from == to {
            return Ok(());
        }
        // The lower number first, so that two copies can not wait for each other.
        let (_shared, _exclusive);
        if from < to {
            _shared = source.lock.read();
            _exclusive = target.lock.write();
        } else {
            _exclusive = target.lock.write();
            _shared = source.lock.read();
        }
        let slots = 0..self.geometry.shape.block_size;
        self.check_unpinned(target, 0..self.geometry.shape.num_layers, &slots)?;
        let [from, to] = [from, to].map(|block| self.geometry.block_at(block));
        // SAFETY: the source's lock is held shared; the target's exclusively, and it has no pin.
        unsafe { self.buffer.copy_bytes(from, to, self.geometry.block_bytes) };
        Ok(())
    }

    /// Keeps the rows of `at` as they are for as long as the result lives.
    pub(crate) fn pin(self: &Arc<Self>, at: BlockSlots) -> Result<PinnedBlockRows<T>> {
        let (guard, _) = self.locate(&at)?;
        let _shared = guard.lock.read();
        let first = at.layer * self.geometry.shape.block_size;
        let rows = first + at.slots.start..first + at.slots.end;
        // No row can change, so there is nothing to register.
        let key = (!rows.is_empty()).then(|| guard.pins.pin(rows));
        Ok(PinnedBlockRows { rows: Arc::clone(self), at, key })
    }

    /// Whether a view pins some of these slots, in one layer or in any. Of one that is being made it
    /// may know nothing.
    pub(crate) fn is_pinned(
        &self,
        block: BlockId,
        layer: Option<usize>,
        slots: &Range<usize>,
    ) -> bool {
        let layers = layer.map_or(0..self.geometry.shape.num_layers, |layer| layer..layer + 1);
        let guard = self.guards.get(block.index());
        guard.is_some_and(|guard| self.count_pins(guard, layers, slots) > 0)
    }

    /// The guard of the block, and where keys and values are. Fails for what is not in the buffer.
    fn locate(&self, at: &BlockSlots) -> Result<(&Guard, [Place; 2])> {
        let BlockShape { block_size, num_layers, .. } = self.geometry.shape;
        let (block, Range { start, end }) = (at.block, at.slots.clone());
        let Some(guard) = self.guards.get(block.index()) else {
            let num_blocks = self.guards.len() - 1;
            return Err(KvError::UnknownBlock { block: block.get(), num_blocks });
        };
        if at.layer >= num_layers {
            return Err(KvError::LayerOutOfRange { layer: at.layer, num_layers });
        }
        if start > end || end > block_size {
            return Err(KvError::RangeOutOfBounds { start, end, len: block_size });
        }
        Ok((guard, self.geometry.places(block, at.layer, &at.slots)))
    }

    /// Asked with the guard's lock held exclusively, so that no pin is being made.
    fn check_unpinned(
        &self,
        guard: &Guard,
        layers: Range<usize>,
        slots: &Range<usize>,
    ) -> Result<()> {
        match self.count_pins(guard, layers, slots) {
            0 => Ok(()),
            pins => Err(KvError::Pinned { range: slots.clone(), pins }),
        }
    }

    /// The pins on the first of these layers that has any.
    fn count_pins(&self, guard: &Guard, layers: Range<usize>, slots: &Range<usize>) -> usize {
        let BlockShape { block_size, num_layers, .. } = self.geometry.shape;
        let Range { start, end } = *slots;
        let rows = layers.map(|layer| layer * block_size + start..layer * block_size + end);
        guard.pins.conflict(rows, &(0..num_layers * block_size)).map_or(0, |(_, pins)| pins)
    }
}

/// Rows of one block that do not change, and whose memory stays, while this lives.
#[derive(Debug)]
pub(crate) struct PinnedBlockRows<T> {
    rows: Arc<BlockRows<T>>,
    /// Inside the buffer.
    at: BlockSlots,
    /// `None` for no rows.
    key: Option<PinKey>,
}

impl<T: Element> PinnedBlockRows<T> {
    /// The keys and the values.
    pub(crate) fn stored(&self) -> [Stored<'_, T>; 2] {
        let BlockSlots { block, layer, slots } = &self.at;
        self.rows.geometry.places(*block, *layer, slots).map(|place| {
            // SAFETY: who changes rows of a block finds no pin on them first.
            unsafe { self.rows.buffer.rows(&place) }
        })
    }
}

impl<T> Drop for PinnedBlockRows<T> {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            self.rows.guards[self.at.block.index()].pins.unpin(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Arc<BlockRows<f32>> {
        let shape = BlockShape { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 2 };
        let geometry = BlockGeometry::new::<f32>(3, shape).unwrap();
        Arc::new(BlockRows::new(geometry).unwrap())
    }

    fn id(block: u32) -> BlockId {
        BlockId::new(block).unwrap()
    }

    fn at(block: u32, layer: usize, slots: Range<usize>) -> BlockSlots {
        BlockSlots { block: id(block), layer, slots }
    }

    fn write(rows: &BlockRows<f32>, at: &BlockSlots, number: f32) -> Result<()> {
        let keys = vec![number; at.slots.len() * 2];
        let values = keys.iter().map(|key| -key).collect::<Vec<_>>();
        rows.write(at, keys.as_slice().into(), values.as_slice().into())
    }

    fn keys(rows: &BlockRows<f32>, block: u32, layer: usize) -> Vec<f32> {
        let (mut keys, mut values) = (vec![0.0; 8], vec![0.0; 8]);
        let (into_keys, into_values) =
            (&mut keys.as_mut_slice().into(), &mut values.as_mut_slice().into());
        rows.read(&at(block, layer, 0..4), into_keys, into_values).unwrap();
        assert_eq!(values, keys.iter().map(|key| -key).collect::<Vec<_>>());
        keys.into_iter().step_by(2).collect()
    }

    #[test]
    fn a_row_is_read_where_it_was_written_and_nowhere_else() {
        let rows = rows();
        write(&rows, &at(2, 1, 1..3), 5.0).unwrap();
        assert_eq!(keys(&rows, 2, 1), [0.0, 5.0, 5.0, 0.0]);
        for (block, layer) in [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)] {
            assert_eq!(keys(&rows, block, layer), [0.0; 4]);
        }
    }

    #[test]
    fn what_is_pinned_stays_and_everything_beside_it_can_change() {
        let rows = rows();
        write(&rows, &at(1, 0, 0..4), 1.0).unwrap();
        let pin = rows.pin(at(1, 0, 1..3)).unwrap();
        let pinned = |slots| Err(KvError::Pinned { range: slots, pins: 1 });
        assert_eq!(write(&rows, &at(1, 0, 2..4), 2.0), pinned(2..4));
        assert_eq!(rows.zero(id(1), 0..4), pinned(0..4));
        assert_eq!(rows.zero(id(1), 1..2), pinned(1..2));
        assert_eq!(rows.copy(id(2), id(1)), pinned(0..4));
        assert!(rows.is_pinned(id(1), None, &(2..3)) && !rows.is_pinned(id(1), None, &(3..4)));
        assert!(
            rows.is_pinned(id(1), Some(0), &(2..3)) && !rows.is_pinned(id(1), Some(1), &(2..3))
        );

        write(&rows, &at(1, 0, 3..4), 3.0).unwrap();
        write(&rows, &at(1, 1, 0..4), 4.0).unwrap();
        rows.copy(id(1), id(2)).unwrap();
        assert_eq!(keys(&rows, 2, 0), [1.0, 1.0, 1.0, 3.0]);
        assert_eq!(pin.stored().map(|stored| stored.data), [&[1.0; 4][..], &[-1.0; 4][..]]);
        drop(pin);
        rows.zero(id(1), 1..3).unwrap();
        assert_eq!(keys(&rows, 1, 0), [1.0, 0.0, 0.0, 3.0]);
        rows.zero(id(1), 0..4).unwrap();
        assert_eq!([keys(&rows, 1, 1), keys(&rows, 2, 1)], [[0.0; 4], [4.0; 4]]);
    }

    #[test]
    fn a_pin_keeps_the_memory() {
        let rows = rows();
        write(&rows, &at(3, 1, 0..4), 7.0).unwrap();
        let pin = rows.pin(at(3, 1, 0..4)).unwrap();
        drop(rows);
        assert_eq!(pin.stored()[0].data, [7.0; 8]);
    }

    #[test]
    fn what_is_not_in_the_buffer_is_refused() {
        let rows = rows();
        let unknown = KvError::UnknownBlock { block: 4, num_blocks: 3 };
        assert_eq!(write(&rows, &at(4, 0, 0..1), 1.0), Err(unknown));
        let layer = KvError::LayerOutOfRange { layer: 2, num_layers: 2 };
        assert_eq!(write(&rows, &at(1, 2, 0..1), 1.0), Err(layer));
        let range = KvError::RangeOutOfBounds { start: 3, end: 5, len: 4 };
        assert_eq!(rows.pin(at(1, 0, 3..5)).err(), Some(range));
        let narrow = rows.write(&at(1, 0, 0..2), [0.0; 4].as_slice().into(), [0.0; 3][..].into());
        assert_eq!(narrow, Err(KvError::WidthMismatch { given: 3, width: 4 }));
    }
}
