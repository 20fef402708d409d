"""Plots. They load matplotlib, the extra ``plot``, when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_matplotlib() -> None:
    """Raise an ``ImportError`` that says what to do if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ImportError(
            "matplotlib is not installed: pip install 'kvspan[plot]'", name="matplotlib"
        )


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
