"""`KVCacheConfig` is an immutable value, and refuses what no cache can have."""

import copy
import pickle

import numpy as np
import pytest

import kvspan
from kvspan import KVCacheConfig
from kvspan.errors import InvalidConfigError

DIMENSIONS = ("max_tokens_per_seq", "num_heads", "hidden_dim_per_head")


def test_defaults():
    config = KVCacheConfig()
    assert [getattr(config, name) for name in DIMENSIONS] == [8192, 4, 64]
    assert (config.dtype, config.token_width) == ("float32", 256)
    assert kvspan.LayerKvCache().config == config


def test_dimensions_can_be_given_by_name_or_in_order():
    by_name = KVCacheConfig(max_tokens_per_seq=7, num_heads=3, hidden_dim_per_head=5)
    assert by_name == KVCacheConfig(7, 3, 5) == KVCacheConfig(np.int64(7), 3, 5, "float32")
    assert [getattr(by_name, name) for name in DIMENSIONS] == [7, 3, 5]
    assert by_name.token_width == 15


@pytest.mark.parametrize("name", [*DIMENSIONS, "dtype", "token_width"])
def test_attributes_can_not_be_set(name):
    config = KVCacheConfig()
    with pytest.raises(AttributeError):
        setattr(config, name, getattr(config, name))


def test_equal_configs_are_one_key():
    assert {KVCacheConfig(7, 3, 5): "found"}[KVCacheConfig(7, 3, 5)] == "found"
    assert hash(KVCacheConfig(7, 3, 5)) == hash(KVCacheConfig(7, 3, 5))


@pytest.mark.parametrize(
    "other", [KVCacheConfig(8, 3, 5), KVCacheConfig(7, 4, 5), KVCacheConfig(7, 3, 6), (7, 3, 5)]
)
def test_different_configs_are_not_equal(other):
    assert KVCacheConfig(7, 3, 5) != other


def test_configs_have_no_order():
    with pytest.raises(TypeError):
        KVCacheConfig(1) < KVCacheConfig(2)  # noqa: B015


def test_repr_is_the_call_that_makes_it():
    config = KVCacheConfig(7, 3, 5)
    assert eval(repr(config), vars(kvspan)) == config
    assert "KVCacheConfig(max_tokens_per_seq=7, num_heads=3, hidden_dim_per_head=5" in repr(config)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_config(protocol):
    config = KVCacheConfig(7, 3, 5)
    assert pickle.loads(pickle.dumps(config, protocol)) == config


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_gives_an_equal_config(copied):
    assert copied(KVCacheConfig(7, 3, 5)) == KVCacheConfig(7, 3, 5)


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("float32"), np.dtype("<f4"), np.ones(1, "f").dtype]
)
def test_float32_in_any_of_its_names(dtype):
    assert KVCacheConfig(dtype=dtype) == KVCacheConfig()


@pytest.mark.parametrize(
    "dtype", ["float64", "uint8", "", "no such type", np.float64, float, np.dtype(">f4")]
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidConfigError, match="dtype must be 'float32', 'float16', "):
        KVCacheConfig(dtype=dtype)


@pytest.mark.parametrize("dtype", [None, 3, object()])
def test_what_is_no_dtype_is_a_type_error(dtype):
    with pytest.raises(TypeError):
        KVCacheConfig(dtype=dtype)


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize(
    "number", [0, -1, -(2**63), 2**63 - 1, 2**64, 2**100, pytest.param(10**5000, id="10**5000")]
)
def test_impossible_dimensions_are_refused(name, number):
    with pytest.raises(InvalidConfigError) as caught:
        KVCacheConfig(**{name: number})
    assert isinstance(caught.value, ValueError)


def test_a_zero_is_named():
    with pytest.raises(InvalidConfigError, match="num_heads must be at least 1"):
        KVCacheConfig(num_heads=0)


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("number", [1.0, "1", None, np.float32(1), [1]])
def test_dimensions_are_integers(name, number):
    with pytest.raises(TypeError):
        KVCacheConfig(**{name: number})


def test_a_size_beyond_the_address_space_is_refused():
    largest = (2**63 - 1) // 8
    assert KVCacheConfig(largest, 1, 1).max_tokens_per_seq == largest
    for dimensions in [(largest + 1, 1, 1), (2**32, 2**32, 1), (2**21, 2**21, 2**21)]:
        with pytest.raises(InvalidConfigError, match="overflows"):
            KVCacheConfig(*dimensions)


def test_a_cache_takes_nothing_but_a_config():
    with pytest.raises(TypeError):
        kvspan.LayerKvCache(8192)
    with pytest.raises(TypeError):
        kvspan.LayerKvCache(KVCacheConfig(), 1)


def test_classes_can_not_be_subclassed():
    for public in [KVCacheConfig, kvspan.LayerKvCache, kvspan.KVSpan, kvspan.TensorView]:
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Derived", (public,), {})
