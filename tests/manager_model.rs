//! Random sequences of calls on a manager and on a naive model of it. What each call answers is
//! compared, and after each call everything that can be asked, and all content.

mod common {
    pub(crate) mod books;
    pub(crate) mod sequences;
}

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::slice;

use common::books::{Books, Copy, Name, NewSequence};
use common::sequences::{BLOCK_SIZE, NUM_LAYERS, config, keys, numbers_of, read, values, write};
use kvspan::{
    BlockCopy, BlockId, BlockKey, BlockTables, Duplicates, KvCacheHandle, KvCacheManager,
    KvCacheManagerConfig, KvError, PagedKvCacheHandle, PagedSpan, RequestOptions, Result, Storage,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, FileFailurePersistence};

const NUM_BLOCKS: usize = 9;
const SALTS: [Option<&str>; 4] = [None, None, Some("a"), Some("")];
const LORAS: [Option<&str>; 3] = [None, None, Some("a")];
const NAMES: [&str; 3] = ["one", "two", "three"];

type ExtraKeys = &'static [(usize, &'static [&'static [u8]])];
const EXTRA_KEYS: [ExtraKeys; 6] = [
    &[],
    &[],
    &[(0, &[b"cat"])],
    &[(1, &[b"cat"])],
    &[(1, &[b"cat", b"dog"]), (3, &[b"dog"])],
    &[(2, &[b"", b""])],
];

/// What a request is, besides its tokens.
#[derive(Clone, Copy, Debug)]
struct Kind {
    salt: Option<&'static str>,
    lora: Option<&'static str>,
    extra_keys: ExtraKeys,
    request_id: Option<&'static str>,
    lookahead: usize,
}

impl Kind {
    fn options(&self) -> RequestOptions<'static> {
        RequestOptions {
            request_id: self.request_id,
            cache_salt: self.salt.map(str::as_bytes),
            lora_id: self.lora.map(str::as_bytes),
            extra_keys: self.extra_keys,
            lookahead: self.lookahead,
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate(Vec<u32>, Kind),
    AllocateMany(Vec<(Vec<u32>, Kind)>),
    AdvanceEpoch,
    Fork(Index, Option<&'static str>),
    Extend(Index, usize),
    /// All sequences that the bits choose, likewise below.
    ExtendMany {
        sequences: u8,
        additional: [usize; 8],
    },
    Truncate(Index, Index),
    Write {
        sequence: Index,
        layer: usize,
        start: Index,
        count: usize,
    },
    /// One row of each of them that has tokens.
    WriteMany {
        layer: usize,
        position: Index,
        sequences: u8,
    },
    PrepareWrite {
        sequence: Index,
        start: Index,
        count: usize,
    },
    /// Commits some tokens: those that are known, and then others. Perhaps one of them is wrong.
    Commit {
        sequence: Index,
        count: usize,
        others: [u32; 8],
        wrong: Option<Index>,
    },
    CommitMany {
        sequences: u8,
        counts: [usize; 8],
        others: [u32; 8],
    },
    /// Writes all rows that are not committed, and commits them.
    Compute(Index),
    Free(Index),
    FreeByName(&'static str),
    FreeMany {
        sequences: u8,
        twice: bool,
    },
    AskMany {
        sequences: u8,
        start: Index,
    },
    Close(Index),
    Drop(Index),
    View {
        sequence: Index,
        layer: usize,
        start: Index,
        len: usize,
    },
    DropView(Index),
    EditLength(Index, usize),
    EditBlocks(Index),
    Reset,
    UseStale(Index, usize),
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few different tokens, so that beginnings are often equal.
    let tokens = |len| vec(0_u32..2, len);
    let index = any::<Index>;
    let layer = || 0..NUM_LAYERS;
    let name = || option::weighted(0.3, select(&NAMES[..]));
    let kind = (
        select(&SALTS[..]),
        select(&LORAS[..]),
        prop_oneof![2 => Just(EXTRA_KEYS[0]), 1 => select(&EXTRA_KEYS[..])],
        name(),
        prop_oneof![2 => Just(0), 1 => 0_usize..7],
    );
    let kind = kind.prop_map(|(salt, lora, extra_keys, request_id, lookahead)| Kind {
        salt,
        lora,
        extra_keys,
        request_id,
        lookahead,
    });
    let others = || prop::array::uniform8(0_u32..2);
    prop_oneof![
        8 => (tokens(0..18), kind.clone()).prop_map(|(tokens, kind)| Op::Allocate(tokens, kind)),
        3 => vec((tokens(0..14), kind), 0..4).prop_map(Op::AllocateMany),
        1 => Just(Op::AdvanceEpoch),
        4 => (index(), name()).prop_map(|(sequence, name)| Op::Fork(sequence, name)),
        5 => (index(), 0_usize..7).prop_map(|(sequence, count)| Op::Extend(sequence, count)),
        4 => (any::<u8>(), prop::array::uniform8(0_usize..5)).prop_map(
            |(sequences, additional)| Op::ExtendMany { sequences, additional }
        ),
        4 => (index(), index()).prop_map(|(sequence, len)| Op::Truncate(sequence, len)),
        8 => (index(), layer(), index(), 0_usize..7).prop_map(
            |(sequence, layer, start, count)| Op::Write { sequence, layer, start, count }
        ),
        3 => (layer(), index(), any::<u8>()).prop_map(
            |(layer, position, sequences)| Op::WriteMany { layer, position, sequences }
        ),
        3 => (index(), index(), 0_usize..7).prop_map(
            |(sequence, start, count)| Op::PrepareWrite { sequence, start, count }
        ),
        4 => (any::<u8>(), prop::array::uniform8(0_usize..6), others()).prop_map(
            |(sequences, counts, others)| Op::CommitMany { sequences, counts, others }
        ),
        6 => (index(), 0_usize..9, others(), option::weighted(0.1, index())).prop_map(
            |(sequence, count, others, wrong)| Op::Commit { sequence, count, others, wrong }
        ),
        8 => index().prop_map(Op::Compute),
        2 => index().prop_map(Op::Free),
        1 => select(&NAMES[..]).prop_map(Op::FreeByName),
        1 => (any::<u8>(), any::<u8>(), option::weighted(0.1, Just(()))).prop_map(
            |(some, of_them, twice)| {
                Op::FreeMany { sequences: some & of_them, twice: twice.is_some() }
            }
        ),
        2 => (any::<u8>(), index()).prop_map(|(sequences, start)| Op::AskMany { sequences, start }),
        1 => index().prop_map(Op::Close),
        1 => index().prop_map(Op::Drop),
        5 => (index(), layer(), index(), 0_usize..10).prop_map(
            |(sequence, layer, start, len)| Op::View { sequence, layer, start, len }
        ),
        5 => index().prop_map(Op::DropView),
        1 => (index(), 0_usize..20).prop_map(|(sequence, len)| Op::EditLength(sequence, len)),
        1 => index().prop_map(Op::EditBlocks),
        1 => Just(Op::Reset),
        1 => (index(), 0_usize..13).prop_map(|(stale, way)| Op::UseStale(stale, way)),
    ]
}

struct World {
    manager: KvCacheManager,
    books: Books,
    /// In the order of the model's sequences and views.
    handles: Vec<PagedKvCacheHandle>,
    views: Vec<PagedSpan>,
    stale: Vec<PagedKvCacheHandle>,
    keys: BTreeMap<Name, BlockKey>,
    last_number: u16,
}

fn number(block: BlockId) -> usize {
    block.get().try_into().expect("a small number")
}

fn numbers(blocks: &[BlockId]) -> Vec<usize> {
    blocks.iter().copied().map(number).collect()
}

fn copy(copy: Option<BlockCopy>) -> Option<Copy> {
    copy.map(|copy| (copy.block_index, number(copy.from), number(copy.to)))
}

impl World {
    fn new(config: KvCacheManagerConfig) -> Self {
        let books = Books::new(config.num_blocks, config.duplicates, config.prefix_caching);
        let manager = KvCacheManager::new(config).expect("a small pool");
        let (handles, views, stale, keys) = Default::default();
        Self { manager, books, handles, views, stale, keys, last_number: 0 }
    }

    fn has_storage(&self) -> bool {
        self.manager.config().storage == Storage::Owned
    }

    fn at(&self, index: Index) -> Option<usize> {
        (!self.handles.is_empty()).then(|| index.index(self.handles.len()))
    }

    fn new_numbers(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.last_number += 1;
            f32::from(self.last_number)
        };
        (0..count).map(|_| next()).collect()
    }

    #[expect(clippy::too_many_lines, reason = "a few lines for each of many operations")]
    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Allocate(ref tokens, kind) => self.allocate(tokens, kind),
            Op::AllocateMany(ref requests) => self.allocate_many(requests),
            Op::AdvanceEpoch => {
                self.books.epoch += 1;
                assert_eq!(self.manager.advance_epoch(), Ok(self.books.epoch));
            }
            Op::Fork(sequence, name) => {
                let Some(at) = self.at(sequence) else { return };
                let forked = self.manager.fork(&self.handles[at], name);
                let expected = self.books.fork(at, name);
                assert_eq!(forked.map(|fork| self.handles.push(fork)), expected);
            }
            Op::Extend(sequence, count) => {
                let Some(at) = self.at(sequence) else { return };
                let found = self.manager.extend(&mut self.handles[at], count);
                let expected = self.books.extend(&[(at, count)]);
                let expected = expected.map(|copies| copies.first().map(|&(_, copy)| copy));
                assert_eq!(found.map(copy), expected);
            }
            Op::ExtendMany { sequences, additional } => self.extend_many(sequences, additional),
            Op::Truncate(sequence, len) => {
                let Some(at) = self.at(sequence) else { return };
                // Sometimes one too many.
                let len = len.index(self.books.sequences[at].len() + 2);
                let found = self.manager.truncate(&mut self.handles[at], len);
                assert_eq!(found.map(copy), self.books.truncate(at, len));
            }
            Op::Write { sequence, layer, start, count } => {
                let Some(at) = self.at(sequence).filter(|_| self.has_storage()) else { return };
                let start = start.index(self.books.sequences[at].len() + 1);
                let numbers = self.new_numbers(count);
                let found = write(&self.manager, &mut self.handles[at], layer, start, &numbers);
                assert_eq!(found, self.books.write(layer, &[(at, start, &numbers)]));
            }
            Op::WriteMany { layer, position, sequences } => {
                if self.has_storage() {
                    self.write_many(layer, position, sequences);
                }
            }
            Op::PrepareWrite { sequence, start, count } => {
                let Some(at) = self.at(sequence) else { return };
                let start = start.index(self.books.sequences[at].len() + 1);
                let range = start..start + count;
                let found = self.manager.prepare_write(&mut self.handles[at], start, range.end);
                let found =
                    found.map(|copies| copies.into_iter().filter_map(|one| copy(Some(one))));
                assert_eq!(found.map(Vec::from_iter), self.books.prepare_write(at, range));
            }
            Op::Commit { sequence, count, others, wrong } => {
                let Some(at) = self.at(sequence) else { return };
                let sequence = &self.books.sequences[at];
                let known = sequence.name.tokens.iter().skip(sequence.committed);
                let tokens = known.copied().chain(others).take(count);
                let mut tokens = tokens.collect::<Vec<_>>();
                if let Some(wrong) = wrong.filter(|_| !tokens.is_empty()) {
                    tokens[wrong.index(count)] ^= 1;
                }
                self.commit(at, tokens);
            }
            Op::CommitMany { sequences, counts, others } => {
                self.commit_many(sequences, counts, others);
            }
            Op::Compute(sequence) => {
                let Some(at) = self.at(sequence) else { return };
                let start = self.books.sequences[at].committed;
                let len = self.books.sequences[at].len();
                let num_layers = if self.has_storage() { NUM_LAYERS } else { 0 };
                for layer in 0..num_layers {
                    let numbers = self.new_numbers(len - start);
                    let found = write(&self.manager, &mut self.handles[at], layer, start, &numbers);
                    let expected = self.books.write(layer, &[(at, start, &numbers)]);
                    let refused = expected.is_err();
                    assert_eq!(found, expected);
                    if refused {
                        return;
                    }
                }
                let mut tokens = self.books.sequences[at].name.tokens.clone();
                tokens.resize(len, 0);
                let start = self.books.sequences[at].committed;
                self.commit(at, tokens.split_off(start));
            }
            Op::Free(sequence) => {
                let Some(at) = self.at(sequence) else { return };
                assert_eq!(self.manager.free(&self.handles[at]), Ok(()));
                self.forget(at);
            }
            Op::FreeByName(name) => {
                let named = |at: &usize| self.books.sequences[*at].request_id == Some(name);
                let at = (0..self.handles.len()).find(named);
                let unknown = KvError::UnknownRequest { request_id: name.to_owned() };
                let expected = at.map(|at| self.forget(at)).ok_or(unknown);
                assert_eq!(self.manager.free_request(name), expected);
            }
            Op::FreeMany { sequences, twice } => self.free_many(sequences, twice),
            Op::AskMany { sequences, start } => self.ask_many(sequences, start),
            Op::Close(sequence) => {
                let Some(at) = self.at(sequence) else { return };
                self.handles[at].close();
                self.forget(at);
                self.stale.iter().for_each(PagedKvCacheHandle::close);
            }
            Op::Drop(sequence) => {
                let Some(at) = self.at(sequence) else { return };
                self.forget(at);
                self.stale.pop();
            }
            Op::View { sequence, layer, start, len } => {
                let Some(at) = self.at(sequence).filter(|_| self.has_storage()) else { return };
                let start = start.index(self.books.sequences[at].len() + 1);
                let viewed = self.manager.view(&self.handles[at], layer, start, start + len);
                let expected = self.books.view(at, layer, start..start + len);
                assert_eq!(viewed.map(|view| self.views.push(view)), expected);
            }
            Op::DropView(view) => {
                if !self.views.is_empty() {
                    let at = view.index(self.views.len());
                    drop(self.views.remove(at));
                    self.books.drop_view(at);
                }
            }
            Op::EditLength(sequence, len) => {
                let Some(at) = self.at(sequence) else { return };
                let before = self.books.sequences[at].len();
                let capacity = self.books.sequences[at].blocks.len() * BLOCK_SIZE;
                self.handles[at].block_table_mut().sequence_length = len;
                let found = self.manager.extend(&mut self.handles[at], 0);
                let expected = if len > capacity {
                    let reason = "it has more tokens than its blocks can hold";
                    Err(KvError::InconsistentTable { reason })
                } else {
                    self.books.edit_length(at, len, self.has_storage()).map(|()| None)
                };
                if expected.is_err() {
                    self.handles[at].block_table_mut().sequence_length = before;
                    assert_eq!(self.manager.extend(&mut self.handles[at], 0), Ok(None));
                }
                assert_eq!(found.map(copy), expected);
            }
            Op::EditBlocks(sequence) => {
                let Some(at) = self.at(sequence) else { return };
                let kept = self.handles[at].block_table().clone();
                self.handles[at].block_table_mut().physical_blocks.reverse();
                self.handles[at].block_table_mut().logical_to_physical.reverse();
                let result = self.manager.extend(&mut self.handles[at], 0);
                let refused = matches!(result, Err(KvError::InconsistentTable { .. }));
                assert_eq!(refused, kept.num_blocks() > 1);
                *self.handles[at].block_table_mut() = kept;
                assert_eq!(self.manager.extend(&mut self.handles[at], 0), Ok(None));
            }
            Op::Reset => assert_eq!(self.manager.reset_prefix_cache(), self.books.reset()),
            Op::UseStale(stale, way) => {
                if !self.stale.is_empty() {
                    let at = stale.index(self.stale.len());
                    self.use_stale(at, way);
                }
            }
        }
    }

    fn allocate(&mut self, tokens: &[u32], kind: Kind) {
        let options = kind.options();
        let probed = self.manager.probe(tokens, &options);
        let allocated = self.manager.allocate(tokens, &options);
        if let Ok(handle) = &allocated {
            assert!(handle.num_cached_tokens() < tokens.len() || tokens.is_empty());
            assert_eq!(probed, Ok(handle.num_cached_tokens()));
        }
        self.started(&[(tokens.to_vec(), kind)], allocated.map(|handle| vec![handle]));
    }

    fn allocate_many(&mut self, requests: &[(Vec<u32>, Kind)]) {
        let given = requests.iter().map(|(tokens, kind)| (&**tokens, kind.options()));
        let allocated = self.manager.allocate_many(&given.collect::<Vec<_>>());
        self.started(requests, allocated);
    }

    /// Checks what allocations came to.
    fn started(
        &mut self,
        requests: &[(Vec<u32>, Kind)],
        allocated: Result<Vec<PagedKvCacheHandle>>,
    ) {
        if self.books.duplicates == Duplicates::Keep
            && matches!(allocated, Err(KvError::OutOfBlocks { .. }))
        {
            // Whether there was room depends on which of two equal blocks would have hit.
            self.books.counts.num_failures +=
                u64::try_from(requests.len()).expect("a small number");
            return;
        }
        let epoch = self.books.epoch;
        let requests = requests.iter().enumerate().map(|(place, (tokens, kind))| {
            let Kind { salt, lora, extra_keys, request_id, lookahead } = *kind;
            let handle = allocated.as_ref().ok().and_then(|handles| handles.get(place));
            let found = handle.map(|handle| numbers(&handle.block_table().physical_blocks));
            let tokens = tokens.clone();
            NewSequence {
                request_id,
                name: Name { epoch, salt, lora, tokens, extra_keys: Vec::new() },
                extra_keys: extra_keys
                    .iter()
                    .map(|&(index, keys)| (index, keys.to_vec()))
                    .collect(),
                lookahead,
                found: found.unwrap_or_default(),
            }
        });
        let expected = self.books.allocate(requests.collect());
        assert_eq!(allocated.map(|handles| self.handles.extend(handles)), expected);
    }

    /// The sequences that the bits choose.
    fn chosen(&self, sequences: u8) -> Vec<usize> {
        (0..self.handles.len()).filter(|at| sequences >> (at % 8) & 1 == 1).collect()
    }

    fn handles_at(&mut self, places: &[usize]) -> Vec<&mut PagedKvCacheHandle> {
        let handles = self.handles.iter_mut().enumerate();
        let chosen = handles.filter(|(at, _)| places.contains(at));
        chosen.map(|(_, handle)| handle).collect()
    }

    fn extend_many(&mut self, sequences: u8, additional: [usize; 8]) {
        let (chosen, manager) = (self.chosen(sequences), self.manager.clone());
        let counts = chosen.iter().map(|at| additional[at % 8]).collect::<Vec<_>>();
        let found = manager.extend_many(&mut self.handles_at(&chosen), &counts);
        let copies = found.map(|copies| {
            let copies = copies.into_iter().map(|(place, one)| (chosen[place], copy(Some(one))));
            copies.map(|(at, copy)| copy.map(|copy| (at, copy))).collect::<Option<Vec<_>>>()
        });
        let grown = chosen.iter().copied().zip(counts).collect::<Vec<_>>();
        assert_eq!(copies, self.books.extend(&grown).map(Some));
    }

    fn commit(&mut self, at: usize, tokens: Vec<u32>) {
        let found = self.manager.commit(&mut self.handles[at], &tokens);
        let expected = self.books.commit(&[(at, tokens)]);
        assert_eq!(found, expected.map_err(|(_, error)| error));
    }

    fn commit_many(&mut self, sequences: u8, counts: [usize; 8], others: [u32; 8]) {
        let (chosen, manager) = (self.chosen(sequences), self.manager.clone());
        let commits = chosen.iter().map(|&at| {
            let sequence = &self.books.sequences[at];
            let known = sequence.name.tokens.iter().skip(sequence.committed).copied();
            (at, known.chain(others).take(counts[at % 8]).collect::<Vec<_>>())
        });
        let commits = commits.collect::<Vec<_>>();
        let tokens = commits.iter().map(|(_, tokens)| &**tokens).collect::<Vec<_>>();
        let found = manager.commit_many(&mut self.handles_at(&chosen), &tokens);
        let expected = self.books.commit(&commits).map_err(|(index, error)| match error {
            // It names the block.
            KvError::WrongBlockState { .. } => error,
            error => KvError::BatchEntry { index, source: Box::new(error) },
        });
        assert_eq!(found, expected);
    }

    fn free_many(&mut self, sequences: u8, twice: bool) {
        let (chosen, manager) = (self.chosen(sequences), self.manager.clone());
        let mut handles = chosen.iter().map(|&at| &self.handles[at]).collect::<Vec<_>>();
        if let (Some(&first), true) = (handles.first(), twice) {
            let cache_id = first.cache_id();
            handles.push(first);
            let found = manager.free_many(&handles);
            assert_eq!(found, Err(KvError::DuplicateHandle { cache_id }));
            return;
        }
        assert_eq!(manager.free_many(&handles), Ok(()));
        for (gone, at) in chosen.into_iter().enumerate() {
            self.forget(at - gone);
        }
    }

    fn ask_many(&mut self, sequences: u8, start: Index) {
        let (chosen, manager) = (self.chosen(sequences), self.manager.clone());
        let handles = self.handles_at(&chosen);
        let tables = manager.block_tables(&handles).expect("they are alive");
        let lens = handles.iter().map(|handle| handle.num_tokens());
        let ranges = lens.map(|len| start.index(len + 1)..len).collect::<Vec<_>>();
        let slots = manager.slot_mappings(&handles, &ranges).expect("they have these tokens");

        let sequences = chosen.iter().map(|&at| &self.books.sequences[at]);
        let width = sequences.clone().map(|sequence| sequence.blocks.len()).max().unwrap_or(0);
        let padded = sequences.clone().flat_map(|sequence| {
            let blocks = sequence.blocks.iter().map(|&block| u32::try_from(block));
            blocks.chain(std::iter::repeat(Ok(0))).take(width)
        });
        let padded = padded.collect::<std::result::Result<_, _>>().expect("small numbers");
        assert_eq!(tables, BlockTables { blocks: padded, width });
        let expected = sequences.zip(ranges).flat_map(|(sequence, range)| {
            let slot = |at| sequence.blocks[at / BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE;
            range.map(slot)
        });
        assert_eq!(slots, expected.collect::<Vec<_>>());
    }

    fn write_many(&mut self, layer: usize, position: Index, sequences: u8) {
        let lens =
            self.chosen(sequences).into_iter().map(|at| (at, self.books.sequences[at].len()));
        let places = lens.filter(|&(_, len)| len > 0);
        let places = places.map(|(at, len)| (at, position.index(len))).collect::<Vec<_>>();
        let numbers = self.new_numbers(places.len());
        let (chosen, positions): (Vec<_>, Vec<_>) = places.iter().copied().unzip();
        let (keys, values, manager) = (keys(&numbers), values(&numbers), self.manager.clone());
        let mut handles = self.handles_at(&chosen);
        let found = manager.write_many(layer, &mut handles, &positions, &keys, &values);
        let rows = places.iter().zip(numbers.chunks(1));
        let writes = rows.map(|(&(at, position), number)| (at, position, number));
        assert_eq!(found, self.books.write(layer, &writes.collect::<Vec<_>>()));
    }

    /// The sequence is freed: its handle is of no use any more.
    fn forget(&mut self, at: usize) {
        self.books.free(at);
        self.stale.push(self.handles.remove(at));
    }

    fn use_stale(&mut self, at: usize, way: usize) {
        let (manager, handle) = (&self.manager, &mut self.stale[at]);
        let cache_id = handle.cache_id();
        assert!(!handle.is_valid());
        let result = match way {
            0 => manager.extend(handle, 1).map(drop),
            1 => manager.truncate(handle, 0).map(drop),
            2 => manager.fork(handle, None).map(drop),
            3 => manager.free(handle),
            4 => manager.commit(handle, &[0]),
            5 => handle.clone_handle().map(drop),
            8 => manager.extend_many(&mut [handle], &[1]).map(drop),
            9 => manager.commit_many(&mut [handle], &[&[0]]),
            10 => manager.free_many(&[handle]),
            11 => manager.block_tables(&[handle]).map(drop),
            12 => manager.slot_mappings(&[handle], slice::from_ref(&(0..0))).map(drop),
            6 if self.manager.config().storage == Storage::Owned => {
                write(manager, handle, 0, 0, &[1.0])
            }
            _ => manager.view(handle, 0, 0, 0).map(drop),
        };
        assert_eq!(result, Err(KvError::StaleHandle { cache_id }));
    }

    fn check(&mut self) {
        self.manager.check_integrity().expect("nothing is lost");
        let stats = self.manager.stats();
        assert_eq!(stats, self.books.stats(stats.block_bytes));
        self.check_blocks();
        self.check_report();
        for at in 0..self.handles.len() {
            self.check_sequence(at);
        }
        for (view, expected) in self.views.iter().zip(&self.books.views) {
            assert_eq!(numbers_of(view), expected.numbers, "a view changed");
        }
    }

    fn check_blocks(&mut self) {
        let found = self.manager.inspect();
        assert_eq!(numbers(&found.free_queue), self.books.queue);
        assert_eq!(found.blocks.len(), self.books.blocks.len());
        for (found, expected) in found.blocks.iter().zip(&self.books.blocks) {
            let counts = (found.state, found.reference_count, found.pin_count);
            assert_eq!(counts, (expected.state(), expected.holders, expected.pins), "{found:?}");
            let named = expected.named.as_ref();
            assert_eq!(found.key.is_some(), named.is_some(), "{found:?} is {named:?}");
            if let (Some(key), Some((name, _))) = (found.key, named) {
                // One name has one key, and no other has the same.
                assert_eq!(*self.keys.entry(name.clone()).or_insert(key), key, "of {name:?}");
                let others = self.keys.iter().filter(|(other, _)| *other != name);
                assert!(others.clone().all(|(_, other)| *other != key), "of {name:?}");
            }
        }
    }

    fn check_report(&self) {
        let report = self.manager.leak_report();
        let found = report.sequences.iter().map(|sequence| {
            (&*sequence.cache_id, sequence.request_id.as_deref(), numbers(&sequence.blocks))
        });
        let ids = self.handles.iter().map(KvCacheHandle::cache_id).collect::<Vec<_>>();
        let expected = ids
            .iter()
            .zip(&self.books.sequences)
            .map(|(id, sequence)| (&**id, sequence.request_id, sequence.blocks.clone()));
        assert!(found.clone().eq(expected.clone()), "{report:?}");
        let pinned = (1..).zip(&self.books.blocks).map(|(at, block)| (at, block.pins));
        let pinned = pinned.filter(|&(_, pins)| pins > 0);
        assert!(report.pinned_blocks.iter().map(|&(at, pins)| (number(at), pins)).eq(pinned));
    }

    fn check_sequence(&self, at: usize) {
        let (handle, expected) = (&self.handles[at], &self.books.sequences[at]);
        assert_eq!(handle.block_table().validate(), Ok(()));
        assert_eq!(numbers(&handle.block_table().physical_blocks), expected.blocks);
        assert_eq!(
            (handle.num_tokens(), handle.tokens()),
            (expected.len(), &*expected.name.tokens)
        );
        let counts = (handle.num_cached_tokens(), handle.num_committed_tokens());
        assert_eq!(counts, (expected.cached, expected.committed));
        let stats = handle.stats();
        let counts = (stats.blocks_allocated, stats.tokens_stored);
        assert_eq!(counts, (expected.blocks.len(), expected.len()));
        for layer in (0..NUM_LAYERS).filter(|_| self.has_storage()) {
            let rows = &expected.rows[layer];
            assert_eq!(read(&self.manager, handle, layer), *rows, "in {layer} of {at}");
            let tensor = handle.key_cache(layer).expect("it is alive").expect("it is stored");
            assert_eq!(tensor.to_vec::<f32>(), Some(keys(rows)));
        }
    }

    /// Everything is given back, whoever goes first.
    fn end(mut self) {
        while !self.handles.is_empty() {
            self.forget(self.handles.len() / 2);
            self.stale.clear();
            self.check();
        }
        while !self.views.is_empty() {
            let at = self.views.len() / 2;
            drop(self.views.remove(at));
            self.books.drop_view(at);
            self.check();
        }
        assert!(self.manager.leak_report().is_empty());
        assert_eq!(self.manager.stats().num_in_use, 0);
        assert_eq!(self.manager.reset_prefix_cache(), Ok(()));
        assert_eq!(self.manager.stats().num_free, NUM_BLOCKS);
    }
}

fn agrees(config: KvCacheManagerConfig, ops: &[Op]) {
    let mut world = World::new(config);
    for (step, op) in ops.iter().enumerate() {
        let stepped = panic::catch_unwind(AssertUnwindSafe(|| {
            world.apply(op);
            world.check();
        }));
        if let Err(payload) = stepped {
            eprintln!("in step {step}: {op:?}");
            panic::resume_unwind(payload);
        }
    }
    world.end();
}

fn tries(cases: u32) -> Config {
    Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    }
}

proptest! {
    #![proptest_config(tries(400))]

    #[test]
    fn a_manager_does_what_its_model_does(ops in vec(any_op(), 1..80)) {
        agrees(config(NUM_BLOCKS), &ops);
    }
}

proptest! {
    #![proptest_config(tries(200))]

    #[test]
    fn a_manager_that_keeps_duplicates_does_as_well(ops in vec(any_op(), 1..80)) {
        agrees(KvCacheManagerConfig { duplicates: Duplicates::Keep, ..config(NUM_BLOCKS) }, &ops);
    }

    #[test]
    fn a_manager_without_storage_does_as_well(ops in vec(any_op(), 1..80)) {
        agrees(KvCacheManagerConfig { storage: Storage::Elsewhere, ..config(NUM_BLOCKS) }, &ops);
    }

    #[test]
    fn a_manager_that_shares_nothing_does_as_well(ops in vec(any_op(), 1..80)) {
        agrees(KvCacheManagerConfig { prefix_caching: false, ..config(NUM_BLOCKS) }, &ops);
    }
}
