//! What is known of a sequence's tokens.

use std::sync::Arc;

use crate::hash::{BlockKey, KeyChain};

/// The tokens that a sequence was allocated with and those that were committed behind them; with the
/// keys of its blocks, if it shares them.
#[derive(Clone, Debug)]
pub(crate) enum Known {
    /// Nobody asks for keys, and so none are made.
    Tokens(Vec<u32>),
    Chain(KeyChain),
    /// Somebody else may have the chain as well. It is copied before it changes.
    Shared(Arc<KeyChain>),
}

impl Known {
    pub(super) fn tokens(&self) -> &[u32] {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Chain(chain) => chain.tokens(),
            Self::Shared(chain) => chain.tokens(),
        }
    }

    /// Whether the sequence can have `len` tokens without a key more, and without a copy.
    pub(super) fn has_room_for(&self, len: usize) -> bool {
        match self {
            Self::Tokens(_) => true,
            Self::Chain(chain) => len < chain.next_key_at(),
            Self::Shared(_) => false,
        }
    }

    /// Of all full blocks, if the sequence shares them.
    pub(super) fn keys(&self) -> &[BlockKey] {
        match self {
            Self::Tokens(_) => &[],
            Self::Chain(chain) => chain.block_keys(),
            Self::Shared(chain) => chain.block_keys(),
        }
    }

    /// Of the blocks that a look-up may ask for.
    pub(super) fn reusable_keys(&self) -> &[BlockKey] {
        match self {
            Self::Tokens(_) => &[],
            Self::Chain(chain) => chain.reusable_keys(),
            Self::Shared(chain) => chain.reusable_keys(),
        }
    }

    pub(super) fn extend(&mut self, new: &[u32]) {
        if !new.is_empty() {
            self.change(|tokens| tokens.extend_from_slice(new), |chain| chain.extend(new));
        }
    }

    /// Shortens a sequence of `len` tokens, the last of which may be unknown.
    pub(super) fn cut(&mut self, len: usize, new_len: usize) {
        if new_len < len {
            self.change(|tokens| tokens.truncate(new_len), |chain| chain.cut(len, new_len));
        }
    }

    /// Takes tokens back as if they had never been there.
    pub(super) fn unextend(&mut self, new_len: usize) {
        if new_len < self.tokens().len() {
            self.change(|tokens| tokens.truncate(new_len), |chain| chain.unextend(new_len));
        }
    }

    #[inline]
    fn change(&mut self, tokens: impl FnOnce(&mut Vec<u32>), chain: impl FnOnce(&mut KeyChain)) {
        match self {
            Self::Tokens(own) => tokens(own),
            Self::Chain(own) => chain(own),
            Self::Shared(shared) => {
                let mut own = KeyChain::clone(shared);
                chain(&mut own);
                *self = Self::Chain(own);
            }
        }
    }
}

impl From<Arc<KeyChain>> for Known {
    fn from(chain: Arc<KeyChain>) -> Self {
        Arc::try_unwrap(chain).map_or_else(Self::Shared, Self::Chain)
    }
}
