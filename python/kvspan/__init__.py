"""A host-memory KV cache for LLM serving.

:class:`LayerKvCache` holds one layer's keys and values of one sequence in a pre-allocated buffer:
all-or-nothing writes, reads without a copy, safe to use from many threads.
:class:`KvCacheManager` holds those of many sequences in blocks, which sequences with equal
beginnings share.
"""

import os
from threading import active_count as _active_count

from kvspan import errors
from kvspan._kvspan import (
    AttentionPool,
    BlockCopy,
    BlockPicture,
    BlockTable,
    CacheHandleStats,
    CacheTensor,
    ContiguousKvCacheHandle,
    Inspection,
    KeyChain,
    KVCacheConfig,
    KvCacheManager,
    KVSpan,
    LayerKvCache,
    LeakReport,
    ManagerStats,
    PagedKvCacheHandle,
    PagedSpan,
    ReservedSpan,
    SequenceReport,
    TensorView,
    __version__,
    _after_fork_in_child,
    attention,
)
from kvspan.errors import KvCacheError
from kvspan.handle import KvCacheHandle

__all__ = [
    "AttentionPool",
    "BlockCopy",
    "BlockPicture",
    "BlockTable",
    "CacheHandleStats",
    "CacheTensor",
    "ContiguousKvCacheHandle",
    "Inspection",
    "KVCacheConfig",
    "KVSpan",
    "KeyChain",
    "KvCacheError",
    "KvCacheHandle",
    "KvCacheManager",
    "LayerKvCache",
    "LeakReport",
    "ManagerStats",
    "PagedKvCacheHandle",
    "PagedSpan",
    "ReservedSpan",
    "SequenceReport",
    "TensorView",
    "__version__",
    "attention",
    "errors",
]

_forks_with_threads = False


def _before_fork() -> None:
    global _forks_with_threads
    _forks_with_threads = _active_count() > 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_child=lambda: _after_fork_in_child(_forks_with_threads),
    )
