//! Element types a cache can hold.

use std::fmt::Debug;

/// The name of an element type, as NumPy spells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE 754.
    #[default]
    F32,
}

impl DType {
    /// Bytes of one element.
    pub const fn itemsize(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
        }
    }

    /// The name NumPy gives the type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
        }
    }
}

/// An element type of a cache.
///
/// Sealed. [`bytemuck::Pod`] is what the memory module builds on: any bytes, zeros among them, are
/// a value, and there is nothing to drop.
pub trait Element: bytemuck::Pod + Debug + PartialEq + Send + Sync + sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
}
