"""Measure the layer cache beside what people use today; print one table and write docs/benchmarks.md.

    python benches/table.py [--quick] [--no-write]

Each row does the same work on both sides, in one process, in rounds that alternate between the two
(ABBA), and compares the medians. Data is never zero: some CPUs store zeros faster. Rows about Rust
come from the program in benches/peer, which does the same there beside the crate ghostlink-core.
Peers that are not installed (torch, transformers) are left out, and the table says so.
"""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # one core a side; has an effect only before NumPy is imported
)

import argparse
import gc
import json
import mmap
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import kvspan

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs" / "benchmarks.md"

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


@dataclass
class Row:
    operation: str
    peer: str
    theirs: float
    ours: float
    target: float
    unit: str = "ns"

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def cells(self) -> list[str]:
        met = "yes" if self.ratio <= self.target else "**no**"
        times = [f"{value:,.0f} {self.unit}" for value in (self.theirs, self.ours)]
        return [self.operation, self.peer, *times, f"{self.ratio:.3f}", f"{self.target:.3f}", met]


def alternate(
    theirs: Callable[[], float], ours: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Medians of both sides' times, in rounds of theirs-ours and ours-theirs in turn."""
    sides = (theirs, ours)
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for side in (0, 1) if round_ % 2 else (1, 0):
            times[side].append(sides[side]())
    return statistics.median(times[0]), statistics.median(times[1])


def statement(code: str, number: int, **names: object) -> Callable[[], float]:
    """The time of `code` in ns, from `number` runs in a loop without a call around it."""
    timer = timeit.Timer(code, globals=names)
    timer.timeit(max(number // 10, 1))
    return lambda: timer.timeit(number) / number * 1e9


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


def rows_beside_numpy(rounds: int, scale: float) -> Iterator[Row]:
    def count(number: int) -> int:
        return max(int(number * scale), 1)

    cache, kb, vb = filled_cache(TOKENS), filled(TOKENS), filled(TOKENS)
    k, v = filled(), filled()
    many_k, many_v = filled(256), filled(256)
    out_k, out_v = filled(256), filled(256)
    names = {"cache": cache, "kb": kb, "vb": vb, "k": k, "v": v, "K": many_k, "V": many_v}
    names |= {"ko": out_k, "vo": out_v, "np": np}

    def row(operation: str, peer: str, theirs: str, ours: str, number: int, target: float) -> Row:
        sides = (statement(code, count(number), **names) for code in (theirs, ours))
        return Row(operation, peer, *alternate(*sides, rounds), target)

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


def row_of_cold_decode(rounds: int) -> Row:
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

    times = alternate(theirs, ours, rounds)
    return Row(
        "decode step over 32 layers, cold rows, a layer", "NumPy `k[i] = a; v[i] = b`", *times, 0.85
    )


def row_of_prefault(rounds: int) -> Row:
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

    times = alternate(theirs, ours, max(rounds // 2, 2))
    return Row("`prefault` of 256 MiB", "first touch of 4 KiB pages", *times, 0.25, "us")


def rows_beside_torch(rounds: int, scale: float) -> Iterator[Row]:
    import torch

    torch.set_num_threads(1)
    cache, k, v = filled_cache(TOKENS), filled(), filled()
    kb, vb = torch.from_numpy(filled(TOKENS)), torch.from_numpy(filled(TOKENS))
    names = {"cache": cache, "k": k, "v": v, "kb": kb, "vb": vb, "i": torch.tensor([7])}
    names |= {"tk": torch.from_numpy(k)[None], "tv": torch.from_numpy(v)[None]}
    number = max(int(5_000 * scale), 1)
    ours = statement("cache.write_kv(7, k, v)", number, **names)
    theirs = statement("kb.index_copy_(0, i, tk); vb.index_copy_(0, i, tv)", number, **names)
    yield Row(
        "`write_kv`, one token",
        "torch `index_copy_` of K and of V",
        *alternate(theirs, ours, rounds),
        1 / 20,
    )
    if installed("transformers"):
        theirs = static_cache_update(number)
        yield Row(
            "`write_kv`, one token",
            "transformers `StaticCache.update`",
            *alternate(theirs, ours, rounds),
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


def rows_in_rust(quick: bool) -> list[dict]:
    """What benches/peer measures: rows of kvspan's core beside the crate ghostlink-core."""
    command = [
        "cargo",
        "run",
        "--quiet",
        "--release",
        "--manifest-path",
        str(ROOT / "benches/peer/Cargo.toml"),
        "--",
    ]
    run = subprocess.run(
        command + ["--quick"] * quick, check=True, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (
                line.split(":")[1].strip()
                for line in info.read_text().splitlines()
                if "model name" in line
            ),
            cpu,
        )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = f", transparent huge pages: {pages.read_text().strip()}" if pages.exists() else ""
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}{huge}"


def versions() -> str:
    rust = subprocess.run(
        ["rustc", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    packages = [
        f"{name} {installed(name) or 'not installed'}"
        for name in ("numpy", "torch", "transformers")
    ]
    return ", ".join(
        [
            f"kvspan {kvspan.__version__}",
            f"Rust {rust}",
            f"Python {platform.python_version()}",
            *packages,
        ]
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, only to see that everything runs"
    )
    parser.add_argument(
        "--no-write", action="store_true", help=f"leave {REPORT.relative_to(ROOT)} alone"
    )
    args = parser.parse_args()
    rounds, scale = (3, 0.05) if args.quick else (31, 1.0)

    gc.disable()
    rows = [*rows_beside_numpy(rounds, scale), row_of_cold_decode(rounds), row_of_prefault(rounds)]
    if installed("torch"):
        rows += rows_beside_torch(rounds, scale)
    rust = rows_in_rust(args.quick)

    head = ["operation", "beside", "theirs", "ours", "ratio", "at most", "met"]
    python_table = table(head, [row.cells() for row in rows])
    rust_table = table(
        ["row", "theirs", "ours", "ratio", "target", "met"], [rust_cells(row) for row in rust]
    )
    print(f"{machine()}\n{versions()}\n\n{python_table}\n\n{rust_table}")
    if not (args.no_write or args.quick):
        write_report(python_table, rust_table)


def rust_cells(row: dict) -> list[str]:
    name, target, ratio = row["row"], row["target"], row["ratio"]
    is_gain = name.startswith("gain_")  # of throughput by a second thread, and so to be large
    times = [f"{row[side]:,.1f} ns" for side in ("peer_ns", "ours_ns")]
    if target is None:
        return [name, *times, f"{ratio:.3f}", "", ""]
    met = ratio >= target if is_gain else ratio <= target
    bound = f"{'at least' if is_gain else 'at most'} {target}"
    return [name, *times, f"{ratio:.3f}", bound, "yes" if met else "**no**"]


def write_report(python_table: str, rust_table: str) -> None:
    """Replace the measured part of the report, between its two marks; what people wrote stays."""
    begin, end = "<!-- measured -->", "<!-- /measured -->"
    text = REPORT.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    target = "bench-peers" if installed("torch") else "bench"
    measured = (
        f"{begin}\n\nMeasured on {date.today()} with `make {target}`: {machine()}.\n{versions()}.\n\n"
        f"## Python\n\n{python_table}\n\n## Rust\n\n{RUST_LEGEND}\n\n{rust_table}\n\n{end}"
    )
    REPORT.write_text(before + measured + after)
    print(f"\nWritten to {REPORT.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
