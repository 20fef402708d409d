"""Measure attention beside what people use today, and beside reading the same bytes.

    python benches/attention_table.py [--quick] [--no-write]

One query token, 32 query heads, 8 KV heads of 128 elements. All sides of one context and number of
threads are measured in one process, in rounds that go forwards and backwards in turn, and the medians
are compared. Keys and values of 8,192 tokens and more are out of the cache. `read` multiplies the keys
with the values (one BLAS `dot` a thread), which is bound by reading them; the share of its bandwidth is
what each side reaches. Peers that are not installed (torch, vllm) are left out.

Replaces what is between the first marks in docs/attention.md, and writes the plot beside it (with
matplotlib).
"""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # has an effect only before NumPy is imported

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

import kvspan
from measure import ROOT, machine, table, verdict, versions, write_report

REPORT = ROOT / "docs" / "attention.md"
PLOT = REPORT.with_suffix(".svg")

Q_HEADS, HEADS, DIM = 32, 8, 128
CONTEXTS = (1024, 8192, 32_768)
THREADS = (1, 2)
TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
READ, CACHE = "read", "kvspan, layer cache"
SDPA, MATMUL = "torch SDPA, `enable_gqa`", "torch matmul, softmax, matmul"
VLLM = "vLLM, CPU paged attention, blocks of 128"


@dataclass
class Measured:
    tokens: int
    threads: int
    side: str
    dtype: str
    ms: float
    share: float  # of the bandwidth of `read`

    def cells(self) -> list[str]:
        gb = 2 * self.tokens * HEADS * DIM * TYPES[self.dtype] / self.ms / 1e6
        times = [f"{self.ms:.2f}", f"{gb:.1f}", f"{self.share:.0%}"]
        return [f"{self.tokens:,}", str(self.threads), self.side, self.dtype, *times]


Side = tuple[str, str, Callable[[], object]]


