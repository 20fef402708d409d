"""What a cache of any element type makes of float32 that is written to it, by NumPy's means."""

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "int8": np.dtype(np.int8),
}


def rounded(numbers, dtype):
    """What comes out again, as float32."""
    if dtype == "int8":
        elements, scales = quantized(numbers)
        return elements.astype(np.float32) * scales[..., None]
    return numbers.astype(DTYPES[dtype]).astype(np.float32)


def quantized(numbers):
    """The int8 and the scales of [tokens, heads, dim]."""
    scales = np.abs(numbers).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        elements = np.rint(numbers / scales[..., None])
    return np.nan_to_num(elements).astype(np.int8), scales


def stored(numbers, dtype):
    """What lies in memory: elements, and the scales or None."""
    return quantized(numbers) if dtype == "int8" else (numbers.astype(DTYPES[dtype]), None)


def bits(elements):
    """Elements as integers, so that a zero with a sign is another one."""
    elements = np.asarray(elements)
    return elements.view(f"u{elements.itemsize}")


def assert_same(found, expected):
    """To the bit, in one type or in the integers of its bits."""
    assert found.shape == expected.shape
    assert found.dtype in (expected.dtype, bits(expected).dtype)
    assert np.array_equal(bits(found), bits(expected)), (found, expected)
