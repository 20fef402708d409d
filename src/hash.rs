//! What names the content of a block: a SHA-256 chain over everything that decides it.
//!
//! ```text
//! root  = SHA-256("kvspan.root.v1"  || opt(namespace) || opt(cache_salt) || opt(lora_id) || epoch: u64)
//! key_i = SHA-256("kvspan.block.v1" || key_{i-1} (the root for the first) || block_size: u32
//!                                   || tokens: u32 each || number of extra keys: u32 || each of them)
//! ```
//!
//! Integers are little-endian. A string is its length as a u32 and its bytes. An optional field is
//! the byte 0, or the byte 1 and the field. Equal keys therefore mean equal tokens from the first on,
//! under the same root. All 32 bytes are kept and compared.

use std::collections::BTreeMap;
use std::fmt;

use sha2::block_api::compress256;
use sha2::{Digest, Sha256};

use crate::error::{KvError, Result};
use crate::ids::{lengthen, widen};

const ROOT_DOMAIN: &[u8] = b"kvspan.root.v1";
const BLOCK_DOMAIN: &[u8] = b"kvspan.block.v1";
/// Of a block without any: their number.
const NO_EXTRA_KEYS: &[u8] = &0_u32.to_le_bytes();

/// The key of a block's content and of all content before it, or of a [`KeyRoot`].
///
/// Made only from content, by [`KeyRoot::key`] and [`KeyChain`]. `Display` and `Debug` give it in
/// hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    /// The key of nothing, with which arrays are filled.
    pub(crate) const BLANK: Self = Self([0; 32]);

    /// A key that no content has.
    #[cfg(test)]
    pub(crate) const fn of(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first bytes as a number: a digest is its own hash.
    pub(crate) fn leading(&self) -> u64 {
        self.0.first_chunk().copied().map_or(0, u64::from_le_bytes)
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

/// What separates the sequences that may share blocks from those that may not.
///
/// Sequences share only under equal roots. A `cache_salt` for each tenant, chosen by the operator,
/// keeps tenants from finding out by timing what others have cached; the `epoch` is raised after a
/// change of the model's weights, to leave everything behind that was computed before.
///
/// # Examples
///
/// ```
/// use kvspan::KeyRoot;
///
/// let root = KeyRoot { cache_salt: Some(b"tenant-7"), ..KeyRoot::default() };
/// let other = KeyRoot { cache_salt: Some(b"tenant-8"), ..KeyRoot::default() };
/// assert_ne!(root.key()?, other.key()?);
///
/// // The keys never change between versions. Of the default:
/// assert_eq!(
///     KeyRoot::default().key()?.to_string(),
///     "e48d02c4087a4993b4926b7e33bd5832c2a9b1113af160512dca42afd4ecdb5a",
/// );
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeyRoot<'a> {
    /// What the keys and values depend on besides the tokens: the model, for example.
    pub namespace: Option<&'a [u8]>,
    /// A secret that only those know who may share.
    pub cache_salt: Option<&'a [u8]>,
    /// The adapter that was applied.
    pub lora_id: Option<&'a [u8]>,
    /// Raised to make everything older unreachable.
    pub epoch: u64,
}

impl KeyRoot<'_> {
    /// Returns the key that stands before a sequence's first block.
    ///
    /// # Errors
    ///
    /// [`KvError::TooLarge`] if a field has more bytes than a u32 can count.
    pub fn key(&self) -> Result<BlockKey> {
        let mut message = ROOT_DOMAIN.to_vec();
        for field in [self.namespace, self.cache_salt, self.lora_id] {
            message.push(u8::from(field.is_some()));
            if let Some(field) = field {
                push_bytes(&mut message, field)?;
            }
        }
        message.extend_from_slice(&self.epoch.to_le_bytes());
        Ok(BlockKey(Sha256::digest(&message).into()))
    }
}

/// The tokens of one sequence and the keys of its full blocks, each of which is computed once.
///
/// # Units
///
/// Positions and lengths are tokens, except that extra keys belong to a block, which is named by its
/// index in the sequence.
///
/// # Complexity
///
/// To grow by a block costs one SHA-256 over its tokens and 55 bytes more: two rounds of 64 bytes for
/// 16 tokens.
///
/// # Examples
///
/// ```
/// use kvspan::{KeyChain, KeyRoot};
///
/// let tokens: Vec<u32> = (0..40).collect();
/// let mut chain = KeyChain::new(KeyRoot::default().key()?, 16)?;
/// chain.extend(&tokens);
/// assert_eq!(chain.block_keys().len(), 2); // the third block is not full
/// assert_eq!(
///     chain.block_keys()[1].to_string(),
///     "e3e37746803d08980a8d56ee1ad27f9086baafc8c5291a999ab3167ff7fd3f4e",
/// );
///
/// // Equal beginnings have equal keys.
/// let mut other = KeyChain::new(KeyRoot::default().key()?, 16)?;
/// other.extend(&tokens[..20]);
/// assert_eq!(other.block_keys(), &chain.block_keys()[..1]);
/// # Ok::<(), kvspan::KvError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct KeyChain {
    root: BlockKey,
    /// At least 1.
    block_size: u32,
    tokens: Vec<u32>,
    /// One for each full block of `tokens`.
    keys: Vec<BlockKey>,
    /// By block index, already encoded, their number first. Only of blocks that have some.
    extra_keys: BTreeMap<usize, Vec<u8>>,
}

