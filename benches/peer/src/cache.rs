//! The calls that both caches have, and a cache filled for measuring.

use std::ops::{Deref, DerefMut, Range};

/// The shape of a cache.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub capacity: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Shape {
    pub fn width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// What both caches can do, under the names they share.
pub trait Cache: Send + Sync {
    fn empty(shape: Shape) -> Self;
    fn initialize(&self, tokens: usize);
    fn write_kv(&self, token: usize, keys: &[f32], values: &[f32]);
    fn write_kv_batch(&self, entries: &[(usize, &[f32], &[f32])]);
    fn with_read_kv<R>(&self, token: usize, f: impl FnOnce(&[f32], &[f32]) -> R) -> R;
    fn with_read_range<R>(&self, tokens: usize, f: impl FnOnce(&[f32], &[f32]) -> R) -> R;
    fn read_range_into(&self, tokens: usize, keys: &mut [f32], values: &mut [f32]);

    /// Makes `tokens` the length where the cache can do that, so that later writes append.
    fn shorten(&self, tokens: usize);
}

macro_rules! shared_calls {
    ($krate:ident, $shorten:expr) => {
        impl Cache for $krate::LayerKvCache {
            fn empty(shape: Shape) -> Self {
                Self::new($krate::KVCacheConfig {
                    max_tokens_per_seq: shape.capacity,
                    num_heads: shape.heads,
                    hidden_dim_per_head: shape.head_dim,
                })
            }

            fn initialize(&self, tokens: usize) {
                self.initialize(tokens).unwrap();
            }

            fn write_kv(&self, token: usize, keys: &[f32], values: &[f32]) {
                self.write_kv(token, keys, values).unwrap();
            }

            fn write_kv_batch(&self, entries: &[(usize, &[f32], &[f32])]) {
                self.write_kv_batch(entries).unwrap();
            }

            fn with_read_kv<R>(&self, token: usize, f: impl FnOnce(&[f32], &[f32]) -> R) -> R {
                self.with_read_kv(token, f).unwrap()
            }

            fn with_read_range<R>(&self, tokens: usize, f: impl FnOnce(&[f32], &[f32]) -> R) -> R {
                self.with_read_range(0, tokens, |span| f(span.keys, span.values)).unwrap()
            }

            fn read_range_into(&self, tokens: usize, keys: &mut [f32], values: &mut [f32]) {
                self.read_range_into(0, tokens, keys, values).unwrap();
            }

            fn shorten(&self, tokens: usize) {
                let shorten: fn(&Self, usize) = $shorten;
                shorten(self, tokens);
            }
        }
    };
}

shared_calls!(kvspan, |cache, tokens| cache.truncate(tokens).unwrap());
// The original has no way to shorten. It takes the same lock and copies the same bytes whether the
// token it writes is new or not, so the work stays equal.
shared_calls!(ghostlink_core, |_, _| ());

/// A cache whose every row has been written, with numbers that are not zero.
pub fn filled<C: Cache>(shape: Shape) -> C {
    let cache = C::empty(shape);
    cache.initialize(1);
    let (keys, values) = (numbers(shape.width(), 1), numbers(shape.width(), 2));
    for token in 0..shape.capacity {
        cache.write_kv(token, &keys, &values);
    }
    cache
}

/// Numbers that are not zero, for zeros are faster to move than data on some machines.
pub fn numbers(len: usize, seed: usize) -> Numbers {
    let numbers = (1..=251_u8).map(f32::from).cycle().skip(seed % 251);
    let elements = numbers.take(len + PAGE).collect::<Vec<_>>();
    let start =
        elements.as_ptr().align_offset(PAGE_BYTES) + (PAGE_BYTES / 2 + 64) / size_of::<f32>();
    Numbers { elements, range: start..start + len }
}

/// Elements of twice a page.
const PAGE: usize = 2 * PAGE_BYTES / size_of::<f32>();
const PAGE_BYTES: usize = 4096;

/// Numbers at a fixed place within a page, a little past its middle.
///
/// The caches' rows begin at the start of a page or 16 bytes after it. Copies of 2 KiB and more are
/// up to 25 times slower on some machines (AMD Zen 3 and 4 with glibc before 2.39) if the target
/// begins less than 32 bytes after the source, modulo the page; where the allocator puts a plain
/// `Vec`, chance would decide about that.
pub struct Numbers {
    elements: Vec<f32>,
    range: Range<usize>,
}

impl Deref for Numbers {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.elements[self.range.clone()]
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.elements[self.range.clone()]
    }
}

/// Sums in as many lanes as the registers hold, so that memory is what limits it.
pub fn sum(elements: &[f32]) -> f32 {
    let (chunks, rest) = elements.as_chunks::<32>();
    let mut lanes = [0.0; 32];
    for chunk in chunks {
        for (lane, element) in lanes.iter_mut().zip(chunk) {
            *lane += element;
        }
    }
    lanes.iter().chain(rest).sum()
}
