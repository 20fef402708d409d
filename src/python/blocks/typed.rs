//! The core's manager and its handles, whatever their element type.
//!
//! Each method is the core's of the same name.

use std::ops::{Deref, Range};

use parking_lot::{RwLockReadGuard, RwLockWriteGuard};

use crate::block::BlockTable;
use crate::dtype::{DType, bf16, f16};
use crate::error::{KvError, Result};
use crate::handle::{ContiguousKvCacheHandle, KvCacheHandle, PagedKvCacheHandle};
use crate::hash::KeyChain;
use crate::manager::{BlockTables, KvCacheManager, KvCacheManagerConfig, Prompt, RequestOptions};
use crate::python::buffer::{Values, ValuesMut};
use crate::python::typed::{AnyLayerKvCache, AnyPagedSpan, Typed, each, of_dtype, same_for_each};
use crate::store::{BlockCopy, Inspection, LeakReport, ManagerStats};

pub(super) type AnyKvCacheManager =
    Typed<KvCacheManager<f32>, KvCacheManager<f16>, KvCacheManager<bf16>, KvCacheManager<i8>>;
pub(super) type AnyPagedHandle = Typed<
    PagedKvCacheHandle<f32>,
    PagedKvCacheHandle<f16>,
    PagedKvCacheHandle<bf16>,
    PagedKvCacheHandle<i8>,
>;
pub(super) type AnyContiguousHandle = Typed<
    ContiguousKvCacheHandle<f32>,
    ContiguousKvCacheHandle<f16>,
    ContiguousKvCacheHandle<bf16>,
    ContiguousKvCacheHandle<i8>,
>;

/// `own!((manager, handle) as (m, h) => done)`: what is done with both, which are of one type. A handle
/// of another one is another manager's.
macro_rules! own {
    (($manager:expr, $handle:expr) as ($m:ident, $h:ident) => $done:expr) => {
        match ($manager, $handle) {
            (Typed::F32($m), Typed::F32($h)) => $done,
            (Typed::F16($m), Typed::F16($h)) => $done,
            (Typed::BF16($m), Typed::BF16($h)) => $done,
            (Typed::I8($m), Typed::I8($h)) => $done,
            (_, handle) => Err(foreign(handle)),
        }
    };
}

/// `own_typed!(..)`: the same of what fails or makes something of that type.
macro_rules! own_typed {
    (($manager:expr, $handle:expr) as ($m:ident, $h:ident) => $made:expr) => {
        match ($manager, $handle) {
            (Typed::F32($m), Typed::F32($h)) => $made.map(Typed::F32),
            (Typed::F16($m), Typed::F16($h)) => $made.map(Typed::F16),
            (Typed::BF16($m), Typed::BF16($h)) => $made.map(Typed::BF16),
            (Typed::I8($m), Typed::I8($h)) => $made.map(Typed::I8),
            (_, handle) => Err(foreign(handle)),
        }
    };
}

/// `own_all!((manager, handles) as (m, mut all) => done)`: the same with locks of many handles. With
/// `ref all` they are only read.
macro_rules! own_all {
    (($manager:expr, $locked:expr) as ($m:ident, $how:tt $all:ident) => $done:expr) => {
        match $manager {
            Typed::F32($m) => own_all!($how F32, $locked, $all => $done),
            Typed::F16($m) => own_all!($how F16, $locked, $all => $done),
            Typed::BF16($m) => own_all!($how BF16, $locked, $all => $done),
            Typed::I8($m) => own_all!($how I8, $locked, $all => $done),
        }
    };
    (mut $Type:ident, $locked:expr, $all:ident => $done:expr) => {{
        let locked = $locked;
        let mut $all = Vec::with_capacity(locked.len());
        for handle in locked.iter_mut() {
            match &mut **handle {
                Typed::$Type(own) => $all.push(own),
                other => return Err(foreign(other)),
            }
        }
        $done
    }};
    (ref $Type:ident, $locked:expr, $all:ident => $done:expr) => {{
        let locked = $locked;
        let mut $all = Vec::with_capacity(locked.len());
        for handle in locked {
            match &**handle {
                Typed::$Type(own) => $all.push(own),
                other => return Err(foreign(other)),
            }
        }
        $done
    }};
}

