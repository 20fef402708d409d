//! The one error type of the crate.
//!
//! Every variant carries the numbers that a caller needs to say what went wrong, and every failed
//! call leaves the cache as it was.

use std::ops::Range;

/// What went wrong; the numbers are tokens unless a name says otherwise.
///
/// `Display` gives one lower-case line. Code that still returns `Result<_, String>` can use `?` on
/// a [`Result`], since a `KvError` converts into its text.
///
/// ```
/// use kvspan::{KVCacheConfig, LayerKvCache};
///
/// fn first_key(cache: &LayerKvCache) -> Result<f32, String> {
///     Ok(cache.with_read_kv(0, |keys, _| keys[0])?)
/// }
///
/// let cache = LayerKvCache::new(KVCacheConfig::default());
/// assert_eq!(first_key(&cache).unwrap_err(), "token 0 is out of range: 0 tokens are stored");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A dimension of the geometry is zero; reported at the first use of the cache.
    #[error("{field} must be at least 1, but it is 0")]
    InvalidConfig {
        /// Name of the field of the configuration.
        field: &'static str,
    },

    /// The buffer that the configuration asks for has a size that no address space can hold.
    #[error(
        "the size of the cache overflows: 2 x {capacity} tokens x {num_heads} heads x {head_dim} \
         elements of {itemsize} bytes"
    )]
    SizeOverflow {
        /// Tokens the cache would hold.
        capacity: usize,
        /// KV heads of a token.
        num_heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Bytes of an element.
        itemsize: usize,
    },

    /// The blocks that the configuration asks for have a size that no address space can hold.
    #[error(
        "the size of the blocks overflows: 2 x {} blocks x {} tokens x {} layers x {} heads x \
         {} elements of {itemsize} bytes",
        .factors[0], .factors[1], .factors[2], .factors[3], .factors[4]
    )]
    PoolSizeOverflow {
        /// Blocks that sequences would have, tokens of a block, layers of the model, KV heads of a token,
        /// and elements of a head. In a box, for every result is as large as the largest error.
        factors: Box<[usize; 5]>,
        /// Bytes of an element.
        itemsize: usize,
    },

    /// The system does not give the memory.
    #[error("cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },

    /// `initialize` was asked for no tokens.
    #[error("cannot initialize a cache with 0 tokens: at least 1 is wanted")]
    EmptyInitialize,

    /// A write came before `initialize`.
    #[error("the cache is not initialized: call initialize first")]
    NotInitialized,

    /// Keys and values have different lengths.
    #[error("keys have {keys} elements but values have {values}: both must be the same")]
    LengthMismatch {
        /// Elements of the keys.
        keys: usize,
        /// Elements of the values.
        values: usize,
    },

    /// A row does not have the width of a token.
    #[error("got {given} elements, but a token has {width} (num_heads x head_dim)")]
    WidthMismatch {
        /// Elements given.
        given: usize,
        /// Elements of one token.
        width: usize,
    },

    /// Numbers that are to be stored with a scale are infinite or NaN, so that there is no scale.
    #[error("the {plane} of token {token} of the input have an infinity or NaN in head {head}")]
    NotFinite {
        /// `keys` or `values`.
        plane: &'static str,
        /// The first such token, counted from the start of what was given.
        token: usize,
        /// The first such head of it.
        head: usize,
    },

    /// An entry of a batch is wrong; no entry of that batch was written.
    #[error("entry {index} of the batch: {source}")]
    BatchEntry {
        /// Position of the entry in the batch.
        index: usize,
        /// What is wrong with it.
        source: Box<KvError>,
    },

    /// A write or an append does not fit.
    #[error("tokens {}..{} do not fit: the capacity is {capacity} tokens", .range.start, .range.end)]
    CapacityExceeded {
        /// The tokens that would have been written.
        range: Range<usize>,
        /// Tokens the cache can hold.
        capacity: usize,
    },

    /// A token that is not stored was read.
    #[error("token {token} is out of range: {len} tokens are stored")]
    TokenOutOfRange {
        /// The token asked for.
        token: usize,
        /// Tokens stored.
        len: usize,
    },

    /// A range ends before it starts.
    #[error("the range {start}..{end} ends before it starts")]
    InvertedRange {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
    },

    /// A range, or a new length, goes past the stored tokens.
    #[error("the range {start}..{end} is out of bounds: {len} tokens are stored")]
    RangeOutOfBounds {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
        /// Tokens stored.
        len: usize,
    },

    /// A buffer to read into is too short.
    #[error("the buffer for the {plane} has {given} elements, but {wanted} are needed")]
    OutputTooShort {
        /// `keys` or `values`.
        plane: &'static str,
        /// Elements of the buffer.
        given: usize,
        /// Elements needed.
        wanted: usize,
    },

    /// A view of these tokens is alive, so that they can not change.
    #[error("tokens {}..{} can not change: {pins} view(s) of them are alive", .range.start, .range.end)]
    Pinned {
        /// The tokens that the call would have changed.
        range: Range<usize>,
        /// Views that overlap them.
        pins: usize,
    },

    /// Rows past the length are reserved, and only their reservation can publish or give them up.
    #[error(
        "tokens {}..{} are reserved: commit or discard the reservation first",
        .range.start, .range.end
    )]
    Reserved {
        /// The reserved tokens.
        range: Range<usize>,
    },

    /// The call would wait for a read closure that this thread is in.
    #[error("a read closure of this cache is running on this thread: the write would wait for it")]
    WouldDeadlock,

    /// The time given to a call ran out before the tokens were free to change.
    #[error("timed out: tokens {}..{} are still in use by {}", .range.start, .range.end, users(*pins))]
    Timeout {
        /// The tokens that the call would have changed.
        range: Range<usize>,
        /// Views that overlap them; 0 if it was a closure or another write.
        pins: usize,
    },

    /// A number is larger than this crate can count.
    #[error("{what} is {given}, but it can be at most {max}")]
    TooLarge {
        /// What the number is.
        what: &'static str,
        /// The number.
        given: usize,
        /// The largest possible one.
        max: usize,
    },

    /// There are not enough blocks; none was taken.
    #[error(
        "out of blocks: {needed} needed, but {free} are free and {evictable} evictable ({pinned} \
         more are only kept by views)"
    )]
    OutOfBlocks {
        /// Blocks that the call had to take.
        needed: usize,
        /// Blocks without an owner and without content.
        free: usize,
        /// Cached blocks without an owner that the call could take.
        evictable: usize,
        /// Blocks that nobody but a view keeps, and that come free when it is gone.
        pinned: usize,
    },

    /// There is no block of this number in the pool.
    #[error("there is no block {block}: the blocks are 1 to {num_blocks}")]
    UnknownBlock {
        /// The block id.
        block: u32,
        /// Blocks in the pool.
        num_blocks: usize,
    },

    /// A block is not in a state that allows the call; to give a block back twice ends here.
    #[error("block {block} is {state}, but it must be {wanted}")]
    WrongBlockState {
        /// The block id.
        block: u32,
        /// What it is.
        state: &'static str,
        /// What it would have to be.
        wanted: &'static str,
    },

    /// A block can stand in a block table only once.
    #[error("block {block} would be in the block table twice")]
    DuplicateBlock {
        /// The block id.
        block: u32,
    },

    /// A sequence does not have that many blocks.
    #[error("the sequence has no block at index {block_index}: it has {num_blocks}")]
    BlockIndexOutOfRange {
        /// Position of the block in its sequence.
        block_index: usize,
        /// Blocks of the sequence.
        num_blocks: usize,
    },

    /// The public fields of a block table contradict each other.
    #[error("the block table is inconsistent: {reason}")]
    InconsistentTable {
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The slot of a token is too large a number.
    #[error("the slot of token {token} overflows")]
    SlotOverflow {
        /// Position of the token.
        token: usize,
    },

    /// The key of a block is made, so that what goes into it can not change.
    #[error("block {block_index} of the sequence has its key already")]
    AlreadyKeyed {
        /// Position of the block in its sequence.
        block_index: usize,
    },

    /// The epoch is the largest number that there is.
    #[error("the epoch is {epoch}, and can not be raised")]
    LastEpoch {
        /// The epoch.
        epoch: u64,
    },

    /// The prefix index can not be emptied while blocks are in use.
    #[error("the prefix cache can not be reset: {in_use} blocks are in use, or pinned by views")]
    BlocksInUse {
        /// How many.
        in_use: usize,
    },

    /// A model does not have that many layers.
    #[error("there is no layer {layer}: there are {num_layers}")]
    LayerOutOfRange {
        /// The layer asked for.
        layer: usize,
        /// Layers that there are.
        num_layers: usize,
    },

    /// The caches of a model's layers do not have the same shape, or not the same element type.
    #[error("layer {layer} does not have the shape and element type of layer 0")]
    LayersDiffer {
        /// The first layer that differs.
        layer: usize,
    },

    /// A call for many sequences was given lists of different lengths.
    #[error("got {given} {what}, but there are {wanted} sequences")]
    CountMismatch {
        /// What there is a wrong number of.
        what: &'static str,
        /// How many were given.
        given: usize,
        /// How many there must be.
        wanted: usize,
    },

    /// The sequence of a handle was freed, so that the handle is of no use any more.
    #[error("the handle {cache_id} is stale: its sequence was freed")]
    StaleHandle {
        /// What the handle was called.
        cache_id: String,
    },

    /// A handle was given twice in one call.
    #[error("the handle {cache_id} is given twice")]
    DuplicateHandle {
        /// What the handle is called.
        cache_id: String,
    },

    /// A handle belongs to another manager.
    #[error("the handle {cache_id} belongs to another manager")]
    ForeignHandle {
        /// What the handle is called.
        cache_id: String,
    },

    /// Keys were made for blocks of another size.
    #[error("the keys are of blocks of {given} tokens, but the manager has blocks of {wanted}")]
    BlockSizeMismatch {
        /// Tokens of a block of the keys.
        given: usize,
        /// Tokens of a block of the manager.
        wanted: usize,
    },

    /// A request that is still alive has this name.
    #[error("there is a live request {request_id:?} already")]
    RequestExists {
        /// The name.
        request_id: String,
    },

    /// Requests of one call have the same name.
    #[error("the request {request_id:?} is there twice in one call")]
    DuplicateRequest {
        /// The name.
        request_id: String,
    },

    /// No live request has this name; to free a request twice ends here.
    #[error("there is no live request {request_id:?}")]
    UnknownRequest {
        /// The name.
        request_id: String,
    },

    /// More tokens are to be committed than the sequence has.
    #[error(
        "tokens {}..{} can not be committed: the sequence has {len}; make room with extend first",
        .range.start, .range.end
    )]
    NoRoomToCommit {
        /// The tokens that would have been committed.
        range: Range<usize>,
        /// Tokens of the sequence.
        len: usize,
    },

    /// A token that is to be committed is another one than the sequence began with.
    #[error("the token at position {token} is not the one that the sequence was allocated with")]
    TokenMismatch {
        /// Position of the token in the sequence.
        token: usize,
    },

    /// The manager keeps count of blocks only, and has no memory for their content.
    #[error("the manager has no storage: it keeps count of blocks alone")]
    NoStorage,

    /// A block would have to be copied elsewhere, of which nobody would learn.
    #[error(
        "block {block} has to be copied where its content is, since the manager has no storage, but \
         the call does not report copies"
    )]
    UnreportedCopy {
        /// The block id.
        block: u32,
    },

    /// Arrays that belong together do not fit.
    #[error("{what}: {given} were given, but there must be {wanted}")]
    ShapeMismatch {
        /// What there is a wrong number of.
        what: &'static str,
        /// How many were given.
        given: usize,
        /// How many there must be.
        wanted: usize,
    },

    /// Keys and values have different element types.
    #[error("the values are {given}, but the keys are {wanted}")]
    DTypeMismatch {
        /// The type of the values.
        given: &'static str,
        /// The type of the keys.
        wanted: &'static str,
    },

    /// Query heads can not be divided equally among the KV heads.
    #[error("{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads")]
    HeadsNotGrouped {
        /// Query heads of a token.
        num_q_heads: usize,
        /// KV heads of a token.
        num_kv_heads: usize,
    },

    /// There are no tokens to attend to.
    #[error("there is nothing to attend to: the sequence has no tokens")]
    NothingToAttend,

    /// The last tokens of a sequence can not be more than the sequence has.
    #[error("the query has {q_tokens} tokens, but only {len} are stored")]
    QueryTooLong {
        /// Tokens of the query.
        q_tokens: usize,
        /// Tokens stored.
        len: usize,
    },

    /// An option of attention makes no sense.
    #[error("{option} must be {wanted}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What it must be.
        wanted: &'static str,
    },

    /// The system does not give the threads.
    #[error("cannot start {num_threads} threads")]
    NoThreads {
        /// How many were asked for, the caller's among them.
        num_threads: usize,
    },

    /// The bookkeeping contradicts itself, which is a bug in this crate.
    #[error(
        "the bookkeeping is corrupted: {what} should be {recorded}, but {counted} were counted"
    )]
    Corrupted {
        /// What was counted.
        what: &'static str,
        /// The number on record.
        recorded: usize,
        /// The number that was counted.
        counted: usize,
    },
}

/// The result of everything in this crate that can fail.
pub type Result<T, E = KvError> = std::result::Result<T, E>;

/// Who keeps tokens from changing.
fn users(pins: usize) -> String {
    if pins == 0 { "a reader or a writer".to_owned() } else { format!("{pins} view(s)") }
}

impl From<KvError> for String {
    fn from(error: KvError) -> Self {
        error.to_string()
    }
}
