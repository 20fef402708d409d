//! `KVCacheConfig`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use super::convert::in_range;
use super::error::InvalidConfigError;
use crate::config::{
    DEFAULT_HIDDEN_DIM_PER_HEAD, DEFAULT_MAX_TOKENS_PER_SEQ, DEFAULT_NUM_HEADS, Geometry,
    KVCacheConfig,
};
use crate::dtype::{DType, bf16, f16};

/// The shape of a cache: one layer's keys and values of one sequence.
///
/// Immutable, comparable, hashable, and can be pickled.
///
/// Parameters
/// ----------
/// max_tokens_per_seq : int, default 8192
///     The capacity, in tokens.
/// num_heads : int, default 4
///     KV heads of a token (not query heads).
/// hidden_dim_per_head : int, default 64
///     Elements of one head.
/// dtype : str or numpy.dtype, default "float32"
///     Element type: "float32", "float16", "bfloat16", or "int8" with a scale for each head of a
///     token; see ``LayerKvCache``.
///
/// Raises
/// ------
/// InvalidConfigError
///     (a ValueError) If a number is zero, negative or too large, or the dtype is not known.
///
/// Examples
/// --------
/// >>> import kvspan
/// >>> config = kvspan.KVCacheConfig(num_heads=8, hidden_dim_per_head=128)
/// >>> config.token_width
/// 1024
#[pyclass(name = "KVCacheConfig", module = "kvspan", frozen, eq, hash, from_py_object)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PyKVCacheConfig {
    pub(super) config: KVCacheConfig,
    pub(super) dtype: DType,
}

#[pymethods]
impl PyKVCacheConfig {
    #[new]
    #[pyo3(signature = (
        max_tokens_per_seq = Dimension(DEFAULT_MAX_TOKENS_PER_SEQ),
        num_heads = Dimension(DEFAULT_NUM_HEADS),
        hidden_dim_per_head = Dimension(DEFAULT_HIDDEN_DIM_PER_HEAD),
        dtype = Dtype(DType::F32),
    ), text_signature = "(max_tokens_per_seq=8192, num_heads=4, hidden_dim_per_head=64, dtype='float32')")]
    fn new(
        max_tokens_per_seq: Dimension,
        num_heads: Dimension,
        hidden_dim_per_head: Dimension,
        dtype: Dtype,
    ) -> PyResult<Self> {
        let config = KVCacheConfig {
            max_tokens_per_seq: max_tokens_per_seq.0,
            num_heads: num_heads.0,
            hidden_dim_per_head: hidden_dim_per_head.0,
        };
        match dtype.0 {
            DType::F32 => Geometry::new::<f32>(&config)?,
            DType::F16 => Geometry::new::<f16>(&config)?,
            DType::BF16 => Geometry::new::<bf16>(&config)?,
            DType::I8 => Geometry::new::<i8>(&config)?,
        };
        Ok(Self { config, dtype: dtype.0 })
    }

    /// The capacity, in tokens.
    #[getter]
    fn max_tokens_per_seq(&self) -> usize {
        self.config.max_tokens_per_seq
    }

    /// Number of KV heads.
    #[getter]
    fn num_heads(&self) -> usize {
        self.config.num_heads
    }

    /// Elements of one head.
    #[getter]
    fn hidden_dim_per_head(&self) -> usize {
        self.config.hidden_dim_per_head
    }

    /// Name of the element type, as NumPy spells it.
    #[getter]
    pub(super) fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Elements of one token's keys (and of its values): num_heads * hidden_dim_per_head.
    #[getter]
    fn token_width(&self) -> usize {
        self.config.token_width()
    }

    fn __repr__(&self) -> String {
        let KVCacheConfig { max_tokens_per_seq, num_heads, hidden_dim_per_head } = self.config;
        let dtype = self.dtype.name();
        format!(
            "KVCacheConfig(max_tokens_per_seq={max_tokens_per_seq}, num_heads={num_heads}, \
             hidden_dim_per_head={hidden_dim_per_head}, dtype='{dtype}')"
        )
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> (Bound<'py, PyType>, (usize, usize, usize, &'static str)) {
        let Self { config, dtype } = *slf.get();
        (
            slf.get_type(),
            (config.max_tokens_per_seq, config.num_heads, config.hidden_dim_per_head, dtype.name()),
        )
    }
}

/// One number of the geometry; zero is left to the geometry's own check.
#[derive(Clone, Copy)]
pub(super) struct Dimension(pub(super) usize);

impl<'py> FromPyObject<'_, 'py> for Dimension {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let dimension = in_range(object, |given| {
            InvalidConfigError::new_err((format!(
                "a dimension must be at least 1 and fit 64 bits, but it is {given}"
            ),))
        });
        dimension.map(Self)
    }
}

/// An element type by its name, or as anything that NumPy takes for a dtype.
#[derive(Clone, Copy)]
pub(super) struct Dtype(pub(super) DType);

impl<'py> FromPyObject<'_, 'py> for Dtype {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (name, is_native) = if let Ok(name) = object.cast::<PyString>() {
            (name.to_string(), true)
        } else if object.is_none() {
            return Err(PyTypeError::new_err(format!("dtype must be {}, not None", names())));
        } else {
            let given = object.py().import("numpy")?.call_method1("dtype", (object,))?;
            let is_native = given.getattr("isnative")?.extract::<bool>()?;
            // Another byte order has the same name, but is written in another way.
            let name = if is_native { given.getattr("name")? } else { given };
            (name.to_string(), is_native)
        };
        let dtype = KNOWN.into_iter().find(|dtype| is_native && dtype.name() == name);
        dtype.map(Self).ok_or_else(|| {
            let message = format!("dtype must be {}, but it is '{name}'", names());
            InvalidConfigError::new_err((message,))
        })
    }
}

const KNOWN: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I8];

fn names() -> String {
    let [all @ .., last] = KNOWN.map(|dtype| format!("'{}'", dtype.name()));
    format!("{} or {last}", all.join(", "))
}
