//! Random sequences of operations on caches and on a naive model of them, compared after each step.

mod common {
    pub(crate) mod model;
    pub(crate) mod watchdog;
}

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use common::model::{CAPACITY, CONFIG, Model, Row, WIDTH, joined};
use common::watchdog::within;
use kvspan::{Element, KVSpan, KvError, LayerKvCache, PinnedSpan, ReservedSpan, Result, bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError, TestRunner};

/// For one case.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Op {
    Initialize(usize),
    Write {
        at: usize,
        row: Row,
        timed: bool,
    },
    WriteBatch {
        entries: Vec<(usize, Row)>,
        timed: bool,
    },
    Append(Row),
    Truncate {
        new_len: usize,
        timed: bool,
    },
    Reset {
        timed: bool,
    },
    Reserve(usize),
    FillReserved(Row),
    Commit,
    Discard,
    Pin(usize, usize),
    Unpin(usize),
    Read(Read),
    Prefault,
    Clone,
    DeepClone,
    DropClone,
    /// Does it in a closure that reads the range.
    Inside(usize, usize, Box<Op>),
}

#[derive(Clone, Debug)]
enum Read {
    Token(usize),
    Range(usize, usize),
    Into { start: usize, end: usize, extra_keys: isize, extra_values: isize },
}

type Outcome = std::result::Result<(), TestCaseError>;

/// Which sequence, which of its clones, and what to do with it.
type Step = (usize, usize, Op);

fn place() -> impl Strategy<Value = usize> {
    prop_oneof![30 => 0..CAPACITY + 2, 1 => usize::MAX - 1..=usize::MAX]
}

/// Mostly a few tokens; sometimes far off, or the wrong way round.
fn range() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![
        8 => (0..CAPACITY - 2, 0_usize..4).prop_map(|(start, len)| (start, start + len)),
        1 => (place(), place()),
    ]
}

/// A token whose elements all differ.
fn row() -> impl Strategy<Value = Row> {
    any::<u8>().prop_map(|seed| (elements(seed, WIDTH), elements(seed, 2 * WIDTH).split_off(WIDTH)))
}

/// That every element type holds as they are: with 127 times a power of two in each token, the scale
/// of an int8 is that power.
fn elements(seed: u8, len: usize) -> Vec<f32> {
    let (seed, unit) = (f32::from(seed % 64), f32::from(1 + seed / 64 % 2));
    let units = [127.0, seed, -seed - 1.0, -127.0, -seed - 2.0, seed + 3.0];
    units.into_iter().map(|element| element * unit).take(len).collect()
}

/// Tokens as [`row`] makes them, one after the other; sometimes with elements too many.
fn rows(count: std::ops::Range<usize>) -> impl Strategy<Value = Row> {
    let odd = prop_oneof![12 => Just((0, 0)), 1 => (0_usize..2, 0_usize..2)];
    (vec(row(), count), odd).prop_map(|(rows, (more_keys, more_values))| {
        let (mut keys, mut values) = joined(&rows);
        keys.extend(vec![0.5; more_keys]);
        values.extend(vec![0.5; more_values]);
        (keys, values)
    })
}

