"""Measure kvspan beside what people use today; print tables and write docs/benchmarks.md.

    python benches/table.py [--quick] [--no-write] [subject ...]

Each subject is a module beside this one. Its rows do the same work on both sides, in rounds that
alternate between the two (ABBA), and compare the medians. Rows about Rust come from the program in
benches/peer. Peers that are not installed (torch, transformers, vLLM) are left out, and the report says
so.
"""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # one core a side; has an effect only before NumPy is imported
)

import argparse
import gc
from collections.abc import Callable

import blocks
import layer
from measure import FULL, QUICK, ROOT, Pace, machine, versions, write_report

REPORT = ROOT / "docs" / "benchmarks.md"

# By name, in the order of the report: what gives a subject's measured part as Markdown.
SUBJECTS: dict[str, Callable[[Pace], str]] = {"layer": layer.run, "blocks": blocks.run}


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
    parser.add_argument("subject", nargs="*", choices=[*SUBJECTS, []], help="all by default")
    args = parser.parse_args()
    pace = QUICK if args.quick else FULL

    gc.disable()
    print(f"{machine()}\n{versions()}")
    for subject in args.subject or SUBJECTS:
        measured = SUBJECTS[subject](pace)
        print(f"\n## {subject}\n\n{measured}", flush=True)
        if not (args.no_write or args.quick):
            write_report(REPORT, subject, measured)


if __name__ == "__main__":
    main()
