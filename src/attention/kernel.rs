//! The kernel: some query tokens of a sequence against some of its tokens.
//!
//! It goes through the tokens in *tiles*. First the keys of a tile are read, once for all query heads of
//! a group, for the scores; then the softmax so far is corrected; then the values are read, once. They
//! are read in *runs* of tokens that lie in one piece, and while one is computed with, the next one is
//! fetched. Products are made for up to four rows of the query at a time, and for as many
//! tokens, or as many groups of elements, as there are registers.
//!
//! What is summed in which order depends on positions in the sequence alone, and not on where runs end.
//! What a query token does not see is not read, so that it does no harm whatever it is.

#![expect(clippy::inline_always, reason = "vectors can be in registers only where all is inlined")]
#![expect(clippy::needless_range_loop, reason = "indices of arrays of vectors must be constants")]

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::slice::Chunks;

use fearless_simd::Simd;
use fearless_simd::prelude::*;

use super::context::{HeadRows, RUN, Run};
use super::lanes::{Lanes, from_lanes, group_size, to_lanes};
use super::task::{Partial, PartialRow, RowBlock, TILE, Task, intersection};
use super::zeros;
use crate::error::Result;
use crate::memory::prefetch;

/// For how many tokens values are added between two fetches of as many bytes.
const FETCH_EVERY: usize = 16;

/// Computes a task with the instructions of `simd`.
///
/// # Errors
///
/// `OutOfMemory`
#[inline(always)]
pub(super) fn attend<S: Simd, T: Lanes>(simd: S, task: &Task<'_>) -> Result<Partial> {
    let width = task.context.head_dim().next_multiple_of(group_size::<S, T>());
    let mut query = task.scaled_query(width)?;
    to_lanes::<S, T>(&mut query);
    let mut partial = Partial::new(query.len() / width, width)?;
    let mut weights = zeros(query.len() / width * TILE)?;
    let mut blocks = Vec::new();
    let mut start = task.tokens.start;
    while start < task.tokens.end {
        let tokens = start..task.tokens.end.min((start / TILE + 1) * TILE);
        task.row_blocks(&tokens, &mut blocks);
        let tile = Tile { task, blocks: &blocks, tokens };
        tile.score::<S, T>(simd, &query, width, &mut weights);
        tile.soften(simd, &mut weights, &mut partial);
        tile.accumulate::<S, T>(simd, &mut weights, &mut partial);
        start = tile.tokens.end;
    }
    from_lanes::<S, T>(&mut partial.sums);
    Ok(partial)
}

/// Some of the tokens of a task.
struct Tile<'a> {
    task: &'a Task<'a>,
    /// Which rows of a KV head see what of the tile.
    blocks: &'a [RowBlock],
    tokens: Range<usize>,
}

/// What a block of rows sees of a run.
struct Strip {
    num_rows: usize,
    /// Of the rows of a KV head.
    first_row: usize,
    /// Where its tokens are in the tile.
    column: usize,
    /// Where they are in the run.
    tokens: Range<usize>,
}

/// Calls a function for the number of rows of a strip.
macro_rules! for_rows {
    ($strip:ident, $function:ident::<$S:ident, $T:ident>($($argument:expr),* $(,)?)) => {
        match $strip.num_rows {
            4 => $function::<$S, $T, 4>($($argument),*),
            2 => $function::<$S, $T, 2>($($argument),*),
            _ => $function::<$S, $T, 1>($($argument),*),
        }
    };
}

