"""PyTorch takes views in place, however it takes them, and its tensors come in."""

import gc
import warnings

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import kvspan
from kvspan.errors import InvalidInputError, PinnedError
from support import DIM, HEADS, WIDTH, address, new_filled_cache, refused, token, tokens

torch = pytest.importorskip("torch", reason="torch is not installed")

COUNT = 6
WAYS = {
    "from_dlpack": lambda span: torch.from_dlpack(span.key_view),
    "from_dlpack of an array": lambda span: torch.from_dlpack(span.keys),
    "frombuffer": lambda span: torch.frombuffer(span.key_view, dtype=torch.float32),
    "asarray": lambda span: torch.asarray(span.key_view, dtype=torch.float32),
    "from_numpy": lambda span: torch.from_numpy(span.keys),
    "as_tensor": lambda span: torch.as_tensor(span.keys),
    "view of a view": lambda span: torch.from_dlpack(span.key_view).transpose(0, 1)[:, 1:],
}


@pytest.fixture(autouse=True)
def _no_warnings_of_read_only_memory():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        yield


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_torch_tensor_lies_over_the_cache_and_pins_it(way, filled):
    tensor = way(filled.view())
    gc.collect()
    whole = filled.view()
    keys = address(whole.keys)
    assert keys <= tensor.data_ptr() < keys + COUNT * WIDTH * 4
    assert set(tensor.flatten().tolist()) <= set(tokens(COUNT)[0].ravel().tolist())
    assert tensor.dtype == torch.float32
    del whole
    refused(filled, PinnedError, filled.reset)
    del tensor
    filled.reset()


def test_torch_tensor_has_the_shape_of_the_tokens(filled):
    tensor = torch.from_dlpack(filled.view(1, 4).value_view)
    assert tensor.shape == (3, HEADS, DIM)
    assert_array_equal(tensor.numpy(), tokens(3, first=2)[1])


def test_torch_tensor_outlives_the_cache():
    tensor = torch.from_dlpack(new_filled_cache().view().key_view)
    gc.collect()
    assert_array_equal(tensor.numpy(), tokens(COUNT)[0])


def test_torch_can_copy(filled):
    tensor = torch.from_dlpack(filled.view().key_view, copy=True)
    filled.reset()
    tensor += 1
    assert_array_equal(tensor.numpy(), tokens(COUNT)[0] + 1)


def test_torch_computes_into_reserved_rows(cache):
    keys, values = (torch.from_numpy(side) for side in tokens(3))
    with cache.reserve(3) as rows:
        torch.from_dlpack(rows.key_view).copy_(keys)
        torch.mul(values, 2, out=torch.from_dlpack(rows.value_view))
    assert_array_equal(cache.read_range(0, 3), (tokens(3)[0], 2 * tokens(3)[1]))


def test_torch_tensors_come_in(cache):
    keys, values = (torch.from_numpy(side) for side in tokens(6))
    cache.append(keys[:3], values[:3])
    cache.append(keys[3], values[3].flatten())
    cache.initialize(6)
    cache.write_kv(4, keys[4], values[4])
    cache.write_kv_batch([(5, keys[5], values[5])])
    cache.write_kv_batch(torch.tensor([0, 1]), keys[:2], values[:2])
    assert_array_equal(cache.read_range(0, 6), tokens(6))


def test_torch_tensors_are_read_into(filled):
    keys, values = torch.zeros(2, COUNT, HEADS, DIM)
    filled.read_range_into(0, COUNT, keys, values)
    assert_array_equal(np.stack([keys.numpy(), values.numpy()]), tokens(COUNT))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(HEADS, DIM, dtype=torch.float64),
        torch.zeros(HEADS, DIM, dtype=torch.bfloat16),
        torch.zeros(HEADS, DIM, dtype=torch.float16),
        torch.zeros(DIM, HEADS).T,
        torch.zeros(HEADS, 2 * DIM)[:, ::2],
        torch.zeros(HEADS, DIM, requires_grad=True),
        torch.zeros(HEADS, DIM, device="meta"),
        torch.zeros(HEADS, DIM).to_sparse(),
        torch.zeros(HEADS, DIM + 1),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {tensor.device}",
)
def test_torch_tensors_that_do_not_fit_are_refused(tensor, filled):
    refused(filled, InvalidInputError, filled.append, tensor, token()[1])
    refused(filled, InvalidInputError, filled.write_kv, 0, token()[0], tensor)


