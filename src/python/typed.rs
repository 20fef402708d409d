//! One Python class for all element types: what stands in for the type parameters of the core.

use crate::dtype::{DType, bf16, f16};
use crate::handle::PagedSpan;
use crate::layer::{LayerKvCache, PinnedSpan, ReservedSpan};

/// Something of the core's, for one element type or another.
#[derive(Clone, Debug)]
pub(super) enum Typed<F32, F16, BF16, I8> {
    F32(F32),
    F16(F16),
    BF16(BF16),
    I8(I8),
}

pub(super) type AnyLayerKvCache =
    Typed<LayerKvCache<f32>, LayerKvCache<f16>, LayerKvCache<bf16>, LayerKvCache<i8>>;
pub(super) type AnyPinnedSpan =
    Typed<PinnedSpan<f32>, PinnedSpan<f16>, PinnedSpan<bf16>, PinnedSpan<i8>>;
pub(super) type AnyReservedSpan =
    Typed<ReservedSpan<f32>, ReservedSpan<f16>, ReservedSpan<bf16>, ReservedSpan<i8>>;
pub(super) type AnyPagedSpan =
    Typed<PagedSpan<f32>, PagedSpan<f16>, PagedSpan<bf16>, PagedSpan<i8>>;

impl<F32, F16, BF16, I8> Typed<F32, F16, BF16, I8> {
    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
            Self::I8(_) => DType::I8,
        }
    }
}

impl AnyLayerKvCache {
    pub(super) fn is_clone_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::F32(own), Self::F32(other)) => own.is_clone_of(other),
            (Self::F16(own), Self::F16(other)) => own.is_clone_of(other),
            (Self::BF16(own), Self::BF16(other)) => own.is_clone_of(other),
            (Self::I8(own), Self::I8(other)) => own.is_clone_of(other),
            _ => false,
        }
    }
}

/// `each!(typed, held => done)`: what is done with whatever is held.
macro_rules! each {
    ($typed:expr, $held:ident => $done:expr) => {
        match $typed {
            $crate::python::typed::Typed::F32($held) => $done,
            $crate::python::typed::Typed::F16($held) => $done,
            $crate::python::typed::Typed::BF16($held) => $done,
            $crate::python::typed::Typed::I8($held) => $done,
        }
    };
}

/// `same_for_each!(typed, held => made)`: what is made of whatever is held, which is as typed.
macro_rules! same_for_each {
    ($typed:expr, $held:ident => $made:expr) => {
        match $typed {
            $crate::python::typed::Typed::F32($held) => $crate::python::typed::Typed::F32($made),
            $crate::python::typed::Typed::F16($held) => $crate::python::typed::Typed::F16($made),
            $crate::python::typed::Typed::BF16($held) => $crate::python::typed::Typed::BF16($made),
            $crate::python::typed::Typed::I8($held) => $crate::python::typed::Typed::I8($made),
        }
    };
}

/// `of_dtype!(dtype, T => made)`: what is made with `T` being that type.
macro_rules! of_dtype {
    ($dtype:expr, $T:ident => $made:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $crate::python::typed::Typed::F32($made)
            }
            $crate::dtype::DType::F16 => {
                type $T = $crate::dtype::f16;
                $crate::python::typed::Typed::F16($made)
            }
            $crate::dtype::DType::BF16 => {
                type $T = $crate::dtype::bf16;
                $crate::python::typed::Typed::BF16($made)
            }
            $crate::dtype::DType::I8 => {
                type $T = i8;
                $crate::python::typed::Typed::I8($made)
            }
        }
    };
}

pub(super) use {each, of_dtype, same_for_each};