/// Locks of many handles.
pub(super) type Reading<'a> = [RwLockReadGuard<'a, AnyPagedHandle>];
pub(super) type Changing<'a> = [RwLockWriteGuard<'a, AnyPagedHandle>];

/// What many sequences got.
#[derive(Debug)]
pub(super) struct Extended {
    /// Of the new tokens.
    pub(super) slots: Vec<usize>,
    /// Blocks that were copied, and the places of their sequences.
    pub(super) copies: Vec<(usize, BlockCopy)>,
}

fn typed<H>(handles: Vec<H>, typed: fn(H) -> AnyPagedHandle) -> Vec<AnyPagedHandle> {
    handles.into_iter().map(typed).collect()
}

fn foreign(handle: &AnyPagedHandle) -> KvError {
    KvError::ForeignHandle { cache_id: handle.cache_id() }
}

impl AnyKvCacheManager {
    pub(super) fn new(dtype: DType, config: &KvCacheManagerConfig) -> Result<Self> {
        Ok(of_dtype!(dtype, T => KvCacheManager::<T>::with_element(config.clone())?))
    }

    pub(super) fn nbytes(&self) -> usize {
        each!(self, manager => manager.nbytes())
    }

    pub(super) fn block_keys(
        &self,
        tokens: Vec<u32>,
        options: &RequestOptions<'_>,
    ) -> Result<KeyChain> {
        each!(self, manager => manager.chain(tokens, options))
    }

    pub(super) fn allocate(
        &self,
        prompt: Prompt,
        options: &RequestOptions<'_>,
    ) -> Result<AnyPagedHandle> {
        Ok(same_for_each!(self, manager => manager.allocate_prompt(prompt, options)?))
    }

    pub(super) fn allocate_many<'a>(
        &self,
        prompts: impl Iterator<Item = (Prompt, RequestOptions<'a>)>,
    ) -> Result<Vec<AnyPagedHandle>> {
        Ok(match self {
            Typed::F32(manager) => typed(manager.allocate_prompts(prompts)?, Typed::F32),
            Typed::F16(manager) => typed(manager.allocate_prompts(prompts)?, Typed::F16),
            Typed::BF16(manager) => typed(manager.allocate_prompts(prompts)?, Typed::BF16),
            Typed::I8(manager) => typed(manager.allocate_prompts(prompts)?, Typed::I8),
        })
    }

    pub(super) fn probe(&self, prompt: Prompt, options: &RequestOptions<'_>) -> Result<usize> {
        each!(self, manager => manager.probe_prompt(prompt, options))
    }

    pub(super) fn extend(
        &self,
        handle: &mut AnyPagedHandle,
        additional: usize,
    ) -> Result<Option<BlockCopy>> {
        own!((self, handle) as (manager, handle) => manager.extend(handle, additional))
    }

    /// Makes room in a block that is there, if nobody else is concerned or uses the books just now; false
    /// if nothing has changed.
    pub(super) fn try_extend(&self, handle: &mut AnyPagedHandle, additional: usize) -> bool {
        match (self, handle) {
            (Typed::F32(m), Typed::F32(h)) => m.try_extend(h, additional),
            (Typed::F16(m), Typed::F16(h)) => m.try_extend(h, additional),
            (Typed::BF16(m), Typed::BF16(h)) => m.try_extend(h, additional),
            (Typed::I8(m), Typed::I8(h)) => m.try_extend(h, additional),
            _ => false,
        }
    }

    /// Commits tokens that fill no block; false if nothing has changed.
    pub(super) fn try_commit(&self, handle: &mut AnyPagedHandle, tokens: &[u32]) -> bool {
        match (self, handle) {
            (Typed::F32(m), Typed::F32(h)) => m.try_commit(h, tokens),
            (Typed::F16(m), Typed::F16(h)) => m.try_commit(h, tokens),
            (Typed::BF16(m), Typed::BF16(h)) => m.try_commit(h, tokens),
            (Typed::I8(m), Typed::I8(h)) => m.try_commit(h, tokens),
            _ => false,
        }
    }

    pub(super) fn truncate(
        &self,
        handle: &mut AnyPagedHandle,
        new_len: usize,
    ) -> Result<Option<BlockCopy>> {
        own!((self, handle) as (manager, handle) => manager.truncate(handle, new_len))
    }

