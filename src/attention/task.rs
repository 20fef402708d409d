//! What is computed in one go, and how the results are put together.

use std::f32::consts::LOG2_E;
use std::mem;
use std::ops::Range;

use parking_lot::Mutex;

use super::context::Context;
use super::zeros;
use crate::error::Result;

/// Tokens whose scores are made before any of their values are read: a multiple of any number of lanes.
pub(super) const TILE: usize = 128;

/// Some query tokens of a sequence, and the results for slices of what they attend to.
#[derive(Debug)]
pub(super) struct QueryBlock<'a> {
    num_slices: usize,
    done: Mutex<Done<'a>>,
}

#[derive(Debug)]
struct Done<'a> {
    /// Of the slices that are computed, with where these begin.
    partials: Vec<(usize, Partial)>,
    /// Where the result of all goes.
    out: &'a mut [f32],
}

/// Some query tokens of a sequence, and some of the tokens they attend to.
#[derive(Clone, Debug)]
pub(super) struct Task<'a> {
    pub(super) context: &'a Context<'a>,
    /// `[q_tokens, num_q_heads, head_dim]`.
    pub(super) query: &'a [f32],
    pub(super) num_q_heads: usize,
    /// Where the first query token is in the sequence; `None` if all see all.
    pub(super) position: Option<usize>,
    /// How many tokens a query token sees at most.
    pub(super) window: usize,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// The tokens to attend to, of those that are seen.
    pub(super) tokens: Range<usize>,
}

/// One, two or four rows of a KV head that see the same tokens.
#[derive(Clone, Debug)]
pub(super) struct RowBlock {
    pub(super) first: usize,
    pub(super) num_rows: usize,
    /// At least one.
    pub(super) tokens: Range<usize>,
}

/// Softmax and weighted sum over the tokens of a task, before the division. A row is one head of one
/// query token; rows are in the order `[num_kv_heads, q_tokens, group_size]`.
#[derive(Debug)]
pub(super) struct Partial {
    /// The largest score of a row. Scores are exponents of 2.
    pub(super) max: Vec<f32>,
    /// The sum of the weights of a row, where the largest score has the weight 1.
    pub(super) norm: Vec<f32>,
    /// The sum of the values times their weights: `width` elements a row, of which `head_dim` count.
    pub(super) sums: Vec<f32>,
    pub(super) width: usize,
}

/// The same for one row.
pub(super) struct PartialRow<'a> {
    pub(super) max: &'a mut f32,
    pub(super) norm: &'a mut f32,
    pub(super) sums: &'a mut [f32],
}

impl Partial {
    /// Of no tokens.
    ///
    /// # Errors
    ///
    /// `OutOfMemory`
    pub(super) fn new(num_rows: usize, width: usize) -> Result<Self> {
        let [mut max, norm, sums] = [zeros(num_rows)?, zeros(num_rows)?, zeros(num_rows * width)?];
        max.fill(f32::NEG_INFINITY);
        Ok(Self { max, norm, sums, width })
    }

    pub(super) fn row(&mut self, row: usize) -> PartialRow<'_> {
        PartialRow {
            max: &mut self.max[row],
            norm: &mut self.norm[row],
            sums: &mut self.sums[row * self.width..][..self.width],
        }
    }
}

impl<'a> QueryBlock<'a> {
    pub(super) fn new(num_slices: usize, out: &'a mut [f32]) -> Self {
        Self { num_slices, done: Mutex::new(Done { partials: Vec::new(), out }) }
    }

    /// Takes the result of one of its slices, and with the last of them puts all together.
    pub(super) fn finish(&self, task: &Task<'_>, partial: Partial) {
        let mut done = self.done.lock();
        done.partials.push((task.tokens.start, partial));
        if done.partials.len() == self.num_slices {
            let mut partials = mem::take(&mut done.partials);
            partials.sort_unstable_by_key(|&(start, _)| start);
            task.merge(&partials, done.out);
        }
    }
}