impl Tile<'_> {
    /// All strips of a run, for any KV head.
    fn strips(&self, run: &Range<usize>, strips: &mut Vec<Strip>) {
        strips.clear();
        strips.extend(self.blocks.iter().filter_map(|block| {
            let tokens = intersection(&block.tokens, run);
            (!tokens.is_empty()).then(|| Strip {
                num_rows: block.num_rows,
                first_row: block.first,
                column: tokens.start - self.tokens.start,
                tokens: tokens.start - run.start..tokens.end - run.start,
            })
        }));
    }

    /// Makes scores: `TILE` of them for each row of the query.
    #[inline(always)]
    fn score<S: Simd, T: Lanes>(&self, simd: S, query: &[f32], width: usize, scores: &mut [f32]) {
        let (mut strips, rows_per_head) = (Vec::new(), self.task.num_rows());
        let mut runs = self.task.context.runs::<T>(self.tokens.clone());
        while let Some(Run { tokens, keys, .. }) = runs.next() {
            let mut ahead = runs.upcoming().keys.chunks(most_tokens::<S>());
            self.strips(&tokens, &mut strips);
            for head in 0..self.task.context.num_heads() {
                for strip in &strips {
                    let row = head * rows_per_head + strip.first_row;
                    let keys = keys.head(head, &strip.tokens);
                    let query = (&query[row * width..], width);
                    let scores = &mut scores[row * TILE + strip.column..];
                    for_rows!(strip, dots::<S, T>(simd, query, &keys, scores, &mut ahead));
                }
            }
        }
    }

    /// Makes weights of the scores, and corrects what is summed already.
    #[inline(always)]
    fn soften<S: Simd>(&self, simd: S, weights: &mut [f32], partial: &mut Partial) {
        let num_lanes = self.tokens.len().next_multiple_of(S::f32s::LEN);
        for head in 0..self.task.context.num_heads() {
            for block in self.blocks {
                let seen =
                    block.tokens.start - self.tokens.start..block.tokens.end - self.tokens.start;
                let first_row = head * self.task.num_rows() + block.first;
                for row in first_row..first_row + block.num_rows {
                    let weights = &mut weights[row * TILE..][..num_lanes];
                    if let Some(softcap) = self.task.softcap {
                        let softcap = splat(simd, softcap);
                        for lanes in weights.chunks_exact_mut(S::f32s::LEN) {
                            let score = S::f32s::from_slice(simd, lanes);
                            // Neither the reciprocal of a bound nor a multiple is always finite.
                            let score = tanh(simd, score / softcap) * softcap;
                            (score * splat(simd, LOG2_E)).store_slice(lanes);
                        }
                    }
                    weights[..seen.start].fill(f32::NEG_INFINITY);
                    weights[seen.end..].fill(f32::NEG_INFINITY);
                    soften_row(simd, weights, &mut partial.row(row));
                }
            }
        }
    }

    /// Adds the values times their weights.
    #[inline(always)]
    fn accumulate<S: Simd, T: Lanes>(&self, simd: S, weights: &mut [f32], partial: &mut Partial) {
        let width = partial.width;
        let (mut strips, rows_per_head) = (Vec::new(), self.task.num_rows());
        let mut runs = self.task.context.runs::<T>(self.tokens.clone());
        while let Some(Run { tokens, values, .. }) = runs.next() {
            let piece = FETCH_EVERY * most_groups::<S, T>() * group_size::<S, T>();
            let mut ahead = runs.upcoming().values.elements.chunks(piece);
            self.strips(&tokens, &mut strips);
            for head in 0..self.task.context.num_heads() {
                for strip in &strips {
                    let row = head * rows_per_head + strip.first_row;
                    let values = values.head(head, &strip.tokens);
                    let weights = &mut weights[row * TILE + strip.column..];
                    let sums = (&mut partial.sums[row * width..], width);
                    for_rows!(strip, add::<S, T>(simd, weights, &values, sums, &mut ahead));
                }
            }
        }
    }
}

/// For how many tokens, at most, products are made at a time. With four rows that is a product for
/// each lane of a vector.
#[inline(always)]
const fn most_tokens<S: Simd>() -> usize {
    S::f32s::LEN / 4
}

/// How many groups of the elements of a head are summed at a time.
#[inline(always)]
fn most_groups<S: Simd, T: Lanes>() -> usize {
    (if S::f32s::LEN >= 16 { 4 } else { 2 } / T::VECTORS).max(1)
}

/// Multiplies `R` rows of a query with keys.
#[inline(always)]
fn dots<S: Simd, T: Lanes, const R: usize>(
    simd: S,
    query: (&[f32], usize),
    keys: &HeadRows<'_, T>,
    scores: &mut [f32],
    ahead: &mut Chunks<'_, T>,
) {
    let mut token = 0;
    while token < keys.len {
        if let Some(elements) = ahead.next() {
            prefetch(elements);
        }
        let (left, scores) = (keys.len - token, &mut scores[token..]);
        token += if most_tokens::<S>() >= 4 && left >= 4 {
            dots_of::<S, T, R, 4>(simd, query, keys, token, scores)
        } else if most_tokens::<S>() >= 2 && left >= 2 {
            dots_of::<S, T, R, 2>(simd, query, keys, token, scores)
        } else {
            dots_of::<S, T, R, 1>(simd, query, keys, token, scores)
        };
    }
    rescale::<S, T, R>(simd, scores, keys);
}