    pub(super) fn fork(
        &self,
        handle: &AnyPagedHandle,
        request_id: Option<&str>,
    ) -> Result<AnyPagedHandle> {
        own_typed!((self, handle) as (manager, handle) => manager.fork(handle, request_id))
    }

    pub(super) fn free(&self, handle: &AnyPagedHandle) -> Result<()> {
        own!((self, handle) as (manager, handle) => manager.free(handle))
    }

    pub(super) fn free_request(&self, request_id: &str) -> Result<()> {
        each!(self, manager => manager.free_request(request_id))
    }

    pub(super) fn write_from(
        &self,
        handle: &mut AnyPagedHandle,
        layer: usize,
        position: usize,
        keys: Values<'_>,
        values: Values<'_>,
    ) -> Result<()> {
        own!((self, handle) as (manager, handle) => {
            manager.write_from(handle, layer, position, keys.source(), values.source())
        })
    }

    pub(super) fn write_many_from(
        &self,
        layer: usize,
        handles: &mut Changing<'_>,
        positions: &[usize],
        keys: Values<'_>,
        values: Values<'_>,
    ) -> Result<()> {
        own_all!((self, handles) as (manager, mut handles) => {
            manager.write_many_from(layer, &mut handles, positions, keys.source(), values.source())
        })
    }

    pub(super) fn prepare_write(
        &self,
        handle: &mut AnyPagedHandle,
        start: usize,
        end: usize,
    ) -> Result<Vec<BlockCopy>> {
        own!((self, handle) as (manager, handle) => manager.prepare_write(handle, start, end))
    }

    pub(super) fn view(
        &self,
        handle: &AnyPagedHandle,
        layer: usize,
        start: usize,
        end: usize,
    ) -> Result<AnyPagedSpan> {
        own_typed!((self, handle) as (manager, handle) => manager.view(handle, layer, start, end))
    }

    pub(super) fn check_readable(
        &self,
        handle: &AnyPagedHandle,
        layer: usize,
        start: usize,
        end: Option<usize>,
    ) -> Result<Range<usize>> {
        own!((self, handle) as (manager, handle) => {
            manager.check_readable(handle, layer, start, end)
        })
    }

    pub(super) fn read_range_to(
        &self,
        handle: &AnyPagedHandle,
        layer: usize,
        range: Range<usize>,
        keys: &mut ValuesMut<'_>,
        values: &mut ValuesMut<'_>,
    ) -> Result<()> {
        own!((self, handle) as (manager, handle) => {
            manager.read_range_to(handle, layer, range, &mut keys.target(), &mut values.target())
        })
    }

    pub(super) fn commit(&self, handle: &mut AnyPagedHandle, tokens: &[u32]) -> Result<()> {
        own!((self, handle) as (manager, handle) => manager.commit(handle, tokens))
    }

    pub(super) fn extend_many(
        &self,
        handles: &mut Changing<'_>,
        is_reported: bool,
        additional: impl Fn(usize) -> usize,
    ) -> Result<Extended> {
        own_all!((self, handles) as (manager, mut handles) => {
            let copies = manager.extend_each(&mut handles, is_reported, &additional)?;
            let mut slots = Vec::with_capacity(handles.len());
            for (index, handle) in handles.iter().enumerate() {
                handle.push_last_slots(additional(index), &mut slots)?;
            }
            Ok(Extended { slots, copies })
        })
    }