impl KeyChain {
    /// Makes the chain of a sequence that is still empty.
    ///
    /// # Errors
    ///
    /// [`KvError::InvalidConfig`] if `block_size` is 0, [`KvError::TooLarge`] if it is more than a
    /// u32 can hold.
    pub fn new(root: BlockKey, block_size: usize) -> Result<Self> {
        if block_size == 0 {
            return Err(KvError::InvalidConfig { field: "block_size" });
        }
        let block_size = as_u32("block_size", block_size)?;
        let (tokens, keys, extra_keys) = Default::default();
        Ok(Self { root, block_size, tokens, keys, extra_keys })
    }

    /// Appends tokens, and the keys of the blocks that they fill.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.add_keys();
    }

    /// The same of a list that the chain can keep, if it is still empty.
    pub(crate) fn start(&mut self, tokens: Vec<u32>) {
        if self.tokens.is_empty() {
            self.tokens = tokens;
            self.add_keys();
        } else {
            self.extend(&tokens);
        }
    }

    fn add_keys(&mut self) {
        let Self { block_size, tokens, keys, .. } = self;
        let unkeyed = &tokens[keys.len() * widen(*block_size)..];
        if unkeyed.len() < widen(*block_size) {
            return;
        }
        let unkeyed = unkeyed.chunks_exact(widen(*block_size));
        keys.reserve(unkeyed.len());
        let mut plain = Message::new(*block_size, NO_EXTRA_KEYS);
        let mut parent = *keys.last().unwrap_or(&self.root);
        for tokens in unkeyed {
            parent = match self.extra_keys.get(&keys.len()) {
                None => plain.key(&parent, tokens),
                Some(extra_keys) => Message::new(*block_size, extra_keys).key(&parent, tokens),
            };
            keys.push(parent);
        }
    }

    /// Shortens the sequence to `new_len` tokens.
    ///
    /// Extra keys of blocks that lose their last token are forgotten. A block that is cut keeps its
    /// own: that can cost a hit later, and can never cause a wrong one.
    ///
    /// # Errors
    ///
    /// [`KvError::RangeOutOfBounds`] if there are fewer tokens than `new_len`.
    pub fn truncate(&mut self, new_len: usize) -> Result<()> {
        let len = self.tokens.len();
        if new_len > len {
            return Err(KvError::RangeOutOfBounds { start: 0, end: new_len, len });
        }
        self.cut(len, new_len);
        Ok(())
    }

    /// Shortens a sequence of `len` tokens, the last of which may be unknown here.
    pub(crate) fn cut(&mut self, len: usize, new_len: usize) {
        let [first, end] = [new_len, len].map(|len| len.div_ceil(widen(self.block_size)));
        self.extra_keys.retain(|block_index, _| !(first..end).contains(block_index));
        self.unextend(new_len);
    }

    /// Takes tokens back as if they had never been there.
    pub(crate) fn unextend(&mut self, new_len: usize) {
        self.tokens.truncate(new_len);
        self.keys.truncate(new_len / widen(self.block_size));
    }

    /// Sets what else decides the content of a block: the digests of its images, for example.
    ///
    /// Replaces what was set for the block before. Their order counts.
    ///
    /// # Errors
    ///
    /// [`KvError::AlreadyKeyed`] if the block is full, [`KvError::TooLarge`] if a key has more bytes
    /// than a u32 can count.
    ///
    /// # Examples
    ///
    /// ```
    /// use kvspan::{KeyChain, KeyRoot, KvError};
    ///
    /// let mut cat = KeyChain::new(KeyRoot::default().key()?, 16)?;
    /// let mut dog = cat.clone();
    /// cat.set_extra_keys(0, &[b"digest of a cat"])?;
    /// dog.set_extra_keys(0, &[b"digest of a dog"])?;
    /// cat.extend(&[0; 16]);
    /// dog.extend(&[0; 16]);
    /// assert_ne!(cat.block_keys(), dog.block_keys());
    ///
    /// let late = cat.set_extra_keys(0, &[b"another"]);
    /// assert_eq!(late, Err(KvError::AlreadyKeyed { block_index: 0 }));
    /// # Ok::<(), KvError>(())
    /// ```
    pub fn set_extra_keys(
        &mut self,
        block_index: usize,
        extra_keys: &[impl AsRef<[u8]>],
    ) -> Result<()> {
        if block_index < self.keys.len() {
            return Err(KvError::AlreadyKeyed { block_index });
        }
        let count = as_u32("the number of extra keys", extra_keys.len())?;
        let mut encoded = count.to_le_bytes().to_vec();
        for key in extra_keys {
            push_bytes(&mut encoded, key.as_ref())?;
        }
        if extra_keys.is_empty() {
            self.extra_keys.remove(&block_index);
        } else {
            self.extra_keys.insert(block_index, encoded);
        }
        Ok(())
    }

    /// Returns the keys of the full blocks.
    pub fn block_keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// The number of tokens with which the next block is full.
    pub(crate) fn next_key_at(&self) -> usize {
        (self.keys.len() + 1) * widen(self.block_size)
    }

    /// Returns the keys that a look-up may ask for: those of whole blocks that leave at least one
    /// token to compute, since the last token's output is needed.
    pub fn reusable_keys(&self) -> &[BlockKey] {
        &self.keys[..self.tokens.len().saturating_sub(1) / widen(self.block_size)]
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the tokens of a block.
    pub fn block_size(&self) -> usize {
        widen(self.block_size)
    }
}