/// Multiplies `R` rows of a query with the keys of `N` tokens.
#[inline(always)]
fn dots_of<S: Simd, T: Lanes, const R: usize, const N: usize>(
    simd: S,
    (query, width): (&[f32], usize),
    keys: &HeadRows<'_, T>,
    token: usize,
    scores: &mut [f32],
) -> usize {
    let mut rows = [keys.row(token); N];
    for n in 0..N {
        rows[n] = keys.row(token + n);
    }
    let mut products = [[splat(simd, 0.0); N]; R];
    let whole = keys.head_dim - keys.head_dim % group_size::<S, T>();
    for at in (0..whole).step_by(group_size::<S, T>()) {
        multiply::<S, T, R, N, true>(simd, (&query[at..], width), &rows, at, &mut products);
    }
    if whole < keys.head_dim {
        multiply::<S, T, R, N, false>(simd, (&query[whole..], width), &rows, whole, &mut products);
    }
    let sums = sum_lanes(simd, &products);
    for r in 0..R {
        scores[r * TILE..][..N].copy_from_slice(&sums.as_slice()[r * N..][..N]);
    }
    N
}

/// Multiplies `R` rows of a query with a group of elements of `N` rows.
#[inline(always)]
fn multiply<S: Simd, T: Lanes, const R: usize, const N: usize, const WHOLE: bool>(
    simd: S,
    (query, width): (&[f32], usize),
    rows: &[&[T]; N],
    at: usize,
    products: &mut [[S::f32s; N]; R],
) {
    let mut numbers = [T::zeros(simd); N];
    for n in 0..N {
        numbers[n] = T::load::<S, WHOLE>(simd, &rows[n][at..]);
    }
    for v in 0..T::VECTORS {
        for r in 0..R {
            let lanes = &query[r * width + v * S::f32s::LEN..][..S::f32s::LEN];
            let query = S::f32s::from_slice(simd, lanes);
            for n in 0..N {
                products[r][n] = numbers[n].as_ref()[v].mul_add(query, products[r][n]);
            }
        }
    }
}

/// Sums the lanes of vectors, no more of them than they have lanes: the sum of the first one is the
/// first lane, and so on.
///
/// Neighbouring lanes are added, which halves the vectors, until each lane is the sum of one of them.
#[inline(always)]
fn sum_lanes<S: Simd, const R: usize, const N: usize>(
    simd: S,
    vectors: &[[S::f32s; N]; R],
) -> S::f32s {
    let mut halved = [splat(simd, 0.0); 16];
    for r in 0..R {
        for n in 0..N {
            halved[r * N + n] = vectors[r][n];
        }
    }
    let (mut count, mut lanes) = (R * N, S::f32s::LEN);
    while lanes > 1 {
        count = count.div_ceil(2);
        for i in 0..count {
            let (a, b) = (halved[2 * i], halved[2 * i + 1]);
            halved[i] = a.unzip_low(b) + a.unzip_high(b);
        }
        lanes /= 2;
    }
    halved[0]
}

/// Multiplies rows by the scale of each token, if the type of the elements has any.
#[inline(always)]
fn rescale<S: Simd, T: Lanes, const R: usize>(simd: S, rows: &mut [f32], tokens: &HeadRows<'_, T>) {
    if !T::DTYPE.has_scales() {
        return;
    }
    let mut scales = [0.0; RUN];
    for (token, scale) in scales[..tokens.len].iter_mut().enumerate() {
        *scale = tokens.scale(token);
    }
    for r in 0..R {
        let mut row = rows[r * TILE..][..tokens.len].chunks_exact_mut(S::f32s::LEN);
        let mut scales = scales[..tokens.len].chunks_exact(S::f32s::LEN);
        for (row, scales) in row.by_ref().zip(scales.by_ref()) {
            let scales = S::f32s::from_slice(simd, scales);
            (S::f32s::from_slice(simd, row) * scales).store_slice(row);
        }
        for (x, scale) in row.into_remainder().iter_mut().zip(scales.remainder()) {
            *x *= scale;
        }
    }
}

/// Makes weights of the scores of a row, which are minus infinity where nothing is seen.
#[inline(always)]
fn soften_row<S: Simd>(simd: S, weights: &mut [f32], total: &mut PartialRow<'_>) {
    let mut max = splat(simd, *total.max);
    for lanes in weights.chunks_exact(S::f32s::LEN) {
        max = max.max(S::f32s::from_slice(simd, lanes));
    }
    let max = max.reduce_max();
    if max > *total.max {
        let factor = (*total.max - max).exp2();
        *total.max = max;
        *total.norm *= factor;
        for lanes in total.sums.chunks_exact_mut(S::f32s::LEN) {
            (S::f32s::from_slice(simd, lanes) * splat(simd, factor)).store_slice(lanes);
        }
    }
    // Minus infinity minus itself would be NaN, and so would be all that follows.
    let max = splat(simd, if max == f32::NEG_INFINITY { 0.0 } else { max });
    let mut norm = splat(simd, 0.0);
    for lanes in weights.chunks_exact_mut(S::f32s::LEN) {
        let weights = exp2(simd, S::f32s::from_slice(simd, lanes) - max);
        norm += weights;
        weights.store_slice(lanes);
    }
    *total.norm += norm.reduce_sum();
}