    pub(super) fn commit_many<'a>(
        &self,
        handles: &mut Changing<'_>,
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        own_all!((self, handles) as (manager, mut handles) => {
            manager.commit_each(&mut handles, tokens)
        })
    }

    pub(super) fn free_many(&self, handles: &Reading<'_>) -> Result<()> {
        own_all!((self, handles) as (manager, ref handles) => manager.free_many(&handles))
    }

    pub(super) fn block_tables(&self, handles: &Reading<'_>) -> Result<BlockTables> {
        own_all!((self, handles) as (manager, ref handles) => manager.block_tables(&handles))
    }

    /// Of the tokens from `start` on, up to the last if there is no `end`.
    pub(super) fn slot_mappings(
        &self,
        handles: &Reading<'_>,
        start: impl Fn(usize) -> usize,
        end: impl Fn(usize) -> Option<usize>,
    ) -> Result<Vec<usize>> {
        own_all!((self, handles) as (manager, ref handles) => {
            manager.slots_of(&handles, |index, handle| {
                start(index)..end(index).unwrap_or_else(|| handle.num_tokens())
            })
        })
    }

    pub(super) fn num_cached_tokens(&self, handles: &Reading<'_>) -> Result<Vec<usize>> {
        own_all!((self, handles) as (manager, ref handles) => {
            manager.check_usable(&handles)?;
            Ok(handles.iter().map(|handle| handle.num_cached_tokens()).collect())
        })
    }

    pub(super) fn epoch(&self) -> u64 {
        each!(self, manager => manager.epoch())
    }

    pub(super) fn advance_epoch(&self) -> Result<u64> {
        each!(self, manager => manager.advance_epoch())
    }

    pub(super) fn reset_prefix_cache(&self) -> Result<()> {
        each!(self, manager => manager.reset_prefix_cache())
    }

    pub(super) fn stats(&self) -> ManagerStats {
        each!(self, manager => manager.stats())
    }

    pub(super) fn inspect(&self) -> Inspection {
        each!(self, manager => manager.inspect())
    }

    pub(super) fn leak_report(&self) -> LeakReport {
        each!(self, manager => manager.leak_report())
    }

    pub(super) fn check_integrity(&self) -> Result<()> {
        each!(self, manager => manager.check_integrity())
    }
}

/// What all handles have.
impl Deref for AnyPagedHandle {
    type Target = dyn KvCacheHandle;

    fn deref(&self) -> &Self::Target {
        each!(self, handle => handle)
    }
}

impl AnyPagedHandle {
    pub(super) fn num_cached_tokens(&self) -> usize {
        each!(self, handle => handle.num_cached_tokens())
    }

    pub(super) fn num_committed_tokens(&self) -> usize {
        each!(self, handle => handle.num_committed_tokens())
    }

    pub(super) fn tokens(&self) -> &[u32] {
        each!(self, handle => handle.tokens())
    }

    pub(super) fn set_table(&mut self, table: BlockTable) -> Result<()> {
        each!(self, handle => handle.set_table(table))
    }

    pub(super) fn fork(&self, request_id: Option<&str>) -> Result<Self> {
        Ok(same_for_each!(self, handle => handle.fork(request_id)?))
    }

    pub(super) fn close(&self) {
        each!(self, handle => handle.close());
    }
}

/// What all handles have.
impl Deref for AnyContiguousHandle {
    type Target = dyn KvCacheHandle;

    fn deref(&self) -> &Self::Target {
        each!(self, handle => handle)
    }
}

impl AnyContiguousHandle {
    /// `LayersDiffer` also if the caches are not all of one type.
    pub(super) fn new(layers: Vec<AnyLayerKvCache>) -> Result<Self> {
        let Some(first) = layers.first() else {
            return Err(KvError::InvalidConfig { field: "num_layers" });
        };
        macro_rules! all_of {
            ($Type:ident) => {{
                let own = layers.into_iter().enumerate().map(|(layer, cache)| match cache {
                    Typed::$Type(cache) => Ok(cache),
                    _ => Err(KvError::LayersDiffer { layer }),
                });
                ContiguousKvCacheHandle::new(own.collect::<Result<_>>()?).map(Typed::$Type)
            }};
        }
        match first {
            Typed::F32(_) => all_of!(F32),
            Typed::F16(_) => all_of!(F16),
            Typed::BF16(_) => all_of!(BF16),
            Typed::I8(_) => all_of!(I8),
        }
    }

    pub(super) fn append_from(
        &mut self,
        layer: usize,
        keys: Values<'_>,
        values: Values<'_>,
    ) -> Result<Range<usize>> {
        each!(self, handle => handle.append_from(layer, keys.source(), values.source()))
    }

    pub(super) fn layer(&self, layer: usize) -> Result<AnyLayerKvCache> {
        Ok(same_for_each!(self, handle => handle.layer(layer)?.clone()))
    }

    pub(super) fn current_table(&self) -> BlockTable {
        each!(self, handle => handle.current_table())
    }

    pub(super) fn share(&self) -> Result<Self> {
        Ok(same_for_each!(self, handle => handle.share()?))
    }

    pub(super) fn close(&mut self) {
        each!(self, handle => handle.close());
    }
}
