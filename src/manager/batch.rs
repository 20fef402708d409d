//! Calls for many sequences: one step, and all of it or nothing.

use std::ops::{Deref, DerefMut, Range};

use super::{KeyedRequest, KvCacheManager, Prompt, RequestOptions};
use crate::block::BlockTable;
use crate::dtype::Element;
use crate::error::Result;
use crate::handle::{KvCacheHandle, PagedKvCacheHandle, check_count, in_batch};
use crate::store::{BlockCopy, Copies};

/// The block tables of many sequences, as kernels want them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTables {
    /// Block ids, `[sequences, width]` in C order; 0, the null block, where a sequence has no more.
    pub blocks: Vec<u32>,
    /// Blocks of the sequence that has most.
    pub width: usize,
}

/// # Many sequences in one call
///
/// A call does what the calls for one sequence would do one after the other, in one step that nobody
/// sees half of; if one of them would fail then nothing happens at all. An error about one sequence
/// that does not say itself about which one is a [`BatchEntry`](crate::KvError::BatchEntry).
///
/// Handles can be given as `&mut` references, or as guards of locks around them.
impl<T: Element> KvCacheManager<T> {
    /// Starts many sequences; see [`allocate`](Self::allocate).
    ///
    /// What is cached of any of them is held before the new blocks of all are taken. So they get all of
    /// what [`probe`](Self::probe) said before, which those that are started one after the other can
    /// lose to each other.
    ///
    /// # Errors
    ///
    /// [`KvError::OutOfBlocks`](crate::KvError::OutOfBlocks) if there are too few for all; [`KvError::RequestExists`](crate::KvError::RequestExists) if a name is
    /// taken, [`KvError::DuplicateRequest`](crate::KvError::DuplicateRequest) if it is there twice; [`KvError::TooLarge`](crate::KvError::TooLarge) as in [`allocate`](Self::allocate).
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KvCacheManager, KvCacheManagerConfig, RequestOptions};
    ///
    /// let manager = KvCacheManager::new(KvCacheManagerConfig::default())?;
    /// let options = RequestOptions::default();
    /// let mut handles = manager.allocate_many(&[(&[1; 20], options), (&[2; 3], options)])?;
    ///
    /// let mut batch = handles.iter_mut().collect::<Vec<_>>();
    /// manager.extend_many(&mut batch, &[1, 1])?;
    /// assert_eq!(manager.slot_mappings(&batch, &[20..21, 3..4])?, [2 * 16 + 4, 3 * 16 + 3]);
    /// assert_eq!(manager.block_tables(&batch)?.blocks, [1, 2, 3, 0]);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn allocate_many(
        &self,
        requests: &[(&[u32], RequestOptions<'_>)],
    ) -> Result<Vec<PagedKvCacheHandle<T>>> {
        let prompts =
            requests.iter().map(|&(tokens, options)| (Prompt::Tokens(tokens.to_vec()), options));
        self.allocate_prompts(prompts)
    }

    pub(crate) fn allocate_prompts<'a>(
        &self,
        prompts: impl Iterator<Item = (Prompt, RequestOptions<'a>)>,
    ) -> Result<Vec<PagedKvCacheHandle<T>>> {
        let sequences = prompts.enumerate().map(|(index, (prompt, options))| {
            self.new_sequence(prompt, &options).map_err(|error| in_batch(index, error))
        });
        PagedKvCacheHandle::open(&self.store, sequences.collect::<Result<_>>()?)
    }

    /// Starts many sequences whose keys are known; see [`allocate_keyed`](Self::allocate_keyed).
    ///
    /// # Errors
    ///
    /// Those of [`allocate_many`](Self::allocate_many); [`KvError::BlockSizeMismatch`](crate::KvError::BlockSizeMismatch).
    pub fn allocate_many_keyed(
        &self,
        requests: Vec<KeyedRequest<'_>>,
    ) -> Result<Vec<PagedKvCacheHandle<T>>> {
        let sequences = requests
            .into_iter()
            .enumerate()
            .map(|(index, request)| self.keyed(request).map_err(|error| in_batch(index, error)));
        PagedKvCacheHandle::open(&self.store, sequences.collect::<Result<_>>()?)
    }

    /// Makes room for `additional` tokens at the end of each sequence; see [`extend`](Self::extend).
    ///
    /// Returns the blocks that were copied, with the place of the sequence in `handles`.
    ///
    /// # Errors
    ///
    /// [`KvError::CountMismatch`](crate::KvError::CountMismatch); [`KvError::OutOfBlocks`](crate::KvError::OutOfBlocks) if there are too few for all.
    pub fn extend_many(
        &self,
        handles: &mut [impl DerefMut<Target = PagedKvCacheHandle<T>>],
        additional: &[usize],
    ) -> Result<Vec<(usize, BlockCopy)>> {
        check_count("numbers of tokens", additional.len(), handles.len())?;
        let (handles, additional) = (&mut all(handles), |index: usize| additional[index]);
        PagedKvCacheHandle::extend_many(&self.store, handles, Copies::Made, additional)
    }

    /// The same; without storage it fails if blocks have to be copied, unless that `is_reported`.
    #[cfg(feature = "python")]
    pub(crate) fn extend_each(
        &self,
        handles: &mut [&mut PagedKvCacheHandle<T>],
        is_reported: bool,
        additional: impl Fn(usize) -> usize,
    ) -> Result<Vec<(usize, BlockCopy)>> {
        let copies = if is_reported { Copies::Made } else { self.store.unreported_copies() };
        PagedKvCacheHandle::extend_many(&self.store, handles, copies, additional)
    }

    /// Makes room in a block that is there, if nobody else is concerned or uses the books just now; false
    /// if nothing has changed.
    #[cfg(feature = "python")]
    pub(crate) fn try_extend(&self, handle: &mut PagedKvCacheHandle<T>, additional: usize) -> bool {
        self.store.try_look().is_some_and(|look| handle.extend_inside(&look, additional))
    }

    /// Commits tokens that fill no block; false if nothing has changed.
    #[cfg(feature = "python")]
    pub(crate) fn try_commit(&self, handle: &mut PagedKvCacheHandle<T>, tokens: &[u32]) -> bool {
        handle.commit_inside(&self.store, tokens)
    }

    /// Commits tokens of each sequence; see [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// [`KvError::CountMismatch`](crate::KvError::CountMismatch), and those of [`commit`](Self::commit). That of
    /// [`KvError::WrongBlockState`](crate::KvError::WrongBlockState) includes that two of the sequences share a block and commit it with
    /// different tokens.
    pub fn commit_many(
        &self,
        handles: &mut [impl DerefMut<Target = PagedKvCacheHandle<T>>],
        tokens: &[&[u32]],
    ) -> Result<()> {
        check_count("lists of tokens", tokens.len(), handles.len())?;
        self.commit_each(&mut all(handles), |index| tokens[index])
    }

    pub(crate) fn commit_each<'a>(
        &self,
        handles: &mut [&mut PagedKvCacheHandle<T>],
        tokens: impl Fn(usize) -> &'a [u32],
    ) -> Result<()> {
        PagedKvCacheHandle::commit_many(&self.store, handles, tokens)
    }

    /// Gives the blocks of many sequences back; see [`free`](Self::free).
    ///
    /// # Locking
    ///
    /// Waits for calls that are using one of them, which they can not be in Rust unless a handle is
    /// shared.
    ///
    /// # Errors
    ///
    /// [`KvError::DuplicateHandle`](crate::KvError::DuplicateHandle) if a handle is there twice.
    pub fn free_many(&self, handles: &[impl Deref<Target = PagedKvCacheHandle<T>>]) -> Result<()> {
        let handles = handles.iter().map(|handle| &**handle).collect::<Vec<_>>();
        PagedKvCacheHandle::free_many(&self.store, &handles)
    }

    /// Returns which blocks each sequence has, those of a lookahead included.
    ///
    /// Ask again after a [commit](Self::commit), which may give a full block back for an equal one,
    /// unless [duplicates](crate::KvCacheManagerConfig::duplicates) are kept, and after a
    /// [write](Self::write) or [`prepare_write`](Self::prepare_write), which may copy a block.
    ///
    /// # Errors
    ///
    /// Those of the [manager](Self).
    pub fn block_tables(
        &self,
        handles: &[impl Deref<Target = PagedKvCacheHandle<T>>],
    ) -> Result<BlockTables> {
        self.check_usable(handles)?;
        let tables = handles.iter().map(|handle| handle.block_table());
        let width = tables.clone().map(BlockTable::num_blocks).max().unwrap_or(0);
        let mut blocks = Vec::with_capacity(handles.len() * width);
        for table in tables {
            blocks.extend_from_slice(&table.logical_to_physical);
            blocks.resize(blocks.len() + width - table.num_blocks(), 0);
        }
        Ok(BlockTables { blocks, width })
    }

    /// Returns the slots of tokens of each sequence, in one list; see
    /// [`BlockTable::slot_mapping`](crate::BlockTable::slot_mapping).
    ///
    /// # Errors
    ///
    /// [`KvError::CountMismatch`](crate::KvError::CountMismatch), [`KvError::InvertedRange`](crate::KvError::InvertedRange); [`KvError::RangeOutOfBounds`](crate::KvError::RangeOutOfBounds) past the
    /// length of a sequence.
    pub fn slot_mappings(
        &self,
        handles: &[impl Deref<Target = PagedKvCacheHandle<T>>],
        ranges: &[Range<usize>],
    ) -> Result<Vec<usize>> {
        check_count("ranges", ranges.len(), handles.len())?;
        self.slots_of(handles, |index, _| ranges[index].clone())
    }

    pub(crate) fn slots_of(
        &self,
        handles: &[impl Deref<Target = PagedKvCacheHandle<T>>],
        range: impl Fn(usize, &PagedKvCacheHandle<T>) -> Range<usize>,
    ) -> Result<Vec<usize>> {
        self.check_usable(handles)?;
        let mut slots = Vec::with_capacity(handles.len());
        for (index, handle) in handles.iter().enumerate() {
            let pushed = handle.push_slots(range(index, handle), &mut slots);
            pushed.map_err(|error| in_batch(index, error))?;
        }
        Ok(slots)
    }

    /// Checks that all handles are the manager's, open, and have tables that can be believed.
    pub(crate) fn check_usable(
        &self,
        handles: &[impl Deref<Target = PagedKvCacheHandle<T>>],
    ) -> Result<()> {
        handles.iter().enumerate().try_for_each(|(index, handle)| {
            self.check(handle)?;
            handle.check_usable().map_err(|error| in_batch(index, error))
        })
    }
}

/// The handles behind whatever refers to them. What does so is a caller's code, which must not run under
/// a lock, and is asked only once.
fn all<T: Element>(
    handles: &mut [impl DerefMut<Target = PagedKvCacheHandle<T>>],
) -> Vec<&mut PagedKvCacheHandle<T>> {
    handles.iter_mut().map(|handle| &mut **handle).collect()
}