impl<'a> Task<'a> {
    /// Divides the task into at most so many for parts of the tokens.
    ///
    /// That does not depend on the number of threads, and so nor does any result.
    pub(super) fn slices(self, at_most: usize) -> impl Iterator<Item = Task<'a>> {
        /// What is worth its own task.
        const LEAST: usize = 4 * TILE;
        let last = self.num_q_tokens().saturating_sub(1);
        let Range { start, end } = self.seen(0).start..self.seen(last).end;
        let len = (end - start).div_ceil(at_most).next_multiple_of(TILE).max(LEAST);
        (start..end)
            .step_by(len)
            .map(move |start| Self { tokens: start..end.min(start + len), ..self.clone() })
    }

    /// What the query token of this index sees.
    fn seen(&self, index: usize) -> Range<usize> {
        let end = self.position.map_or(self.context.len(), |position| position + index + 1);
        end.saturating_sub(self.window)..end
    }

    /// Query heads of a KV head.
    fn group_size(&self) -> usize {
        self.num_q_heads / self.context.num_heads()
    }

    fn num_q_tokens(&self) -> usize {
        self.query.len() / (self.num_q_heads * self.context.head_dim())
    }

    /// Rows of a KV head.
    pub(super) fn num_rows(&self) -> usize {
        self.num_q_tokens() * self.group_size()
    }

    /// The query in rows of `width`, of which zeros fill the rest, so that the product with a key is the
    /// score: an exponent of 2, or of e if there is a soft cap to go through first.
    ///
    /// # Errors
    ///
    /// `OutOfMemory`
    pub(super) fn scaled_query(&self, width: usize) -> Result<Vec<f32>> {
        let base = if self.softcap.is_none() { LOG2_E } else { 1.0 };
        let mut rows = zeros(self.query.len() / self.context.head_dim() * width)?;
        for (row, place) in rows.chunks_mut(width).zip(self.places()) {
            for (x, q) in row.iter_mut().zip(&self.query[place]) {
                // One after the other, since the product of both can be infinite.
                *x = q * self.scale * base;
            }
        }
        Ok(rows)
    }

    /// Blocks of the rows of any KV head.
    pub(super) fn row_blocks(&self, tile: &Range<usize>, blocks: &mut Vec<RowBlock>) {
        blocks.clear();
        let seen = |row| intersection(&self.seen(row / self.group_size()), tile);
        let mut first = 0;
        while first < self.num_rows() {
            let tokens = seen(first);
            let rows = (first..self.num_rows()).take(4);
            let num_rows = match rows.take_while(|&row| seen(row) == tokens).count() {
                3 => 2,
                count => count,
            };
            if !tokens.is_empty() {
                blocks.push(RowBlock { first, num_rows, tokens });
            }
            first += num_rows;
        }
    }

    /// Where the rows are in the query, and in the output.
    fn places(&self) -> impl Iterator<Item = Range<usize>> {
        let (group_size, head_dim) = (self.group_size(), self.context.head_dim());
        let (num_q_heads, num_q_tokens) = (self.num_q_heads, self.num_q_tokens());
        (0..num_q_heads).step_by(group_size).flat_map(move |first| {
            (0..num_q_tokens).flat_map(move |token| {
                (first..first + group_size).map(move |head| {
                    let place = (token * num_q_heads + head) * head_dim;
                    place..place + head_dim
                })
            })
        })
    }

    /// Puts the results for all slices together, which are in order.
    fn merge(&self, partials: &[(usize, Partial)], out: &mut [f32]) {
        for (row, place) in self.places().enumerate() {
            let largest = partials.iter().map(|(_, part)| part.max[row]);
            let max = largest.fold(f32::NEG_INFINITY, f32::max);
            let out = &mut out[place];
            out.fill(0.0);
            let mut norm = 0.0;
            for (_, part) in partials {
                let weight = (part.max[row] - max).exp2();
                norm += part.norm[row] * weight;
                for (x, sum) in out.iter_mut().zip(&part.sums[row * part.width..]) {
                    *x += sum * weight;
                }
            }
            for x in out {
                *x /= norm;
            }
        }
    }
}

/// What two ranges have in common; if nothing, an empty range inside the second.
pub(super) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}
