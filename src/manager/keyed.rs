//! Sequences whose keys are known, so that a scheduler that asks first hashes once.

use std::sync::Arc;

use super::{KvCacheManager, RequestOptions};
use crate::dtype::Element;
use crate::error::{KvError, Result};
use crate::handle::{Known, NewSequence, PagedKvCacheHandle};
use crate::hash::KeyChain;

/// A sequence to start whose [keys](KvCacheManager::block_keys) are known.
#[derive(Clone, Debug)]
pub struct KeyedRequest<'a> {
    /// Its tokens and their keys. They say all that a salt, an adapter or extra keys would say.
    pub chain: Arc<KeyChain>,
    /// A name, as in [`RequestOptions`].
    pub request_id: Option<&'a str>,
    /// Tokens to have blocks for beyond those of the chain.
    pub lookahead: usize,
}

/// The tokens of a sequence to start.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    /// Whose keys are made with the options of the request.
    Tokens(Vec<u32>),
    Keyed(Arc<KeyChain>),
}

impl KeyedRequest<'_> {
    /// Makes one without a name and without lookahead.
    ///
    /// A chain that others have as well is shared, and copied when the sequence commits more tokens.
    pub fn new(chain: impl Into<Arc<KeyChain>>) -> Self {
        Self { chain: chain.into(), request_id: None, lookahead: 0 }
    }
}

impl<T: Element> KvCacheManager<T> {
    /// Returns `tokens` with the keys of their full blocks, for calls that would otherwise hash them
    /// each time.
    ///
    /// The name and the lookahead do not matter here. The keys are those of the
    /// [epoch](Self::epoch) of now, whenever they are used.
    ///
    /// # Errors
    ///
    /// [`KvError::TooLarge`] as in [`allocate`](Self::allocate).
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KeyedRequest, KvCacheManager, KvCacheManagerConfig, RequestOptions};
    ///
    /// let manager = KvCacheManager::new(KvCacheManagerConfig::default())?;
    /// let chain = manager.block_keys(&[7; 100], &RequestOptions::default())?;
    /// if manager.probe_keyed(&chain)? == 0 {
    ///     // Worth to wait for another sequence that computes the same?
    /// }
    /// let handle = manager.allocate_keyed(KeyedRequest::new(chain))?;
    /// assert_eq!(handle.tokens(), [7; 100]);
    /// # Ok::<(), kvspan::KvError>(())
    /// ```
    pub fn block_keys(&self, tokens: &[u32], options: &RequestOptions<'_>) -> Result<KeyChain> {
        self.chain(tokens.to_vec(), options)
    }

    pub(crate) fn chain(&self, tokens: Vec<u32>, options: &RequestOptions<'_>) -> Result<KeyChain> {
        let mut chain = self.config.chain(options, self.epoch())?;
        chain.start(tokens);
        Ok(chain)
    }

    /// Starts a sequence, as [`allocate`](Self::allocate) does.
    ///
    /// # Errors
    ///
    /// [`KvError::BlockSizeMismatch`] if the keys are those of another manager, with blocks of another
    /// size; [`KvError::OutOfBlocks`]; [`KvError::RequestExists`] if the name is taken.
    pub fn allocate_keyed(&self, request: KeyedRequest<'_>) -> Result<PagedKvCacheHandle<T>> {
        self.open(self.keyed(request)?)
    }

    /// Returns how many of the tokens would be cached, without any effect.
    ///
    /// # Errors
    ///
    /// [`KvError::BlockSizeMismatch`] as in [`allocate_keyed`](Self::allocate_keyed).
    pub fn probe_keyed(&self, chain: &KeyChain) -> Result<usize> {
        self.check_block_size(chain)?;
        if !self.config.prefix_caching {
            return Ok(0);
        }
        Ok(self.store.probe(chain.reusable_keys()) * self.config.block_size)
    }

    #[cfg(feature = "python")]
    pub(crate) fn allocate_prompt(
        &self,
        prompt: Prompt,
        options: &RequestOptions<'_>,
    ) -> Result<PagedKvCacheHandle<T>> {
        self.open(self.new_sequence(prompt, options)?)
    }

    #[cfg(feature = "python")]
    pub(crate) fn probe_prompt(
        &self,
        prompt: Prompt,
        options: &RequestOptions<'_>,
    ) -> Result<usize> {
        match prompt {
            Prompt::Keyed(chain) => self.probe_keyed(&chain),
            Prompt::Tokens(_) if !self.config.prefix_caching => Ok(0),
            Prompt::Tokens(tokens) => self.probe_keyed(&self.chain(tokens, options)?),
        }
    }

    pub(super) fn keyed<'a>(&self, request: KeyedRequest<'a>) -> Result<NewSequence<'a>> {
        let KeyedRequest { chain, request_id, lookahead } = request;
        let options = RequestOptions { request_id, lookahead, ..RequestOptions::default() };
        self.new_sequence(Prompt::Keyed(chain), &options)
    }

    /// What to start a sequence with.
    pub(crate) fn new_sequence<'a>(
        &self,
        prompt: Prompt,
        options: &RequestOptions<'a>,
    ) -> Result<NewSequence<'a>> {
        let known = match prompt {
            Prompt::Tokens(tokens) if self.config.prefix_caching => {
                Known::Chain(self.chain(tokens, options)?)
            }
            Prompt::Tokens(tokens) => Known::Tokens(tokens),
            Prompt::Keyed(chain) => {
                self.check_block_size(&chain)?;
                if self.config.prefix_caching {
                    chain.into()
                } else {
                    Known::Tokens(chain.tokens().to_vec())
                }
            }
        };
        let RequestOptions { request_id, lookahead, .. } = *options;
        Ok(NewSequence { known, lookahead, request_id })
    }

    fn check_block_size(&self, chain: &KeyChain) -> Result<()> {
        let (given, wanted) = (chain.block_size(), self.config.block_size);
        if given == wanted { Ok(()) } else { Err(KvError::BlockSizeMismatch { given, wanted }) }
    }
}
