"""Measure how fast a language model decodes with keys and values of each element type.

    python benches/model.py [--quick] [--no-write]

The model of examples/smollm2.py, with one sequence in blocks, and everything on one thread. A prompt is
computed once; the other types get its keys and values. All types then decode the same token in turn, and
give it back. Replaces what is between the second marks in docs/attention.md.
"""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # has an effect only before NumPy is imported

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

import kvspan
from measure import ROOT, machine, table, versions, write_report

sys.path.insert(0, str(ROOT / "examples"))
import smollm2

REPORT = ROOT / "docs" / "attention.md"
TYPES = ("float32", "float16", "bfloat16", "int8")
CONTEXTS = (512, 4096)
CHUNK = 256


@dataclass
class Sequence:
    manager: kvspan.KvCacheManager
    request: smollm2.Request


def prompt(model: smollm2.Model, length: int) -> Sequence:
    """A sequence of float32 whose keys and values are those of a text."""
    text = smollm2.SYSTEM_PROMPT * (1 + length // 50)
    sequence = started(model, model.tokenizer.encode(text).ids[:length], 0, "float32")
    manager, request = sequence.manager, sequence.request
    for start in range(0, length, CHUNK):
        request.new_ids = request.prompt_ids[start : start + CHUNK]
        manager.extend(request.handle, len(request.new_ids))
        smollm2.forward(model, manager, [request])
    return sequence


def converted(model: smollm2.Model, original: Sequence, dtype: str) -> Sequence:
    ids = original.request.prompt_ids
    sequence = started(model, ids, len(ids), dtype)
    for layer in range(len(model.layers)):
        keys, values = original.manager.read_range(original.request.handle, layer)
        sequence.manager.write(sequence.request.handle, layer, 0, keys, values)
    return sequence


def started(model: smollm2.Model, ids: list[int], num_tokens: int, dtype: str) -> Sequence:
    """A sequence that has its first tokens, and a manager with room for all and one more."""
    num_blocks = len(ids) // smollm2.BLOCK_SIZE + 1
    manager = smollm2.new_manager(model, num_blocks, dtype=dtype)
    return Sequence(manager, smollm2.Request("", ids, 1, manager.allocate(ids[:num_tokens])))


def decode(model: smollm2.Model, sequence: Sequence) -> float:
    """Seconds of one more token, which is taken back afterwards."""
    manager, handle = sequence.manager, sequence.request.handle
    length = handle.num_tokens
    sequence.request.new_ids = sequence.request.prompt_ids[-1:]
    start = time.perf_counter()
    manager.extend(handle)
    smollm2.forward(model, manager, [sequence.request])
    seconds = time.perf_counter() - start
    manager.truncate(handle, length)
    return seconds


def attend(model: smollm2.Model, sequence: Sequence, query: np.ndarray) -> float:
    """Seconds of the attention in all layers."""
    handle = sequence.request.handle
    start = time.perf_counter()
    for layer in range(len(model.layers)):
        kvspan.attention(query, handle, layer)
    return time.perf_counter() - start


def measure(model: smollm2.Model, length: int, rounds: int) -> list[list[str]]:
    original = prompt(model, length)
    sequences = [original, *(converted(model, original, dtype) for dtype in TYPES[1:])]
    query = np.random.default_rng(0).standard_normal(
        (model.num_heads, model.head_dim), dtype=np.float32
    )
    steps, attention = ([[] for _ in TYPES] for _ in range(2))
    for round_ in range(rounds):
        for index in range(len(TYPES)) if round_ % 2 else reversed(range(len(TYPES))):
            steps[index].append(decode(model, sequences[index]))
            attention[index].append(attend(model, sequences[index], query))
    rows = []
    for dtype, sequence, step, part in zip(TYPES, sequences, steps, attention):
        memory = sequence.manager.stats().block_bytes // smollm2.BLOCK_SIZE
        seconds, share = statistics.median(step), statistics.median(part)
        cells = [f"{1 / seconds:.1f}", f"{share * 1e3:.2f} ms", f"{share / seconds:.0%}"]
        rows.append([f"{length:,}", dtype, f"{memory:,}", *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of a short context")
    parser.add_argument("--no-write", action="store_true", help="leave the report alone")
    args = parser.parse_args()
    gc.disable()
    print(f"{machine()}\n{versions()}")
    model = smollm2.load_model()
    contexts, rounds = ((64,), 2) if args.quick else (CONTEXTS, 31)
    rows = [row for length in contexts for row in measure(model, length, rounds)]
    head = ["context", "type", "bytes a token", "tokens/s", "attention", "its share"]
    text = table(head, rows)
    print(text)
    if not (args.no_write or args.quick):
        write_report(REPORT, "model", text)


if __name__ == "__main__":
    main()