/// Prints the lengths, never the tokens.
impl fmt::Debug for KeyChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyChain")
            .field("root", &self.root)
            .field("block_size", &self.block_size)
            .field("num_tokens", &self.tokens.len())
            .field("num_keys", &self.keys.len())
            .finish_non_exhaustive()
    }
}

/// What is hashed for one block, padded as SHA-256 wants it.
///
/// ```text
/// | domain | parent | block_size | tokens | extra keys | padding |
/// ```
///
/// Only parent and tokens differ from block to block. To pad once, and not in each call, takes 16,384
/// tokens in blocks of 16 from 101 to 86 us (`cargo bench --bench blocks -- keys`).
struct Message {
    chunks: Vec<[u8; 64]>,
    block_size: usize,
}

impl Message {
    const PARENT_AT: usize = BLOCK_DOMAIN.len();
    const BLOCK_SIZE_AT: usize = Self::PARENT_AT + size_of::<BlockKey>();
    const TOKENS_AT: usize = Self::BLOCK_SIZE_AT + size_of::<u32>();
    /// What SHA-256 starts from.
    const INITIAL: [u32; 8] = [
        0x6a09_e667,
        0xbb67_ae85,
        0x3c6e_f372,
        0xa54f_f53a,
        0x510e_527f,
        0x9b05_688c,
        0x1f83_d9ab,
        0x5be0_cd19,
    ];

    /// With a parent and tokens that are still to come.
    fn new(block_size: u32, extra_keys: &[u8]) -> Self {
        let tokens_end = Self::TOKENS_AT + widen(block_size) * size_of::<u32>();
        let len = tokens_end + extra_keys.len();
        let num_bits = lengthen(len) * 8;
        let mut chunks = vec![[0; 64]; (len + 1 + size_of_val(&num_bits)).div_ceil(64)];
        let bytes = chunks.as_flattened_mut();
        bytes[..Self::PARENT_AT].copy_from_slice(BLOCK_DOMAIN);
        bytes[Self::BLOCK_SIZE_AT..Self::TOKENS_AT].copy_from_slice(&block_size.to_le_bytes());
        bytes[tokens_end..len].copy_from_slice(extra_keys);
        bytes[len] = 0x80;
        if let Some(end) = bytes.last_chunk_mut() {
            *end = num_bits.to_be_bytes();
        }
        Self { chunks, block_size: widen(block_size) }
    }

    fn key(&mut self, parent: &BlockKey, tokens: &[u32]) -> BlockKey {
        let bytes = self.chunks.as_flattened_mut();
        bytes[Self::PARENT_AT..Self::BLOCK_SIZE_AT].copy_from_slice(&parent.0);
        let (places, _) = bytes[Self::TOKENS_AT..].as_chunks_mut();
        for (place, token) in places[..self.block_size].iter_mut().zip(tokens) {
            *place = token.to_le_bytes();
        }
        let mut state = Self::INITIAL;
        compress256(&mut state, &self.chunks);
        let mut key = BlockKey::BLANK;
        let (words, _) = key.0.as_chunks_mut();
        for (word, number) in words.iter_mut().zip(state) {
            *word = number.to_be_bytes();
        }
        key
    }
}

fn push_bytes(message: &mut Vec<u8>, field: &[u8]) -> Result<()> {
    let len = as_u32("the number of bytes of a key field", field.len())?;
    message.extend_from_slice(&len.to_le_bytes());
    message.extend_from_slice(field);
    Ok(())
}

fn as_u32(what: &'static str, given: usize) -> Result<u32> {
    u32::try_from(given).map_err(|_| KvError::TooLarge { what, given, max: widen(u32::MAX) })
}