/// Adds values times their weights in `R` rows.
#[inline(always)]
fn add<S: Simd, T: Lanes, const R: usize>(
    simd: S,
    weights: &mut [f32],
    values: &HeadRows<'_, T>,
    (sums, width): (&mut [f32], usize),
    ahead: &mut Chunks<'_, T>,
) {
    rescale::<S, T, R>(simd, weights, values);
    let (mut at, group) = (0, group_size::<S, T>());
    while at < values.head_dim {
        let (left, sums) = (values.head_dim - at, &mut sums[at..]);
        at += group
            * if most_groups::<S, T>() >= 4 && left >= 4 * group {
                add_groups::<S, T, R, 4, true>(simd, weights, values, at, (sums, width), ahead)
            } else if most_groups::<S, T>() >= 2 && left >= 2 * group {
                add_groups::<S, T, R, 2, true>(simd, weights, values, at, (sums, width), ahead)
            } else if left >= group {
                add_groups::<S, T, R, 1, true>(simd, weights, values, at, (sums, width), ahead)
            } else {
                add_groups::<S, T, R, 1, false>(simd, weights, values, at, (sums, width), ahead)
            };
    }
}

/// Adds `G` groups of the values times their weights in `R` rows.
#[inline(always)]
fn add_groups<S: Simd, T: Lanes, const R: usize, const G: usize, const WHOLE: bool>(
    simd: S,
    weights: &[f32],
    values: &HeadRows<'_, T>,
    at: usize,
    (sums, width): (&mut [f32], usize),
    ahead: &mut Chunks<'_, T>,
) -> usize {
    let (group, lanes) = (group_size::<S, T>(), S::f32s::LEN);
    let mut totals = [[T::zeros(simd); G]; R];
    for r in 0..R {
        for g in 0..G {
            for v in 0..T::VECTORS {
                let sums = &sums[r * width + g * group + v * lanes..][..lanes];
                totals[r][g].as_mut()[v] = S::f32s::from_slice(simd, sums);
            }
        }
    }
    for token in 0..values.len {
        if token % FETCH_EVERY == 0
            && let Some(elements) = ahead.next()
        {
            prefetch(elements);
        }
        let row = &values.row(token)[at..];
        for g in 0..G {
            let numbers = T::load::<S, WHOLE>(simd, &row[g * group..]);
            for r in 0..R {
                let weight = splat(simd, weights[r * TILE + token]);
                for v in 0..T::VECTORS {
                    let total = &mut totals[r][g].as_mut()[v];
                    *total = numbers.as_ref()[v].mul_add(weight, *total);
                }
            }
        }
    }
    for r in 0..R {
        for g in 0..G {
            for v in 0..T::VECTORS {
                let sums = &mut sums[r * width + g * group + v * lanes..][..lanes];
                totals[r][g].as_ref()[v].store_slice(sums);
            }
        }
    }
    G
}

#[inline(always)]
fn splat<S: Simd>(simd: S, x: f32) -> S::f32s {
    S::f32s::splat(simd, x)
}

/// 2 to the power of `x`, which is not above 0. Exactly 0 below -127; NaN stays NaN.
#[inline(always)]
fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    /// So large that a sum with it has no bits for less than 1.
    const ONES: f32 = 12_582_912.0;
    let least = splat(simd, -127.0);
    let x = x.simd_lt(least).select(least, x);
    let whole = x + splat(simd, ONES);
    let rest = x - (whole - splat(simd, ONES));
    // 2^rest for -0.5..0.5.
    let mut power = splat(simd, 1.540_353e-4);
    for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        power = power.mul_add(rest, splat(simd, c));
    }
    let exponent: S::u32s = whole.bitcast();
    let exponent: S::f32s = ((exponent + S::u32s::splat(simd, 127)) << 23).bitcast();
    power * exponent
}

/// The hyperbolic tangent.
#[inline(always)]
fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (one, magnitude) = (splat(simd, 1.0), x.abs());
    let power = exp2(simd, magnitude * splat(simd, -2.0 * LOG2_E));
    let large = ((one - power) / (one + power)).copysign(x);
    // Close to 0 the difference from 1 has few bits, but the Taylor series of `tanh(x) / x` is short.
    let square = x * x;
    let mut ratio = splat(simd, 62.0 / 2835.0);
    for c in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
        ratio = ratio.mul_add(square, splat(simd, c));
    }
    magnitude.simd_lt(splat(simd, 0.25)).select(x * ratio, large)
}