fn read() -> impl Strategy<Value = Read> {
    prop_oneof![
        place().prop_map(Read::Token),
        range().prop_map(|(start, end)| Read::Range(start, end)),
        (range(), -1_isize..3, -1_isize..3).prop_map(|((start, end), extra_keys, extra_values)| {
            Read::Into { start, end, extra_keys, extra_values }
        }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let timed = any::<bool>;
    let plain = prop_oneof![
        2 => place().prop_map(Op::Initialize),
        4 => (place(), rows(1..2), timed())
            .prop_map(|(at, row, timed)| Op::Write { at, row, timed }),
        4 => (vec((place(), rows(1..2)), 0..4), timed())
            .prop_map(|(entries, timed)| Op::WriteBatch { entries, timed }),
        7 => rows(0..4).prop_map(Op::Append),
        4 => (place(), timed()).prop_map(|(new_len, timed)| Op::Truncate { new_len, timed }),
        1 => timed().prop_map(|timed| Op::Reset { timed }),
        2 => prop_oneof![5 => 0_usize..4, 1 => place()].prop_map(Op::Reserve),
        2 => row().prop_map(Op::FillReserved),
        4 => Just(Op::Commit),
        3 => Just(Op::Discard),
        5 => range().prop_map(|(start, end)| Op::Pin(start, end)),
        3 => any::<usize>().prop_map(Op::Unpin),
        4 => read().prop_map(Op::Read),
        1 => Just(Op::Prefault),
        1 => Just(Op::Clone),
        1 => Just(Op::DeepClone),
        1 => Just(Op::DropClone),
    ];
    let inside = |op: BoxedStrategy<Op>| {
        (range(), op).prop_map(|((start, end), op)| Op::Inside(start, end, Box::new(op))).boxed()
    };
    let plain = plain.boxed();
    prop_oneof![20 => plain.clone(), 3 => inside(plain.clone()), 1 => inside(inside(plain))]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sequence = prop_oneof![3 => Just(0_usize), 2 => 0_usize..4];
    vec((sequence, 0_usize..4, op()), 1..=60)
}

/// What comes of a sequence of steps.
struct Run<T: Element> {
    born: Vec<World<T>>,
    /// How often calls ended well and with each error.
    outcomes: BTreeMap<String, usize>,
}

impl<T: Element> Run<T> {
    fn compare<R: Debug + PartialEq>(&mut self, given: &Result<R>, model: &Result<R>) -> Outcome {
        let name = |error: &KvError| {
            format!("{error:?}").split(|c: char| !c.is_alphanumeric()).next().map(str::to_owned)
        };
        let outcome = model.as_ref().map_or_else(name, |_| Some("Ok".to_owned()));
        *self.outcomes.entry(outcome.unwrap_or_default()).or_default() += 1;
        prop_assert_eq!(given, model);
        Ok(())
    }
}

/// One sequence: its model, and all that holds on to it.
struct World<T: Element> {
    model: Model,
    clones: Vec<LayerKvCache<T>>,
    /// As many as the model has, in the same order, with what they showed when they were made.
    pins: Vec<(PinnedSpan<T>, Row)>,
    reserved: Option<ReservedSpan<T>>,
}

/// What a span stands for.
fn shown<T: Element>(span: KVSpan<'_, T>) -> Row {
    let plane = |data: &[T], scales: &[T::Scale]| {
        let mut numbers = vec![0.0; data.len()];
        let tokens = data.chunks(WIDTH).zip(scales).zip(numbers.chunks_mut(WIDTH));
        tokens.for_each(|((data, scale), numbers)| T::widen(data, *scale, numbers));
        numbers
    };
    (plane(span.keys, span.key_scales), plane(span.values, span.value_scales))
}

impl<T: Element> World<T> {
    fn new(cache: LayerKvCache<T>, model: Model) -> Self {
        Self { model, clones: vec![cache], pins: Vec::new(), reserved: None }
    }

    /// Does `op` to clone number `clone` and to the model.
    fn apply(&mut self, clone: usize, op: &Op, run: &mut Run<T>) -> Outcome {
        if self.apply_to_owned(op)? || self.clones.is_empty() {
            return Ok(());
        }
        let clone = clone % self.clones.len();
        let cache = self.clones[clone].clone();
        let model = &mut self.model;
        match op {
            Op::Initialize(len) => {
                run.compare(&cache.initialize(*len), &model.initialize(*len))?;
            }
            Op::Write { at, row, timed } => {
                let (k, v) = row;
                let written = if *timed {
                    cache.write_kv_timeout(*at, k, v, Duration::ZERO)
                } else {
                    cache.write_kv(*at, k, v)
                };
                run.compare(&written, &model.write_kv(*at, row, *timed))?;
            }
            Op::WriteBatch { entries, timed } => {
                let slices = entries.iter().map(|(at, (k, v))| (*at, &k[..], &v[..]));
                let slices: Vec<_> = slices.collect();
                let written = if *timed {
                    cache.write_kv_batch_timeout(&slices, Duration::ZERO)
                } else {
                    cache.write_kv_batch(&slices)
                };
                run.compare(&written, &model.write_kv_batch(entries, *timed))?;
            }
            Op::Append(rows) => {
                run.compare(&cache.append(&rows.0, &rows.1), &model.append(rows))?;
            }
            Op::Truncate { new_len, timed } => {
                let truncated = if *timed {
                    cache.truncate_timeout(*new_len, Duration::ZERO)
                } else {
                    cache.truncate(*new_len)
                };
                run.compare(&truncated, &model.truncate(*new_len, *timed))?;
            }
            Op::Reset { timed: true } => {
                run.compare(&cache.reset_timeout(Duration::ZERO), &model.truncate(0, true))?;
            }
            Op::Reset { timed: false } => {
                run.compare(&cache.reset(), &model.truncate(0, false))?;
            }
            Op::Reserve(num_tokens) => {
                let reserved = cache.reserve(*num_tokens);
                let range = reserved.as_ref().map(ReservedSpan::range).map_err(Clone::clone);
                run.compare(&range, &model.reserve(*num_tokens))?;
                self.reserved = reserved.ok().or(self.reserved.take());
            }
            Op::Pin(start, end) => {
                let pinned = cache.pin_range(*start, *end);
                let refused = pinned.as_ref().map(drop).map_err(Clone::clone);
                run.compare(&refused, &model.pin(*start, *end))?;
                self.pins.extend(pinned.into_iter().zip(model.read(*start, *end)));
            }
            Op::Read(read) => check_read(read, &cache, model, run)?,
            Op::Prefault => {
                prop_assert_eq!(cache.prefault(), Ok(()));
                model.initialized = true;
            }
            Op::Clone => self.clones.push(cache),
            Op::DropClone => drop(self.clones.remove(clone)),
            Op::DeepClone => {
                let Model { initialized, ref rows, .. } = *model;
                let copied = Model { initialized, rows: rows.clone(), ..Model::default() };
                run.born
                    .push(Self::new(cache.deep_clone().expect("memory for few tokens"), copied));
            }
            Op::Inside(start, end, op) => {
                let expected = model.read(*start, *end);
                let seen = cache.with_read_range(*start, *end, |span| {
                    self.model.reading += 1;
                    let done = self.apply(clone, op, run).and_then(|()| self.compare());
                    self.model.reading -= 1;
                    done.map(|()| shown(span))
                });
                prop_assert_eq!(seen.map(|done| done.expect("it goes well inside")), expected);
            }
            Op::FillReserved(_) | Op::Commit | Op::Discard | Op::Unpin(_) => {}
        }
        Ok(())
    }

    /// Does `op` if it is one that needs no cache, and tells whether it is.
    fn apply_to_owned(&mut self, op: &Op) -> Result<bool, TestCaseError> {
        match op {
            Op::FillReserved(row) => {
                if let Some(reserved) = &mut self.reserved {
                    let [keys, values] = [&row.0, &row.1].map(|row| {
                        let scale = T::scale(row.iter().fold(0.0, |x: f32, y| x.max(y.abs())));
                        let mut elements = vec![T::zeroed(); WIDTH];
                        T::narrow(row, scale, &mut elements);
                        (elements, scale)
                    });
                    let (key_rows, value_rows) = reserved.keys_and_values_mut();
                    key_rows.chunks_mut(WIDTH).for_each(|row| row.copy_from_slice(&keys.0));
                    value_rows.chunks_mut(WIDTH).for_each(|row| row.copy_from_slice(&values.0));
                    let (key_scales, value_scales) = reserved.scales_mut();
                    key_scales.fill(keys.1);
                    value_scales.fill(values.1);
                }
                self.model.reserved.iter_mut().flatten().for_each(|rows| *rows = row.clone());
            }
            Op::Commit => {
                if let Some(reserved) = self.reserved.take() {
                    prop_assert_eq!(reserved.commit(), self.model.commit());
                }
            }
            Op::Discard => (self.reserved, self.model.reserved) = (None, None),
            Op::Unpin(number) => {
                if let Some(number) = number.checked_rem(self.pins.len()) {
                    drop(self.pins.remove(number));
                    self.model.pins.remove(number);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Compares all that can be seen with the model.
    fn compare(&self) -> Outcome {
        let Self { model, clones, pins, reserved } = self;
        let nbytes = if model.initialized { nbytes::<T>() } else { 0 };
        for cache in clones {
            prop_assert_eq!(cache.len(), model.rows.len());
            prop_assert_eq!(cache.is_empty(), model.rows.is_empty());
            prop_assert_eq!((cache.capacity(), cache.nbytes()), (CAPACITY, nbytes));
            let all = cache.with_read_range(0, cache.len(), shown);
            prop_assert_eq!(all, Ok(joined(&model.rows)));
        }
        prop_assert_eq!(pins.len(), model.pins.len());
        for ((pinned, then), range) in pins.iter().zip(&model.pins) {
            prop_assert_eq!(&pinned.range(), range);
            prop_assert_eq!(&shown(pinned.span()), then);
        }
        let rows = reserved.as_ref().map(|reserved| shown(reserved.span()));
        prop_assert_eq!(rows, model.reserved.as_deref().map(joined));
        Ok(())
    }

    fn is_gone(&self) -> bool {
        self.clones.is_empty() && self.pins.is_empty() && self.reserved.is_none()
    }
}

/// Keys and values, a part at a time up to a multiple of 64 bytes, but for the last.
fn nbytes<T: Element>() -> usize {
    let rows = [WIDTH * size_of::<T>(); 2].into_iter();
    let parts = rows.chain([size_of::<T::Scale>(); 2]).map(|bytes| CAPACITY * bytes);
    parts.filter(|bytes| *bytes > 0).fold(0, |so_far, bytes| so_far.next_multiple_of(64) + bytes)
}

fn check_read<T: Element>(
    read: &Read,
    cache: &LayerKvCache<T>,
    model: &Model,
    run: &mut Run<T>,
) -> Outcome {
    match *read {
        Read::Token(token) => {
            let entry =
                cache.read_kv(token).map(|entry| (numbers(&entry.keys), numbers(&entry.values)));
            run.compare(&entry, &model.read_kv(token))?;
            let seen = cache.with_read_kv(token, |keys, values| (keys.len(), values.len()));
            run.compare(&seen, &model.read_kv(token).map(|_| (WIDTH, WIDTH)))?;
        }
        Read::Range(start, end) => {
            let range = cache.read_range(start, end);
            let range = range.map(|(keys, values)| (numbers(&keys), numbers(&values)));
            run.compare(&range, &model.read(start, end))?;
        }
        Read::Into { start, end, extra_keys, extra_values } => {
            let wanted = end.saturating_sub(start).min(CAPACITY + 2) * WIDTH;
            let room = |extra| vec![0.5; wanted.saturating_add_signed(extra)];
            let (mut keys, mut values) = (room(extra_keys), room(extra_values));
            let mut expected = (keys.clone(), values.clone());
            let read = cache.read_range_into(start, end, &mut keys, &mut values);
            run.compare(&read, &model.read_range_into(start, end, &mut expected))?;
            prop_assert_eq!((keys, values), expected);
        }
    }
    Ok(())
}

/// Copies as an f32 cache would give them.
fn numbers<N: Element>(copies: &[N]) -> Vec<f32> {
    let number = |copy: &N| {
        let mut number = [0.0];
        N::widen(&[*copy], N::scale(1.0), &mut number);
        number[0]
    };
    copies.iter().map(number).collect()
}

fn run<T: Element>(steps: &[Step]) -> Result<BTreeMap<String, usize>, TestCaseError> {
    let fresh = || World::new(LayerKvCache::<T>::with_element(CONFIG), Model::default());
    let mut run = Run { born: Vec::new(), outcomes: BTreeMap::new() };
    let mut worlds = vec![fresh()];
    for (world, clone, op) in steps {
        let world = world % worlds.len();
        worlds[world].apply(*clone, op, &mut run)?;
        worlds.append(&mut run.born);
        for world in &worlds {
            world.compare()?;
        }
        worlds.retain(|world| !world.is_gone());
        if worlds.is_empty() {
            worlds.push(fresh());
        }
    }
    Ok(run.outcomes)
}

proptest! {
    #![proptest_config(Config {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/model.txt",
        ))),
        max_shrink_time: 30_000,
        ..Config::default()
    })]

    #[test]
    fn caches_behave_like_the_model(
        steps in steps(),
        dtype in 0..4,
    ) {
        within(LIMIT, move || match dtype {
            0 => run::<f16>(&steps),
            1 => run::<bf16>(&steps),
            2 => run::<i8>(&steps),
            _ => run::<f32>(&steps),
        })?;
    }

    #[test]
    fn a_full_range_is_the_concatenation_of_what_was_written(tokens in vec(row(), 1..=CAPACITY)) {
        let cache = LayerKvCache::new(CONFIG);
        let mut model = Model::default();
        prop_assert_eq!(cache.initialize(tokens.len()), model.initialize(tokens.len()));
        for (at, row) in tokens.iter().enumerate() {
            prop_assert_eq!(cache.write_kv(at, &row.0, &row.1), model.write_kv(at, row, false));
        }
        let len = tokens.len();
        prop_assert_eq!(cache.read_range(0, len), Ok(joined(&model.rows)));
        let seen = cache.with_read_range(0, len, |span| (span.keys.to_vec(), span.values.to_vec()));
        prop_assert_eq!(seen, Ok(joined(&model.rows)));
    }
}

/// A comparison of calls that all fail alike would prove nothing.
#[test]
fn the_sequences_reach_every_outcome() {
    let mut runner = TestRunner::deterministic();
    let mut outcomes = BTreeMap::<_, usize>::new();
    for _ in 0..200 {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        for (outcome, count) in within(LIMIT, move || run::<f32>(&steps)).unwrap() {
            *outcomes.entry(outcome).or_default() += count;
        }
    }
    let calls: usize = outcomes.values().sum();
    assert!(2 * outcomes["Ok"] > calls, "{outcomes:?}");
    outcomes.retain(|_, count| *count >= 20);
    assert_eq!(
        outcomes.into_keys().collect::<Vec<_>>(),
        [
            "BatchEntry",
            "CapacityExceeded",
            "EmptyInitialize",
            "InvertedRange",
            "LengthMismatch",
            "NotInitialized",
            "Ok",
            "OutputTooShort",
            "Pinned",
            "RangeOutOfBounds",
            "Reserved",
            "Timeout",
            "TokenOutOfRange",
            "WidthMismatch",
            "WouldDeadlock",
        ]
    );
}
