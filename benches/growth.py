"""How the cost of each call grows: with the pool, and with the prompt. A table and a plot."""

import gc
import timeit
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

import kvspan
from measure import ROOT, Pace, table
from shapes import BLOCK_SIZE

PLOT = ROOT / "docs" / "growth.svg"

R = TypeVar("R")

LEGEND = """\
Microseconds a block of the prompt, medians; `extend` is of one token, in microseconds. All blocks of the
pool are cached, so that `evicting` evicts: the prompt is another one each time. What grows with the pool
is what the caches of the CPU do not hold.

![Cost of calls beside pool size and prompt length](growth.svg)"""

POOLS = [1_000, 10_000, 100_000, 1_000_000, 10_000_000]
SHORT = 4_096  # tokens of the prompts in pools of all sizes
PROMPTS = [1_000, 10_000, 100_000, 1_000_000]
ROOMY = 1 << 17  # blocks of the pool for prompts of all lengths


class Costs(NamedTuple):
    """Microseconds a block, but for `extend`."""

    keys: float
    evicting: float
    look_up: float
    full_hit: float
    free: float
    extend: float


def run(pace: Pace) -> str:
    pools, prompts = (POOLS[:2], PROMPTS[:2]) if pace.quick else (POOLS, PROMPTS)
    by_pool = {pool: costs(pool, SHORT, pace) for pool in pools}
    by_prompt = {length: costs(ROOMY, length, pace) for length in prompts}
    if not pace.quick:
        plot(by_pool, by_prompt)
    head = ["", *(name.replace("_", " ") for name in Costs._fields)]
    first = table(head, list(cells(by_pool, "blocks")))
    second = table(head, list(cells(by_prompt, "tokens")))
    return (
        f"{LEGEND}\n\nPrompts of {SHORT:,} tokens in pools of\n\n{first}\n\n"
        f"In a pool of {ROOMY:,} blocks, prompts of\n\n{second}"
    )


def cells(costs: dict[int, Costs], unit: str) -> Iterator[list[str]]:
    for size, cost in costs.items():
        yield [f"{size:,} {unit}", *(f"{value:.4f}" for value in cost)]


def costs(num_blocks: int, length: int, pace: Pace) -> Costs:
    manager = kvspan.KvCacheManager(num_blocks, block_size=BLOCK_SIZE, storage=False)
    generator = np.random.default_rng(0)

    def tokens() -> np.ndarray:
        return generator.integers(0, 1 << 31, length, dtype=np.int32)

    gc.collect()
    while manager.stats().num_free >= length // BLOCK_SIZE:
        start(manager, tokens()).close()
    times: dict[str, list[float]] = {name: [] for name in Costs._fields}
    for _ in range(pace.count(40)):
        prompt = tokens()
        chain = timed(times["keys"], manager.block_keys, prompt)
        handle = timed(times["evicting"], start, manager, chain, prompt)
        manager.free(handle)
        timed(times["look_up"], manager.probe, chain)
        handle = timed(times["full_hit"], manager.allocate, chain)
        timed(times["free"], manager.free, handle)
        with manager.allocate(prompt[: min(length, 1_000)]) as short:
            for _ in range(64):
                timed(times["extend"], manager.extend, short)
    per_block = {
        name: np.median(taken) * 1e6 / (length // BLOCK_SIZE) for name, taken in times.items()
    }
    return Costs(**{**per_block, "extend": float(np.median(times["extend"])) * 1e6})


def start(
    manager: kvspan.KvCacheManager,
    prompt: np.ndarray | kvspan.KeyChain,
    tokens: np.ndarray | None = None,
) -> kvspan.PagedKvCacheHandle:
    handle = manager.allocate(prompt)
    manager.commit(handle, prompt if tokens is None else tokens)
    return handle


def timed(times: list[float], call: Callable[..., R], *arguments: object) -> R:
    begin = timeit.default_timer()
    result = call(*arguments)
    times.append(timeit.default_timer() - begin)
    return result


def plot(by_pool: dict[int, Costs], by_prompt: dict[int, Costs]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvspan"  # the same names of elements each time
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    kinds = (("blocks of the pool", by_pool), ("tokens of the prompt", by_prompt))
    for ax, (label, sizes) in zip(axes, kinds):
        for name in Costs._fields:
            taken = [getattr(cost, name) for cost in sizes.values()]
            ax.plot(list(sizes), taken, marker="o", label=name.replace("_", " "))
        ax.set(xscale="log", yscale="log", xlabel=label)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds a block (extend: a token)")
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)