# Every element type

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def cache_of(dtype):
    return kvspan.LayerKvCache(kvspan.KVCacheConfig(64, HEADS, DIM, dtype))


@pytest.mark.parametrize(("name", "dtype"), list(DTYPES.items()))
def test_torch_takes_every_dtype_in_place(name, dtype):
    cache = cache_of(name)
    cache.append(*tokens(3))
    span = cache.view()
    tensor = torch.from_dlpack(span.key_view)
    assert (tensor.dtype, tensor.shape) == (dtype, (3, HEADS, DIM))
    assert tensor.data_ptr() == np.frombuffer(memoryview(span.key_view), np.uint8).ctypes.data
    del span
    gc.collect()
    refused_reset(cache)
    if name != "int8":
        assert torch.equal(tensor, torch.from_numpy(tokens(3)[0]).to(dtype))
    copied = torch.from_dlpack(cache.view().key_view, copy=True)
    assert torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()
    del tensor
    gc.collect()
    cache.reset()


def refused_reset(cache):
    with pytest.raises(PinnedError):
        cache.reset()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_torch_tensors_of_the_own_dtype_go_in_and_out_bit_by_bit(name):
    dtype = DTYPES[name]
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = patterns.reshape(-1, 64, 64)
    config = kvspan.KVCacheConfig(len(rows), 64, 64, name)
    cache = kvspan.LayerKvCache(config)
    cache.append(rows, rows.flip(0))
    taken = torch.from_dlpack(cache.view().value_view)
    assert torch.equal(taken.view(torch.int16), rows.flip(0).view(torch.int16))
    room = torch.zeros(2, *rows.shape, dtype=dtype)
    cache.read_range_into(0, len(rows), *room)
    assert torch.equal(room[0].view(torch.int16), rows.view(torch.int16))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_is_that_of_torch(name):
    numbers = torch.randn(8, HEADS, DIM) * 1000
    cache = cache_of(name)
    cache.append(numbers, numbers)
    taken = torch.from_dlpack(cache.view().key_view)
    assert torch.equal(taken, numbers.to(DTYPES[name]))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_torch_computes_into_reserved_rows_of_every_dtype(name):
    cache = cache_of(name)
    keys, values = (torch.from_numpy(side).to(DTYPES[name]) for side in tokens(3))
    with cache.reserve(3) as rows:
        torch.from_dlpack(rows.key_view).copy_(keys)
        torch.add(values, 1, out=torch.from_dlpack(rows.value_view))
    assert torch.equal(torch.from_dlpack(cache.view().value_view), values + 1)


def test_torch_tensors_of_bfloat16_do_not_go_into_other_caches():
    rows = torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16)
    for name in ["float32", "float16", "int8"]:
        cache = cache_of(name)
        error = refused(cache, InvalidInputError, cache.append, rows, rows)
        assert "bfloat16" in str(error) and "float32 is wanted" in str(error)


@pytest.mark.parametrize(("name", "dtype"), list(DTYPES.items()))
def test_torch_takes_blocks_and_tensors_of_every_dtype(name, dtype):
    manager = kvspan.KvCacheManager(6, block_size=2, num_kv_heads=HEADS, head_dim=DIM, dtype=name)
    handle = manager.allocate([1, 2, 3])
    manager.write(handle, 0, 0, *(torch.from_numpy(side) for side in tokens(3)))
    segments = [torch.from_dlpack(segment.key_view) for segment in manager.view(handle, 0)]
    gathered = torch.from_dlpack(handle.key_cache(0), copy=True)
    assert gathered.dtype == dtype
    assert torch.equal(gathered, torch.cat(segments))
