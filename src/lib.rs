#![doc = include_str!("../README.md")]

mod attention;
mod block;
pub mod config;
mod dtype;
mod error;
mod handle;
mod hash;
mod ids;
mod layer;
mod manager;
mod memory;
mod prefix;
#[cfg(feature = "python")]
mod python;
mod store;
mod sync;

pub use attention::{Attention, AttentionPool, Context, Instructions, Query};
pub use block::{BlockPool, BlockState, BlockTable};
pub use config::KVCacheConfig;
pub use dtype::{DType, Element, Transfer, bf16, f16};
pub use error::{KvError, Result};
pub use handle::{
    CacheHandleStats, ContiguousKvCacheHandle, Device, KvCacheHandle, PagedKvCacheHandle,
    PagedSpan, TensorLike, TensorRef,
};
pub use hash::{BlockKey, KeyChain, KeyRoot};
pub use ids::BlockId;
pub use layer::{KVCacheEntry, KVSpan, LayerKvCache, PinnedSpan, ReservedSpan};
pub use manager::{
    BlockTables, KeyedRequest, KvCacheManager, KvCacheManagerConfig, RequestOptions, Storage,
};
pub use prefix::{Duplicates, PrefixCache};
pub use store::{BlockCopy, BlockPicture, Inspection, LeakReport, ManagerStats, SequenceReport};
