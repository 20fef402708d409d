#![doc = include_str!("../README.md")]

mod block;
pub mod config;
mod dtype;
mod error;
mod hash;
mod ids;
mod layer;
mod memory;
mod prefix;
#[cfg(feature = "python")]
mod python;

pub use block::{BlockPool, BlockState, BlockTable};
pub use config::KVCacheConfig;
pub use dtype::{DType, Element};
pub use error::{KvError, Result};
pub use hash::{BlockKey, KeyChain, KeyRoot};
pub use ids::BlockId;
pub use layer::{KVCacheEntry, KVSpan, LayerKvCache, PinnedSpan, ReservedSpan};
pub use prefix::{Duplicates, PrefixCache};
