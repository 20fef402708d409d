//! The extension module `kvspan._kvspan`.
//!
//! A binding makes four moves: extract, detach, call, wrap. What is said here of the interpreter
//! holds throughout: classes are frozen; nobody waits for a lock while attached; no Python code
//! runs under a lock; long copies run detached; every wait can be interrupted.

#![expect(clippy::doc_markdown, reason = "doc comments of Python classes are Python's docstrings")]
#![expect(clippy::unused_self, reason = "methods and properties of Python objects take self")]

mod attention;
mod blocks;
mod buffer;
mod cache;
mod config;
mod convert;
mod error;
mod fork;
mod patience;
mod reserved;
mod span;
mod typed;

use pyo3::prelude::*;

// Not yet for free-threaded Python, where a count of references does not prove that there are no
// others (`buffer::Lease`).
#[pymodule(gil_used = true)]
mod _kvspan {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::attention::{PyAttentionPool, attention};
    #[pymodule_export]
    use super::blocks::{
        PyBlockCopy, PyBlockPicture, PyBlockTable, PyCacheHandleStats, PyCacheTensor,
        PyContiguousKvCacheHandle, PyInspection, PyKeyChain, PyKvCacheManager, PyLeakReport,
        PyManagerStats, PyPagedKvCacheHandle, PyPagedSpan, PySequenceReport,
    };
    #[pymodule_export]
    use super::buffer::PyTensorView;
    #[pymodule_export]
    use super::cache::PyLayerKvCache;
    #[pymodule_export]
    use super::config::PyKVCacheConfig;
    #[pymodule_export]
    use super::fork::after_fork_in_child;
    #[pymodule_export]
    use super::reserved::PyReservedSpan;
    #[pymodule_export]
    use super::span::PyKVSpan;

    /// Loads what must not fail to load in the middle of a call.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        py.import("numpy")?;
        numpy::dtype::<f32>(py);
        super::error::import_all(py);
        Ok(())
    }

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python tools look for")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
