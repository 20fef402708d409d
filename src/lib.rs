#![doc = include_str!("../README.md")]

pub mod config;
mod dtype;
mod error;
mod layer;
mod memory;
#[cfg(feature = "python")]
mod python;

pub use config::KVCacheConfig;
pub use dtype::{DType, Element};
pub use error::{KvError, Result};
pub use layer::{KVCacheEntry, KVSpan, LayerKvCache, PinnedSpan, ReservedSpan};
