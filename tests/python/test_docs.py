"""The documentation is there, says what is so, and its examples run."""

import builtins
import doctest
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvspan
from kvspan import _kvspan, errors, handle

ROOT = Path(__file__).parents[2]
CLASSES = [value for value in vars(kvspan).values() if isinstance(value, type)]
EXTENSION_CLASSES = [one for one in CLASSES if not issubclass(one, BaseException)]
MEMBERS = [
    pytest.param(getattr(member, "__func__", member), id=f"{one.__name__}.{name}")
    for one in EXTENSION_CLASSES
    for name, member in vars(one).items()
    if not name.startswith("_")
]


def examples():
    """All docstrings with examples, of the extension and of the package's Python files."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in [kvspan, _kvspan, errors, handle]:
        for one in EXTENSION_CLASSES if module is _kvspan else [module]:
            for test in finder.find(one, getattr(one, "__name__", None), module=False):
                if test.examples:
                    yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(examples()))
def test_examples_run(example):
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    said = []
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_examples_are_found():
    found = {param.id.split(".")[0] for param in examples()}
    assert found >= {"LayerKvCache", "KVCacheConfig", "KVSpan", "ReservedSpan"}
    assert found >= {"KvCacheManager", "PagedKvCacheHandle", "PagedSpan", "BlockTable"}


README = (ROOT / "README.md").read_text(encoding="utf-8")
README_EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_s_examples_are_found():
    assert len(README_EXAMPLES) == README.count("```python\n") > 0


@pytest.mark.parametrize("code", README_EXAMPLES)
def test_readme_s_examples_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    # What the block prints stands in a comment beside it.
    for line in capsys.readouterr().out.splitlines():
        assert f"# {line}\n" in code


def test_help_is_where_the_readme_says():
    calls = re.findall(r"`(help\(.*?\))`", README)
    assert calls
    for call in calls:
        # In an interpreter of its own, where nobody has imported more than the package.
        run = subprocess.run(
            [sys.executable, "-c", f"import kvspan; {call}"], capture_output=True, text=True
        )
        assert "Help on module" in run.stdout, run.stderr


def test_names_of_the_package():
    assert kvspan.__all__ == sorted(kvspan.__all__)
    public = {
        name
        for name, value in vars(kvspan).items()
        if not name.startswith("_") and (value is errors or not inspect.ismodule(value))
    }
    assert public | {"__version__"} == set(kvspan.__all__)
    namespace = {}
    exec("from kvspan import *; from kvspan.errors import *", namespace)
    assert namespace.keys() >= {*kvspan.__all__, *errors.__all__}


def test_version_is_the_distribution_s():
    assert kvspan.__version__ == _kvspan.__version__ == importlib.metadata.version("kvspan")


@pytest.mark.parametrize("one", CLASSES)
def test_class_is_where_it_says(one):
    assert getattr(importlib.import_module(one.__module__), one.__name__) is one
    assert one.__module__ in ("kvspan", "kvspan.errors", "kvspan.handle")


@pytest.mark.parametrize("one", EXTENSION_CLASSES)
def test_class_has_help(one):
    summary, *rest = inspect.getdoc(one).splitlines()
    assert summary.endswith(".")
    assert rest[0] == ""


@pytest.mark.parametrize("member", MEMBERS)
def test_member_has_help(member):
    paragraph = inspect.getdoc(member).split("\n\n")[0]
    assert paragraph[0].isupper()
    assert paragraph.endswith(".")
    assert len(paragraph.splitlines()) <= 2


@pytest.mark.parametrize("one", [*CLASSES, *(param.values[0] for param in MEMBERS)])
def test_help_is_written_for_python(one):
    text = inspect.getdoc(one)
    for rust in ["::", "Option<", "Result<", "[`", "# Errors", "# Examples", "usize"]:
        assert rust not in text
    for name in re.findall(r"\b[A-Z]\w+Error\b", text):
        assert name in errors.__all__ or hasattr(builtins, name)


SIGNATURES = {
    "BlockTable": "(block_size, physical_blocks=(), sequence_length=0)",
    "BlockTable.add_blocks": "(self, /, blocks)",
    "BlockTable.blocks_needed_for_length": "(length, block_size)",
    "BlockTable.extend_sequence": "(self, /, additional)",
    "BlockTable.replace_block": "(self, /, block_index, block)",
    "BlockTable.slot": "(self, /, position)",
    "BlockTable.slot_mapping": "(self, /, start, end)",
    "BlockTable.truncate": "(self, /, new_len)",
    "KVCacheConfig": "(max_tokens_per_seq=8192, num_heads=4, hidden_dim_per_head=64, "
    "dtype='float32')",
    "CacheTensor.__array__": "(self, /, dtype=None, copy=None)",
    "CacheTensor.__dlpack__": "(self, /, *, stream=None, max_version=None, dl_device=None, "
    "copy=None)",
    "CacheTensor.__dlpack_device__": "(self, /)",
    "CacheTensor.numpy": "(self, /)",
    "CacheTensor.release": "(self, /)",
    "ContiguousKvCacheHandle": "(layers)",
    "ContiguousKvCacheHandle.append": "(self, /, layer, keys, values)",
    "ContiguousKvCacheHandle.clone_handle": "(self, /)",
    "ContiguousKvCacheHandle.close": "(self, /)",
    "ContiguousKvCacheHandle.key_cache": "(self, /, layer)",
    "ContiguousKvCacheHandle.kv_cache": "(self, /, layer)",
    "ContiguousKvCacheHandle.layer": "(self, /, layer)",
    "ContiguousKvCacheHandle.stats": "(self, /)",
    "ContiguousKvCacheHandle.value_cache": "(self, /, layer)",
    "KvCacheHandle.clone_handle": "(self) -> 'KvCacheHandle'",
    "KvCacheHandle.key_cache": "(self, layer: 'SupportsIndex', /) -> 'Any'",
    "KvCacheHandle.kv_cache": "(self, layer: 'SupportsIndex', /) -> 'tuple[Any, Any]'",
    "KvCacheHandle.stats": "(self) -> 'CacheHandleStats | Any'",
    "KvCacheHandle.value_cache": "(self, layer: 'SupportsIndex', /) -> 'Any'",
    "KeyChain.extended": "(self, /, tokens)",
    "KvCacheManager": "(num_blocks, *, block_size=16, num_layers=1, num_kv_heads=4, head_dim=64, "
    "dtype='float32', storage=True, prefix_caching=True, merge_duplicates=True, namespace=None, "
    "epoch=0)",
    "KvCacheManager.advance_epoch": "(self, /)",
    "KvCacheManager.allocate": "(self, /, tokens, request_id=None, *, cache_salt=None, "
    "lora_id=None, extra_keys=None, lookahead=0)",
    "KvCacheManager.allocate_many": "(self, /, tokens, request_ids=None, *, cache_salts=None, "
    "lora_ids=None, lookahead=0)",
    "KvCacheManager.block_keys": "(self, /, tokens, *, cache_salt=None, lora_id=None, extra_keys=None)",
    "KvCacheManager.block_tables": "(self, /, handles)",
    "KvCacheManager.check_integrity": "(self, /)",
    "KvCacheManager.commit": "(self, /, handle, tokens)",
    "KvCacheManager.commit_many": "(self, /, handles, tokens)",
    "KvCacheManager.extend": "(self, /, handle, num_tokens=1)",
    "KvCacheManager.extend_many": "(self, /, handles, num_tokens=1, *, copies=None)",
    "KvCacheManager.fork": "(self, /, handle, request_id=None)",
    "KvCacheManager.free": "(self, /, handle)",
    "KvCacheManager.free_many": "(self, /, handles)",
    "KvCacheManager.free_request": "(self, /, request_id)",
    "KvCacheManager.inspect": "(self, /)",
    "KvCacheManager.leak_report": "(self, /)",
    "KvCacheManager.num_cached_tokens": "(self, /, handles)",
    "KvCacheManager.plot": "(self, /, ax=None)",
    "KvCacheManager.prepare_write": "(self, /, handle, start, end)",
    "KvCacheManager.probe": "(self, /, tokens, *, cache_salt=None, lora_id=None, extra_keys=None)",
    "KvCacheManager.read_range": "(self, /, handle, layer, start=0, end=None)",
    "KvCacheManager.read_range_into": "(self, /, handle, layer, start, end, keys_out, values_out)",
    "KvCacheManager.reset_prefix_cache": "(self, /)",
    "KvCacheManager.slot_mappings": "(self, /, handles, starts, ends=None)",
    "KvCacheManager.stats": "(self, /)",
    "KvCacheManager.truncate": "(self, /, handle, new_len)",
    "KvCacheManager.view": "(self, /, handle, layer, start=0, end=None)",
    "KvCacheManager.write": "(self, /, handle, layer, position, keys, values)",
    "KvCacheManager.write_many": "(self, /, layer, handles, positions, keys, values)",
    "LayerKvCache": "(config=None)",
    "LayerKvCache.append": "(self, /, keys, values)",
    "LayerKvCache.initialize": "(self, /, seq_len)",
    "LayerKvCache.is_empty": "(self, /)",
    "LayerKvCache.prefault": "(self, /)",
    "LayerKvCache.read_kv": "(self, /, token_idx)",
    "LayerKvCache.read_range": "(self, /, start, end)",
    "LayerKvCache.read_range_into": "(self, /, start_token, end_token, keys_out, values_out)",
    "LayerKvCache.reserve": "(self, /, num_tokens)",
    "LayerKvCache.reset": "(self, /, *, timeout=None)",
    "LayerKvCache.truncate": "(self, /, new_len, *, timeout=None)",
    "LayerKvCache.view": "(self, /, start=0, end=None)",
    "LayerKvCache.with_read_kv": "(self, /, token_idx, f)",
    "LayerKvCache.with_read_range": "(self, /, start_token, end_token, f)",
    "LayerKvCache.write_kv": "(self, /, token_idx, keys, values, *, timeout=None)",
    "LayerKvCache.write_kv_batch": "(self, /, token_idxs, keys=None, values=None, *, timeout=None)",
    "KVSpan.release": "(self, /)",
    "PagedKvCacheHandle.clone_handle": "(self, /)",
    "PagedKvCacheHandle.close": "(self, /)",
    "PagedKvCacheHandle.key_cache": "(self, /, layer)",
    "PagedKvCacheHandle.kv_cache": "(self, /, layer)",
    "PagedKvCacheHandle.stats": "(self, /)",
    "PagedKvCacheHandle.value_cache": "(self, /, layer)",
    "PagedSpan.release": "(self, /)",
    "ReservedSpan.commit": "(self, /)",
    "ReservedSpan.discard": "(self, /)",
    "TensorView.__array__": "(self, /, dtype=None, copy=None)",
    "TensorView.__dlpack__": "(self, /, *, stream=None, max_version=None, dl_device=None, "
    "copy=None)",
    "TensorView.__dlpack_device__": "(self, /)",
}


@pytest.mark.parametrize(("name", "signature"), list(SIGNATURES.items()))
def test_signature(name, signature):
    one = kvspan
    for part in name.split("."):
        one = getattr(one, part)
    assert str(inspect.signature(one)) == signature


def test_every_method_has_its_signature_here():
    methods = {param.id for param in MEMBERS if callable(param.values[0])}
    assert methods <= SIGNATURES.keys()


def test_stub_is_part_of_the_package():
    folder = Path(kvspan.__file__).parent
    assert (folder / "_kvspan.pyi").is_file()
    assert (folder / "py.typed").is_file()
