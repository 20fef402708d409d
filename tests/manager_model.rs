//! Random sequences of calls on a manager and on a naive model of it, which has a list of numbers for
//! each sequence and shares nothing. All content and all numbers are compared after each call.

mod common {
    pub(crate) mod sequences;
}

use std::panic::{self, AssertUnwindSafe};

use common::sequences::{
    BLOCK_SIZE, NUM_LAYERS, computed, config, keys, numbers_of, read, values, write,
};
use kvspan::{
    Duplicates, KvCacheHandle, KvCacheManager, KvCacheManagerConfig, KvError, PagedKvCacheHandle,
    PagedSpan, RequestOptions, Result,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, FileFailurePersistence};

const NUM_BLOCKS: usize = 9;
/// What is no computed number.
const GARBAGE: f32 = 0.5;

#[derive(Clone, Debug)]
enum Op {
    Allocate(Vec<u32>, usize),
    Write {
        sequence: Index,
        layer: usize,
        start: Index,
        rows: usize,
        right: bool,
    },
    WriteMany {
        layer: usize,
        position: Index,
    },
    /// Writes all rows as they should be, and commits them.
    Compute(Index),
    Commit(Index),
    Extend(Index, Vec<u32>),
    Truncate(Index, Index),
    Fork(Index),
    Free(Index),
    FreeByName(Index),
    View(Index, usize),
    DropView(Index),
    EditLength(Index, usize),
    EditBlocks(Index),
    Reset,
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few different tokens, so that beginnings are often equal.
    let tokens = |len| vec(0_u32..2, len);
    let index = any::<Index>;
    let layer = || 0..NUM_LAYERS;
    prop_oneof![
        6 => (tokens(0..14), 0_usize..6).prop_map(|(tokens, more)| Op::Allocate(tokens, more)),
        8 => (index(), layer(), index(), 0_usize..7, prop::bool::weighted(0.8)).prop_map(
            |(sequence, layer, start, rows, right)| Op::Write { sequence, layer, start, rows, right }
        ),
        2 => (layer(), index()).prop_map(|(layer, position)| Op::WriteMany { layer, position }),
        8 => index().prop_map(Op::Compute),
        4 => index().prop_map(Op::Commit),
        4 => (index(), tokens(0..6)).prop_map(|(at, tokens)| Op::Extend(at, tokens)),
        3 => (index(), index()).prop_map(|(at, len)| Op::Truncate(at, len)),
        3 => index().prop_map(Op::Fork),
        3 => index().prop_map(Op::Free),
        1 => index().prop_map(Op::FreeByName),
        3 => (index(), layer()).prop_map(|(at, layer)| Op::View(at, layer)),
        3 => index().prop_map(Op::DropView),
        1 => (index(), 0_usize..20).prop_map(|(at, len)| Op::EditLength(at, len)),
        1 => index().prop_map(Op::EditBlocks),
        1 => Just(Op::Reset),
    ]
}

struct Sequence {
    name: String,
    handle: PagedKvCacheHandle,
    tokens: Vec<u32>,
    rows: [Vec<f32>; NUM_LAYERS],
}

struct World {
    manager: KvCacheManager,
    sequences: Vec<Sequence>,
    views: Vec<(PagedSpan, Vec<f32>)>,
    num_started: usize,
    queries: u64,
    hits: u64,
}

impl Sequence {
    fn right(&self, layer: usize, position: usize) -> f32 {
        computed(&self.tokens[..=position], layer)
    }

    fn resize(&mut self, len: usize) {
        self.tokens.resize(len, 0);
        for rows in &mut self.rows {
            rows.resize(len, 0.0);
        }
    }

    fn is_right(&self, layer: usize, position: usize) -> bool {
        self.rows[layer][position].to_bits() == self.right(layer, position).to_bits()
    }

    /// Writes the rows that are not right, as far as there are blocks for copies.
    fn compute(&mut self, manager: &KvCacheManager) {
        for layer in 0..NUM_LAYERS {
            for position in 0..self.tokens.len() {
                let number = self.right(layer, position);
                if !self.is_right(layer, position)
                    && write(manager, &mut self.handle, layer, position, &[number]).is_ok()
                {
                    self.rows[layer][position] = number;
                }
            }
        }
    }

    /// Commits the tokens whose rows are right in all layers, from the first on.
    fn commit(&mut self, manager: &KvCacheManager) -> Result<()> {
        let is_right = |&at: &usize| (0..NUM_LAYERS).all(|layer| self.is_right(layer, at));
        let end = (0..self.tokens.len()).take_while(is_right).count();
        let start = self.handle.num_committed_tokens();
        if start < end {
            manager.commit(&mut self.handle, &self.tokens[start..end])?;
        }
        Ok(())
    }
}

