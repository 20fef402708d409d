"""The command line: ``python -m kvspan replay TRACE --num-blocks N``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvspan import KvCacheError, _plot
from kvspan.replay import Outcome, Summary, Trace, TraceError, read_trace, replay, summarize

FAILED = 2  # as argparse exits
INTERRUPTED = 130  # as shells say of a command that Ctrl-C ended

COLUMNS = ["blocks", "hit blocks", "of blocks", "of tokens", "evictions", "peak use", "seconds"]
WIDTHS = [12, 12, 11, 11, 12, 12, 10]


class CommandError(Exception):
    """What whoever typed the command can mend."""


@dataclass(frozen=True)
class Run:
    """What became of a trace in a pool of ``num_blocks``."""

    num_blocks: int
    summary: Summary
    seconds: float

    def cells(self) -> list[str]:
        summary = self.summary
        return [
            f"{self.num_blocks:,}",
            f"{summary.hit_blocks:,}",
            f"{summary.block_hit_rate:.2%}",
            f"{summary.token_hit_rate:.2%}",
            f"{summary.evictions:,}",
            f"{summary.peak_blocks_in_use:,}",
            f"{self.seconds:.2f}",
        ]

    def to_json(self) -> str:
        summary = self.summary
        numbers = {
            "num_blocks": self.num_blocks,
            "requests": summary.requests,
            "full_blocks": summary.full_blocks,
            "hit_blocks": summary.hit_blocks,
            "block_hit_rate": summary.block_hit_rate,
            "token_hit_rate": summary.token_hit_rate,
            "evictions": summary.evictions,
            "seconds": round(self.seconds, 6),
        }
        return json.dumps(numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    options = new_parser().parse_args(arguments)
    try:
        run_replay(options)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except OSError as error:
        # The output can not be written. What Python still has of it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whoever read it has left
            say(f"error: {error.strerror or error}")
        return FAILED
    except CommandError as error:
        say(f"error: {error}")
        return FAILED
    return 0


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvspan", description="Tools around kvspan.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "replay",
        help="run a trace of requests through a manager, and show how much of it is cached",
        description="Run a trace of requests, one after the other, through a manager without "
        "storage, and show how much of it is cached.",
        usage="%(prog)s TRACE --num-blocks N [N ...] [--block-size B] [--json] [--plot FILE]",
    )
    command.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="requests, one a line: packed lists, or objects with hash_runs or hash_ids; may be gzipped",
    )
    command.add_argument(
        "--num-blocks",
        type=pool_size,
        nargs="+",
        required=True,
        metavar="N",
        help="blocks of the pool, without the null block; several pools are tried one after the other",
    )
    command.add_argument(
        "--block-size",
        type=positive,
        metavar="B",
        help="tokens of a block of the pool (default: as many as an id of the trace stands for)",
    )
    command.add_argument(
        "--json", action="store_true", help="print an object for each pool, one a line"
    )
    command.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the hit rates of the pools (needs matplotlib: pip install matplotlib)",
    )
    return parser


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def pool_size(text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        if Path(text).exists():
            raise argparse.ArgumentTypeError(f"{error}: TRACE comes before --num-blocks") from None
        raise


def run_replay(options: argparse.Namespace) -> None:
    if options.plot:
        check_plot(options.plot)  # before the work, which can be long
    trace = read(options.trace, options.block_size)
    block_size = options.block_size or trace.block_size
    if not options.json:
        print_heading(options.trace.name, trace, block_size)
    runs = []
    for num_blocks in options.num_blocks:
        run = replay_once(trace, num_blocks, block_size)
        runs.append(run)
        print(run.to_json() if options.json else row(run.cells()), flush=True)
        if run.summary.refused:
            say(
                f"{run.summary.refused:,} of {run.summary.requests:,} requests need more than "
                f"{num_blocks:,} blocks: they were refused, and count as if none of theirs hit"
            )
    if options.plot:
        points = [
            (run.num_blocks, run.summary.block_hit_rate, run.summary.token_hit_rate) for run in runs
        ]
        title = f"{options.trace.name}, blocks of {block_size:,} tokens"
        try:
            _plot.plot_hit_rates(points, title).savefig(options.plot)
        except OSError as error:
            raise CommandError(f"{options.plot}: {error.strerror or error}") from error


def check_plot(file: Path) -> None:
    try:
        known = _plot.file_formats()
    except ImportError as error:
        raise CommandError(error) from error
    if file.suffix[1:] not in known:
        raise CommandError(f"{file}: a plot can be one of {', '.join(known)}")


def read(file: Path, block_size: int | None) -> Trace:
    try:
        return read_trace(file, block_size=block_size)
    except TraceError as error:
        raise CommandError(f"{file}: {error}") from error
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror or error}") from error


def replay_once(trace: Trace, num_blocks: int, block_size: int) -> Run:
    begin = time.perf_counter()
    try:
        outcomes = replay(trace, num_blocks, block_size=block_size)
    except KvCacheError as error:
        raise CommandError(f"no pool of {num_blocks:,} blocks: {error}") from error
    summary = summarize(with_progress(outcomes, len(trace.requests), num_blocks))
    return Run(num_blocks, summary, time.perf_counter() - begin)


def print_heading(name: str, trace: Trace, block_size: int) -> None:
    lengths = [request.num_tokens for request in trace.requests]
    num_full = sum(length // block_size for length in lengths)
    print(
        f"{name}: {len(lengths):,} requests of {sum(lengths):,} tokens, "
        f"{num_full:,} full blocks of {block_size:,}\n"
    )
    print(row(COLUMNS), flush=True)


def row(cells: list[str]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS))


def with_progress(outcomes: Iterator[Outcome], total: int, num_blocks: int) -> Iterator[Outcome]:
    """Show a bar on a terminal, if tqdm is there."""
    if sys.stderr is None:  # closed by whoever started this
        return outcomes
    try:
        from tqdm import tqdm
    except ImportError:
        return outcomes
    bar = tqdm(
        outcomes, f"{num_blocks:,} blocks", total, leave=False, disable=None, unit=" requests"
    )
    return iter(bar)


def say(text: str) -> None:
    if sys.stderr is not None:
        print(f"kvspan replay: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
