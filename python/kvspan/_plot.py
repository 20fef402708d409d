"""Pictures of a pool, and of what pools of several sizes hit.

Those that matplotlib draws load it when they are drawn; it is the extra ``plot``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvspan import BlockPicture, KvCacheManager

# More can not be told apart; each stands for several blocks then.
MAX_CELLS = 64 * 64
MAX_CELLS_WITH_LINES = 32 * 32
MAX_CELLS_WITH_NUMBERS = 16 * 16


class Kind(NamedTuple):
    """Blocks that look the same."""

    label: str
    colour: str


# Where a state is in use, there is one for each number of sequences, and the last is for more.
FREE, CACHED, PINNED, IN_USE = 0, 1, 2, 3
KINDS = [
    Kind("free", "#eeeeee"),
    Kind("cached", "#fdd49e"),
    Kind("held by a view only", "#c51b8a"),
    Kind("in use by one sequence", "#9ecae1"),
    Kind("shared by two", "#4292c6"),
    Kind("shared by more", "#084594"),
]
MAX_SHARING = len(KINDS) - IN_USE


def load_matplotlib() -> None:
    """Raise an ``ImportError`` that says what to do if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ImportError("matplotlib is not installed: pip install matplotlib", name="matplotlib")


# A pool


def plot_pool(manager: KvCacheManager, ax: Axes | None = None) -> Axes:
    """Draw what ``KvCacheManager.plot`` says."""
    load_matplotlib()
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(9, 6), layout="compressed")

    # All that is said of blocks comes from one look at them.
    blocks = manager.inspect().blocks
    kinds = np.fromiter(map(kind_of, blocks), np.intp, len(blocks))
    blocks_per_cell = math.ceil(len(blocks) / MAX_CELLS)
    num_cells = math.ceil(len(blocks) / blocks_per_cell)
    num_columns = math.ceil(math.sqrt(num_cells))
    num_rows = math.ceil(num_cells / num_columns)

    ax.imshow(
        picture(kinds, blocks_per_cell, num_rows, num_columns),
        interpolation="nearest",
        aspect="equal",
    )
    ax.set_xticks([])
    ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    first = blocks[0].block
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda row, _: f"{first + round(row) * num_columns * blocks_per_cell:,}")
    )
    ax.set_ylabel("first block of the row")
    if num_cells <= MAX_CELLS_WITH_LINES:
        ax.set_xticks(np.arange(0.5, num_columns - 1), minor=True)
        ax.set_yticks(np.arange(0.5, num_rows - 1), minor=True)
        ax.grid(which="minor", color="white")
        ax.tick_params(which="minor", length=0)
    if num_cells <= MAX_CELLS_WITH_NUMBERS:
        for cell, block in enumerate(blocks):
            if block.reference_count > 1:
                row, column = divmod(cell, num_columns)
                ax.text(
                    column, row, f"{block.reference_count}", color="white", ha="center", va="center"
                )

    counts = np.bincount(kinds, minlength=len(KINDS))
    ax.legend(
        handles=[
            Patch(facecolor=kind.colour, edgecolor="grey", label=f"{kind.label}: {count:,}")
            for kind, count in zip(KINDS, counts)
        ],
        title="blocks" if blocks_per_cell == 1 else f"blocks, {blocks_per_cell:,} a cell",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(1.02, 1),
        borderaxespad=0,
        frameon=False,
    )
    stats, num_in_use = manager.stats(), counts[PINNED] + counts[IN_USE:].sum()
    ax.set_title(
        f"{len(blocks):,} blocks of {manager.block_size:,} tokens, "
        f"{stats.num_sequences:,} sequences\n"
        f"{num_in_use:,} in use, {counts[CACHED]:,} cached, {counts[FREE]:,} free; "
        f"{stats.hit_rate:.1%} of {stats.query_tokens:,} tokens hit"
    )
    return ax


def kind_of(block: BlockPicture) -> int:
    match block.state:
        case "free":
            return FREE
        case "cached":
            return CACHED
        case "pinned":
            return PINNED
    return IN_USE + min(block.reference_count, MAX_SHARING) - 1


def picture(
    kinds: npt.NDArray[np.intp], blocks_per_cell: int, num_rows: int, num_columns: int
) -> npt.NDArray[np.float64]:
    """Colours of cells, ``[rows, columns, red-green-blue-alpha]``.

    A cell of several blocks has the mean of their colours; cells behind the last block have none.
    """
    from matplotlib.colors import to_rgba_array

    colours = to_rgba_array([kind.colour for kind in KINDS])[kinds]
    starts = np.arange(0, len(kinds), blocks_per_cell)
    sums = np.add.reduceat(colours, starts)
    cells = np.zeros((num_rows * num_columns, 4))
    cells[: len(starts)] = sums / sums[:, 3:]  # each block has an alpha of 1
    return cells.reshape(num_rows, num_columns, 4)


def pool_as_html(manager: KvCacheManager) -> str:
    """Return what a notebook shows of a manager."""
    stats = manager.stats()
    states = [
        ("in use", stats.num_in_use, KINDS[IN_USE].colour),
        ("cached", stats.num_cached, KINDS[CACHED].colour),
        ("free", stats.num_free, KINDS[FREE].colour),
    ]
    bar = "".join(
        f'<div title="{name}" style="width: {count / stats.num_blocks:.2%}; background: {colour}"></div>'
        for name, count, colour in states
    )
    content = "none, bookkeeping alone"
    if manager.has_storage:
        content = (
            f"{manager.nbytes:,} bytes: {counted(manager.num_layers, 'layer')}, "
            f"{counted(manager.num_kv_heads, 'KV head')} of {manager.head_dim:,}, {manager.dtype}"
        )
    rows = [
        ("blocks", f"{stats.num_blocks:,} of {manager.block_size:,} tokens"),
        *((name, f"{count:,} ({count / stats.num_blocks:.1%})") for name, count, _ in states),
        ("sequences", f"{stats.num_sequences:,}"),
        ("hits", f"{stats.hit_tokens:,} of {stats.query_tokens:,} tokens ({stats.hit_rate:.1%})"),
        ("evictions, copies", f"{stats.num_evictions:,}, {stats.num_copies:,}"),
        ("storage", content),
    ]
    table = "".join(
        f'<tr><th style="text-align: left">{name}</th><td style="text-align: left">{value}</td></tr>'
        for name, value in rows
    )
    return (
        f"<div><strong>KvCacheManager</strong>"
        f'<div style="display: flex; width: 24em; height: 0.8em; border: 1px solid grey">{bar}</div>'
        f"<table>{table}</table></div>"
    )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# Hit rates


def file_formats() -> list[str]:
    """Return the endings of the files that a plot can be saved in."""
    load_matplotlib()
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def plot_hit_rates(points: Sequence[tuple[int, float, float]], title: str) -> Figure:
    """Draw hit rates, ``(num_blocks, of blocks, of tokens)``, over the sizes of pools."""
    load_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    num_blocks, of_blocks, of_tokens = zip(*sorted(points))
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    ax.plot(num_blocks, of_blocks, marker="o", label="of full blocks")
    ax.plot(num_blocks, of_tokens, marker="s", label="of tokens")
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(which="both", alpha=0.3)
    ax.set_xlabel("blocks of the pool")
    ax.set_ylabel("hit rate")
    ax.set_title(title)
    ax.legend()
    return figure