def arrays(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A query, keys and values between -1 and 1."""
    rng = np.random.default_rng(tokens)
    shapes = [(1, Q_HEADS, DIM), (tokens, HEADS, DIM), (tokens, HEADS, DIM)]
    query, keys, values = (rng.random(shape, dtype=np.float32) * 2 - 1 for shape in shapes)
    return query, keys, values


def read(keys: np.ndarray, values: np.ndarray, threads: int) -> Callable[[], object]:
    halves = list(
        zip(np.array_split(keys.ravel(), threads), np.array_split(values.ravel(), threads))
    )
    if threads == 1:
        return lambda: np.dot(*halves[0])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda half: np.dot(*half), halves))


def ours(query: np.ndarray, keys: np.ndarray, values: np.ndarray, threads: int) -> Iterator[Side]:
    tokens, pool, out = len(keys), kvspan.AttentionPool(threads), np.empty_like(query)

    def call(cache: object, layer: int | None = None) -> Callable[[], object]:
        return lambda: kvspan.attention(query, cache, layer, out=out, pool=pool)

    for dtype in TYPES:
        config = kvspan.KVCacheConfig(
            max_tokens_per_seq=tokens, num_heads=HEADS, hidden_dim_per_head=DIM, dtype=dtype
        )
        cache = kvspan.LayerKvCache(config)
        cache.append(keys, values)
        yield CACHE, dtype, call(cache)
    manager = kvspan.KvCacheManager(tokens // 16, num_kv_heads=HEADS, head_dim=DIM)
    handle = manager.allocate(np.arange(tokens, dtype=np.int32))
    manager.write(handle, 0, 0, keys, values)
    yield "kvspan, blocks of 16", "float32", call(handle, 0)


def numpy_side(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Callable[[], object]:
    grouped = query.reshape(HEADS, Q_HEADS // HEADS, DIM) / np.float32(DIM**0.5)

    def attend() -> np.ndarray:
        scores = grouped @ keys.transpose(1, 2, 0)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights @ values.transpose(1, 0, 2) / weights.sum(axis=-1, keepdims=True)

    return attend


def torch_sides(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, threads: int
) -> Iterator[Side]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(array).transpose(0, 1)[None] for array in (query, keys, values))
    yield SDPA, "float32", lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)
    bq, bk, bv = (tensor.bfloat16() for tensor in (q, k, v))
    yield SDPA, "bfloat16", lambda: scaled_dot_product_attention(bq, bk, bv, enable_gqa=True)
    grouped = q[0].reshape(HEADS, Q_HEADS // HEADS, DIM) / DIM**0.5
    yield (
        MATMUL,
        "float32",
        lambda: torch.softmax(grouped @ k[0].transpose(1, 2), -1) @ v[0],
    )


def has_vllm_kernels() -> bool:
    """Whether vLLM is installed with the build of PyTorch that its kernels are compiled for."""
    if find_spec("vllm") is None:
        return False
    import torch
    from vllm import _custom_ops  # noqa: F401, which loads them

    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def vllm_sides(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, threads: int
) -> Iterator[Side]:
    import torch
    from vllm import _custom_ops as ops

    torch.set_num_threads(threads)
    tokens, block_size, isa = len(keys), 128, "vec"  # what vLLM picks on x86-64 without AMX
    num_blocks = tokens // block_size
    starts, lens = (
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
    )
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        q, k, v = (torch.from_numpy(array).to(dtype) for array in (query, keys, values))
        cache = torch.zeros(2, num_blocks, HEADS, block_size, DIM, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(k, v, *cache, torch.arange(tokens), isa)
        plan = ops.cpu_attn_get_scheduler_metadata(
            1, Q_HEADS, HEADS, DIM, lens, dtype, starts, True, -1, isa, True
        )
        out = torch.empty_like(q)

        def attend(q=q, cache=cache, out=out, plan=plan) -> object:
            ops.cpu_attention_with_kv_cache(
                q, *cache, out, starts, lens, DIM**-0.5, True, None, -1, table, 0.0, plan, None
            )
            return out

        yield VLLM, name, attend


def measure(tokens: int, threads: int, rounds: int) -> list[Measured]:
    query, keys, values = arrays(tokens)
    sides: list[Side] = [(READ, "float32", read(keys, values, threads))]
    sides += ours(query, keys, values, threads)
    if threads == 1:
        sides.append(("NumPy matmul, softmax, matmul", "float32", numpy_side(query, keys, values)))
    if find_spec("torch"):
        sides += torch_sides(query, keys, values, threads)
    if has_vllm_kernels():
        sides += vllm_sides(query, keys, values, threads)

    wanted = numpy_side(query, keys, values)().reshape(query.shape)
    for side, dtype, call in sides[1:]:
        given = call()
        given = given.float().numpy() if hasattr(given, "float") else given
        difference = np.abs(given.reshape(query.shape) - wanted).max()
        assert difference < 5e-3, f"{side}, {dtype}: off by {difference}"

    times: list[list[float]] = [[] for _ in sides]
    for round_ in range(rounds):
        order = range(len(sides)) if round_ % 2 else reversed(range(len(sides)))
        for index in order:
            start = time.perf_counter()
            sides[index][2]()
            times[index].append((time.perf_counter() - start) * 1e3)
    medians = [statistics.median(side) for side in times]
    return [
        Measured(tokens, threads, side, dtype, ms, medians[0] / ms * TYPES[dtype] / 4)
        for (side, dtype, _), ms in zip(sides, medians)
    ]


def rows(quick: bool) -> list[Measured]:
    """All of it; about three minutes with all peers."""
    gc.disable()
    contexts = CONTEXTS[:1] if quick else CONTEXTS
    measured = []
    for tokens in contexts:
        for threads in THREADS:
            rounds = 3 if quick else max(11, min(101, 400_000 // tokens))
            measured += measure(tokens, threads, rounds)
    return measured


def yardsticks(measured: list[Measured]) -> list[list[str]]:
    """Ours beside each peer that is there, at 8,192 tokens."""
    times = {(row.threads, row.side, row.dtype): row for row in measured if row.tokens == 8192}

    def one(text: str, ours: tuple, theirs: tuple, at_most: float) -> Iterator[list[str]]:
        if ours in times and theirs in times:
            ratio = times[ours].ms / times[theirs].ms
            yield [text, theirs[1], f"{ratio:.3f}", f"at most {at_most}", verdict(ratio <= at_most)]

    f32, bf16 = (1, CACHE, "float32"), (1, CACHE, "bfloat16")
    rows = [
        *one("float32", f32, (1, SDPA, "float32"), 0.2),
        *one("float32", f32, (1, MATMUL, "float32"), 0.5),
        *one("float32", f32, (1, VLLM, "float32"), 0.7),
        *one("bfloat16", bf16, (1, VLLM, "bfloat16"), 0.7),
        *one("bfloat16", bf16, f32, 0.7),
    ]
    read, two = times.get((1, READ, "float32")), times.get((2, CACHE, "float32"))
    if read and two:
        share = read.ms / two.ms
        text, wanted = "float32, bandwidth of two threads", "at least 0.85"
        rows.append([text, "`read` on one thread", f"{share:.3f}", wanted, verdict(share >= 0.85)])
    return rows


def report(measured: list[Measured]) -> str:
    head = ["context", "threads", "what", "type", "ms", "GB/s", "share of `read`"]
    parts = [table(head, [row.cells() for row in measured])]
    if targets := yardsticks(measured):
        parts.insert(0, table(["at 8,192 tokens", "beside", "ratio", "target", "met"], targets))
    return "\n\n".join(parts)


def plot(measured: list[Measured]) -> None:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 5), layout="constrained").add_subplot()
    for key in dict.fromkeys((row.side, row.dtype) for row in measured if row.threads == 1):
        line = [row for row in measured if (row.side, row.dtype) == key and row.threads == 1]
        style = "--" if key[0] == READ else "-" if "kvspan" in key[0] else ":"
        xs, ys = [row.tokens for row in line], [row.ms for row in line]
        axes.loglog(xs, ys, style, marker="o", label=", ".join(key))
    axes.set(
        xlabel="context (tokens)", ylabel="one query token (ms)", title="Attention, one thread"
    )
    axes.legend(fontsize="x-small")
    axes.figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds of the shortest context")
    parser.add_argument("--no-write", action="store_true", help="leave the report alone")
    args = parser.parse_args()
    print(f"{machine()}\n{versions()}")
    measured = rows(args.quick)
    text = report(measured)
    print(text)
    if not (args.no_write or args.quick):
        if find_spec("matplotlib"):
            plot(measured)
            text += f"\n\n![Time of one query token by context]({PLOT.name})"
        write_report(REPORT, "attention", text)


if __name__ == "__main__":
    main()
