"""Layer caches beside what people keep keys and values in today.

Data is never zero: some CPUs store zeros faster. Peers that are not installed (torch, transformers) are
left out.
"""

import mmap
import timeit
from collections.abc import Callable, Iterator

import numpy as np

import kvspan
from measure import HEAD, Pace, Row, alternate, installed, statement, table, table_in_rust

HEADS, DIM = 8, 128
LAYERS = 32
TOKENS = 4096  # of a hot cache: 16 MiB a side
COLD_TOKENS = 1024  # of each of 32 layers: 128 MiB a side in all, four times the largest cache here
PREFAULT_BYTES = 256 << 20

RUST_LEGEND = """\
`theirs` is the crate ghostlink-core, except in the rows named `gain_`: there it is the same code on one
thread, and the ratio is that of the throughputs. `touch_nothing` is the lock's round trip alone; the
other closures really sum their rows. `write_median` and `write_p99` are the latency of one writer that
adds a token every 50 us beside 1, 2 or 4 readers. Shapes are capacity x heads x head_dim."""


def run(pace: Pace) -> str:
    rows = [*rows_beside_numpy(pace), row_of_cold_decode(pace), row_of_prefault(pace)]
    if installed("torch"):
        rows += rows_beside_torch(pace)
    in_python = table(HEAD, [row.cells() for row in rows])
    in_rust = table_in_rust("layer", pace)
    return f"### From Python\n\n{in_python}\n\n### In Rust\n\n{RUST_LEGEND}\n\n{in_rust}"


def new_cache(tokens: int) -> kvspan.LayerKvCache:
    config = kvspan.KVCacheConfig(
        max_tokens_per_seq=tokens, num_heads=HEADS, hidden_dim_per_head=DIM
    )
    return kvspan.LayerKvCache(config)