impl World {
    fn new(duplicates: Duplicates) -> Self {
        let config = KvCacheManagerConfig { duplicates, ..config(NUM_BLOCKS) };
        let manager = KvCacheManager::new(config).expect("a small pool");
        let (sequences, views) = Default::default();
        Self { manager, sequences, views, num_started: 0, queries: 0, hits: 0 }
    }

    fn at(&mut self, index: Index) -> Option<&mut Sequence> {
        let len = self.sequences.len();
        (len > 0).then(|| &mut self.sequences[index.index(len)])
    }

    fn step(&mut self, op: &Op) {
        let before = (self.manager.inspect(), self.manager.stats());
        if let Err(error) = self.apply(op) {
            let (inspection, mut stats) = (self.manager.inspect(), self.manager.stats());
            stats.num_failures = before.1.num_failures;
            assert_eq!((inspection, stats), before, "{error} left a trace");
            match error {
                KvError::OutOfBlocks { .. } => {}
                KvError::BlocksInUse { .. } => assert!(matches!(op, Op::Reset)),
                KvError::InconsistentTable { .. } => assert!(matches!(op, Op::EditLength(..))),
                error => panic!("{op:?} gave {error}"),
            }
        }
        self.check();
    }

    fn apply(&mut self, op: &Op) -> Result<()> {
        let manager = self.manager.clone();
        match op {
            Op::Allocate(tokens, lookahead) => self.allocate(tokens, *lookahead)?,
            Op::Write { sequence, layer, start, rows, right } => {
                let Some(sequence) = self.at(*sequence) else { return Ok(()) };
                let len = sequence.tokens.len();
                let start = start.index(len + 1);
                let positions = start..(start + rows).min(len);
                let number = |at| if *right { sequence.right(*layer, at) } else { GARBAGE };
                let numbers = positions.clone().map(number).collect::<Vec<_>>();
                write(&manager, &mut sequence.handle, *layer, start, &numbers)?;
                sequence.rows[*layer][positions].copy_from_slice(&numbers);
            }
            Op::WriteMany { layer, position } => self.write_many(*layer, *position)?,
            Op::Compute(at) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                sequence.compute(&manager);
                sequence.commit(&manager)?;
            }
            Op::Commit(at) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                sequence.commit(&manager)?;
            }
            Op::Extend(at, tokens) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                manager.extend(&mut sequence.handle, tokens.len())?;
                let len = sequence.tokens.len();
                sequence.resize(len + tokens.len());
                // What is known already decides.
                let known = sequence.handle.tokens().len().max(len) - len;
                sequence.tokens[len + known..].copy_from_slice(&tokens[known..]);
            }
            Op::Truncate(at, len) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                let len = len.index(sequence.tokens.len() + 1);
                manager.truncate(&mut sequence.handle, len)?;
                sequence.resize(len);
            }
            Op::Fork(at) => {
                let name = self.name();
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                let handle = manager.fork(&sequence.handle, Some(&name))?;
                let (tokens, rows) = (sequence.tokens.clone(), sequence.rows.clone());
                self.sequences.push(Sequence { name, handle, tokens, rows });
            }
            Op::Free(at) => {
                if !self.sequences.is_empty() {
                    self.sequences.remove(at.index(self.sequences.len()));
                }
            }
            Op::FreeByName(at) => {
                if self.sequences.is_empty() {
                    return Ok(());
                }
                let sequence = self.sequences.remove(at.index(self.sequences.len()));
                manager.free_request(&sequence.name)?;
                assert!(!sequence.handle.is_valid());
                let stale = KvError::StaleHandle { cache_id: sequence.handle.cache_id() };
                assert_eq!(manager.free(&sequence.handle), Err(stale));
            }
            Op::View(at, layer) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                let view = manager.view(&sequence.handle, *layer, 0, sequence.tokens.len())?;
                let rows = sequence.rows[*layer].clone();
                self.views.push((view, rows));
            }
            Op::DropView(at) => {
                if !self.views.is_empty() {
                    drop(self.views.remove(at.index(self.views.len())));
                }
            }
            Op::EditLength(at, len) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                let before = sequence.tokens.len();
                sequence.handle.block_table_mut().sequence_length = *len;
                let result = manager.extend(&mut sequence.handle, 0);
                if result.is_err() {
                    sequence.handle.block_table_mut().sequence_length = before;
                    return manager.extend(&mut sequence.handle, 0).and(result).map(|_| ());
                }
                sequence.resize(*len);
            }
            Op::EditBlocks(at) => {
                let Some(sequence) = self.at(*at) else { return Ok(()) };
                let kept = sequence.handle.block_table().clone();
                sequence.handle.block_table_mut().physical_blocks.reverse();
                sequence.handle.block_table_mut().logical_to_physical.reverse();
                let result = manager.extend(&mut sequence.handle, 0);
                let refused = matches!(result, Err(KvError::InconsistentTable { .. }));
                assert_eq!(refused, kept.num_blocks() > 1);
                *sequence.handle.block_table_mut() = kept;
            }
            Op::Reset => manager.reset_prefix_cache()?,
        }
        Ok(())
    }

    fn name(&mut self) -> String {
        self.num_started += 1;
        format!("request {}", self.num_started)
    }

    fn allocate(&mut self, tokens: &[u32], lookahead: usize) -> Result<()> {
        let name = self.name();
        let expected = self.manager.probe(tokens, &RequestOptions::default())?;
        let options = RequestOptions { request_id: Some(&name), lookahead, ..Default::default() };
        let handle = self.manager.allocate(tokens, &options)?;
        let cached = handle.num_cached_tokens();
        assert_eq!(cached, expected);
        assert!(cached.is_multiple_of(BLOCK_SIZE) && (cached < tokens.len() || cached == 0));
        let rows = Default::default();
        let mut sequence = Sequence { name, handle, tokens: tokens.to_vec(), rows };
        sequence.resize(tokens.len());
        for layer in 0..NUM_LAYERS {
            for at in 0..cached {
                sequence.rows[layer][at] = sequence.right(layer, at);
            }
        }
        self.sequences.push(sequence);
        self.queries += u64::try_from(tokens.len()).expect("a small number");
        self.hits += u64::try_from(cached).expect("a small number");
        Ok(())
    }

    /// One row of every sequence that has tokens.
    fn write_many(&mut self, layer: usize, position: Index) -> Result<()> {
        let mut written = self.sequences.iter_mut().filter(|sequence| !sequence.tokens.is_empty());
        let mut sequences = written.by_ref().collect::<Vec<_>>();
        let positions = sequences.iter().map(|sequence| position.index(sequence.tokens.len()));
        let positions = positions.collect::<Vec<_>>();
        let numbers = sequences.iter().zip(&positions);
        let numbers = numbers.map(|(sequence, &at)| sequence.right(layer, at)).collect::<Vec<_>>();
        let mut handles =
            sequences.iter_mut().map(|sequence| &mut sequence.handle).collect::<Vec<_>>();
        let (keys, values) = (keys(&numbers), values(&numbers));
        self.manager.write_many(layer, &mut handles, &positions, &keys, &values)?;
        for ((sequence, at), number) in sequences.into_iter().zip(positions).zip(numbers) {
            sequence.rows[layer][at] = number;
        }
        Ok(())
    }

    fn check(&self) {
        self.manager.check_integrity().expect("nothing is lost");
        for sequence in &self.sequences {
            assert_eq!(sequence.handle.num_tokens(), sequence.tokens.len());
            for layer in 0..NUM_LAYERS {
                let found = read(&self.manager, &sequence.handle, layer);
                assert_eq!(found, sequence.rows[layer], "of {} in {layer}", sequence.name);
            }
        }
        for (view, rows) in &self.views {
            assert_eq!(numbers_of(view), *rows, "a view changed");
        }
        let stats = self.manager.stats();
        assert_eq!(stats.num_free + stats.num_cached + stats.num_in_use, NUM_BLOCKS);
        assert_eq!((stats.query_tokens, stats.hit_tokens), (self.queries, self.hits));
        assert_eq!(stats.hit_tokens + stats.miss_tokens, stats.query_tokens);
        assert_eq!(stats.num_sequences, self.sequences.len());
    }

    fn end(mut self) {
        self.sequences.clear();
        self.check();
        self.views.clear();
        self.check();
        assert!(self.manager.leak_report().is_empty());
        assert_eq!(self.manager.stats().num_in_use, 0);
        assert_eq!(self.manager.reset_prefix_cache(), Ok(()));
        assert_eq!(self.manager.stats().num_free, NUM_BLOCKS);
    }
}

fn agrees(duplicates: Duplicates, ops: &[Op]) {
    let mut world = World::new(duplicates);
    for (step, op) in ops.iter().enumerate() {
        let stepped = panic::catch_unwind(AssertUnwindSafe(|| world.step(op)));
        if let Err(payload) = stepped {
            eprintln!("in step {step}: {op:?}");
            panic::resume_unwind(payload);
        }
    }
    world.end();
}

proptest! {
    #![proptest_config(Config {
        cases: 400,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    })]

    #[test]
    fn a_manager_does_what_separate_lists_do(ops in vec(any_op(), 1..80)) {
        agrees(Duplicates::Merge, &ops);
    }

    #[test]
    fn a_manager_that_keeps_duplicates_does_as_well(ops in vec(any_op(), 1..80)) {
        agrees(Duplicates::Keep, &ops);
    }
}