def filled(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random((*shape, HEADS, DIM), dtype=np.float32)


def filled_cache(tokens: int) -> kvspan.LayerKvCache:
    cache = new_cache(tokens)
    cache.append(filled(tokens), filled(tokens))
    return cache


def rows_beside_numpy(pace: Pace) -> Iterator[Row]:
    cache, kb, vb = filled_cache(TOKENS), filled(TOKENS), filled(TOKENS)
    k, v = filled(), filled()
    many_k, many_v = filled(256), filled(256)
    out_k, out_v = filled(256), filled(256)
    names = {"cache": cache, "kb": kb, "vb": vb, "k": k, "v": v, "K": many_k, "V": many_v}
    names |= {"ko": out_k, "vo": out_v, "np": np}

    def row(operation: str, peer: str, theirs: str, ours: str, number: int, target: float) -> Row:
        sides = (statement(code, pace.count(number), **names) for code in (theirs, ours))
        return Row(operation, peer, *alternate(*sides, pace.rounds), target)

    yield row(
        "`write_kv`, one token",
        "NumPy `k[i] = a; v[i] = b`",
        "kb[7] = k; vb[7] = v",
        "cache.write_kv(7, k, v)",
        20_000,
        0.33,
    )

    short = filled_cache(TOKENS)
    short.truncate(TOKENS - 256)
    names["short"] = short
    # The truncation that makes room again is timed too: it is a hundredth of the copy.
    yield row(
        "`append` of 256 tokens",
        "NumPy slice assignment",
        "kb[3840:4096] = K; vb[3840:4096] = V",
        "short.append(K, V); short.truncate(3840)",
        200,
        1.05,
    )
    yield row(
        "`view` + `.keys` + `.values`",
        "two NumPy slices",
        "a = kb[0:1024]; b = vb[0:1024]",
        "s = cache.view(0, 1024); a = s.keys; b = s.values",
        20_000,
        1.25,
    )
    yield row(
        "`read_range_into`, one token",
        "`.copy()` of K and of V",
        "a = kb[7].copy(); b = vb[7].copy()",
        "cache.read_range_into(7, 8, ko, vo)",
        20_000,
        0.35,
    )
    yield row(
        "`read_range_into`, 256 tokens",
        "`np.copyto` of K and of V",
        "np.copyto(ko, kb[512:768]); np.copyto(vo, vb[512:768])",
        "cache.read_range_into(512, 768, ko, vo)",
        200,
        1.0,
    )


def row_of_cold_decode(pace: Pace) -> Row:
    """One token written to each of 32 layers a step, each row for the first time in a long while."""
    k, v = filled(), filled()
    caches = [filled_cache(COLD_TOKENS) for _ in range(LAYERS)]
    arrays = [(filled(COLD_TOKENS), filled(COLD_TOKENS)) for _ in range(LAYERS)]
    steps = iter(range(0, 1 << 40, 64))

    def theirs() -> float:
        begin = next(steps)
        start = timeit.default_timer()
        for step in range(begin, begin + 64):
            i = step % COLD_TOKENS
            for kb, vb in arrays:
                kb[i] = k
                vb[i] = v
        return (timeit.default_timer() - start) / (64 * LAYERS) * 1e9

    def ours() -> float:
        begin = next(steps)
        start = timeit.default_timer()
        for step in range(begin, begin + 64):
            i = step % COLD_TOKENS
            for cache in caches:
                cache.write_kv(i, k, v)
        return (timeit.default_timer() - start) / (64 * LAYERS) * 1e9

    times = alternate(theirs, ours, pace.rounds)
    return Row(
        "decode step over 32 layers, cold rows, a layer", "NumPy `k[i] = a; v[i] = b`", *times, 0.85
    )


def row_of_prefault(pace: Pace) -> Row:
    """All memory of a cache provided at once, beside writing to small pages for the first time."""
    tokens = PREFAULT_BYTES // (2 * HEADS * DIM * 4)

    def theirs() -> float:
        memory = mmap.mmap(-1, PREFAULT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        pages = np.frombuffer(memory, dtype=np.float32).reshape(-1, mmap.PAGESIZE // 4)
        start = timeit.default_timer()
        pages[:, 0] = 1.5
        return (timeit.default_timer() - start) * 1e6

    def ours() -> float:
        cache = new_cache(tokens)
        start = timeit.default_timer()
        cache.prefault()
        return (timeit.default_timer() - start) * 1e6

    times = alternate(theirs, ours, max(pace.rounds // 2, 2))
    return Row("`prefault` of 256 MiB", "first touch of 4 KiB pages", *times, 0.25, "us")


def rows_beside_torch(pace: Pace) -> Iterator[Row]:
    import torch

    torch.set_num_threads(1)
    cache, k, v = filled_cache(TOKENS), filled(), filled()
    kb, vb = torch.from_numpy(filled(TOKENS)), torch.from_numpy(filled(TOKENS))
    names = {"cache": cache, "k": k, "v": v, "kb": kb, "vb": vb, "i": torch.tensor([7])}
    names |= {"tk": torch.from_numpy(k)[None], "tv": torch.from_numpy(v)[None]}
    number = pace.count(5_000)
    ours = statement("cache.write_kv(7, k, v)", number, **names)
    theirs = statement("kb.index_copy_(0, i, tk); vb.index_copy_(0, i, tv)", number, **names)
    yield Row(
        "`write_kv`, one token",
        "torch `index_copy_` of K and of V",
        *alternate(theirs, ours, pace.rounds),
        1 / 20,
    )
    if installed("transformers"):
        theirs = static_cache_update(number)
        yield Row(
            "`write_kv`, one token",
            "transformers `StaticCache.update`",
            *alternate(theirs, ours, pace.rounds),
            1 / 50,
        )


def static_cache_update(number: int) -> Callable[[], float]:
    import torch
    from transformers import LlamaConfig, StaticCache

    config = LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=1,
    )
    cache = StaticCache(config=config, max_cache_len=TOKENS)
    k, v = torch.from_numpy(filled())[None, :, None], torch.from_numpy(filled())[None, :, None]
    # It writes at its own end, and would be full after `number` runs: begin anew for each round.
    timer = timeit.Timer(
        "cache.update(k, v, 0)", "cache.reset()", globals={"cache": cache, "k": k, "v": v}
    )
    runs = min(number, TOKENS - 1)
    timer.timeit(runs)
    return lambda: timer.timeit(runs) / runs * 1e9
