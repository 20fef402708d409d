"""The bookkeeping of blocks beside vLLM's scheduler, and beside the crate ferrum-kv.

vLLM's half runs in a process of its own (vllm_half.py) that waits while ours runs, and the other way
round. Without vLLM there are our times alone.
"""

import gc
import importlib.util
import json
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import growth
import kvspan
from measure import HEAD, Pace, Row, alternate, median, table, table_in_rust
from shapes import BLOCK_SIZE, DECODE_LENGTHS, LONG, NUM_BLOCKS, PROMPT, STEPS, hot, prompt

LEGEND = """\
A prompt of 16,384 tokens in blocks of 16, keys of SHA-256 on both sides. Token ids are a list for vLLM,
as it wants them, and an int64 array for kvspan. `allocate` takes the blocks of a prompt that nobody has
seen and commits them (one call in vLLM, two here). A decode step makes room for one token of each
sequence, and with `commit` also takes note of the token and hashes a block that is full; in vLLM that is
a call for each sequence (`allocate_slots`, which also commits, and `append_output_token_ids`)."""

RUST_LEGEND = """\
`theirs` is the crate ferrum-kv, which shares no prefixes: both sides keep count of blocks alone. Afterwards
no block is missing on either side."""


def run(pace: Pace) -> str:
    peer = Peer.start()
    rows = list(measured(pace, peer))
    in_python = table(HEAD, [row.cells() for row in rows])
    in_rust = table_in_rust("blocks", pace)
    grown = growth.run(pace)
    return (
        f"### From Python\n\n{LEGEND}\n\n{in_python}\n\n### In Rust\n\n{RUST_LEGEND}\n\n{in_rust}"
        f"\n\n### Growth\n\n{grown}"
    )


class Peer:
    """vLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @classmethod
    def start(cls) -> "Peer | None":
        if importlib.util.find_spec("vllm") is None:
            return None
        script = Path(__file__).with_name("vllm_half.py")
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"vLLM is installed, but {script.name} does not run with it")
        return cls(process)

    def sampler(self, name: str) -> Callable[[], float]:
        def sample() -> float:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

        sample()  # which prepares it
        return sample


def measured(pace: Pace, peer: Peer | None) -> Iterator[Row]:
    def row(
        operation: str,
        beside: str,
        name: str,
        ours: Callable[[], float],
        target: float | None,
        unit: str = "us",
        bound: float | None = None,
    ) -> Row:
        scale = {"ns": 1, "us": 1e3}[unit]
        ours()
        if peer is None:
            own = median(ours, pace.rounds)
            return Row(operation, "", None, own / scale, target, unit, bound)
        theirs, own = alternate(peer.sampler(name), ours, pace.rounds)
        return Row(operation, beside, theirs / scale, own / scale, target, unit, bound)

    gc.disable()
    yield row("keys of a prompt", "`request_block_hasher`", "keys", hot(keys(PROMPT)), 1 / 20)
    yield row(
        "look up a cached prompt, keys known",
        "`get_computed_blocks`",
        "look-up",
        hot(look_up()),
        1 / 60,
    )
    yield row(
        "share a cached prompt, keys known",
        "`get_computed_blocks`, `allocate_slots`",
        "full hit",
        hot(full_hit()),
        1 / 60,
    )
    yield row(
        "allocate and commit a prompt",
        "`allocate_slots`",
        "allocate",
        hot(allocate("allocate")),
        1 / 15,
    )
    yield row("the same while evicting", "`allocate_slots`", "evicting", hot(evicting()), 1 / 12)
    yield row("free a prompt", "`free`", "free", hot(allocate("free")), 1 / 25)
    yield row(
        "keys of 131,072 tokens, and a look-up",
        "`request_block_hasher`",
        "keys of a long prompt",
        hot(keys_and_look_up(LONG)),
        None,
        bound=1_000,
    )
    for count, target in ((1, 1 / 30), (64, 1 / 300)):
        calls = "a call" if count == 1 else f"{count} in a call"
        yield row(
            f"decode step, a sequence, {calls}",
            "`allocate_slots`",
            f"decode {count}",
            decode(count, commit=False),
            target,
            "ns",
        )
        yield row(
            f"the same with `commit`, {calls}",
            "`append_output_token_ids`, `allocate_slots`",
            f"whole decode {count}",
            decode(count, commit=True),
            target,
            "ns",
        )


def new_manager(num_blocks: int) -> kvspan.KvCacheManager:
    return kvspan.KvCacheManager(num_blocks, block_size=BLOCK_SIZE, storage=False)


def timed(call: Callable[[], object]) -> float:
    start = timeit.default_timer()
    call()
    return (timeit.default_timer() - start) * 1e9


def keys(length: int) -> Callable[[], float]:
    manager, tokens = new_manager(1), prompt(0, length)
    return lambda: timed(lambda: manager.block_keys(tokens))


def keys_and_look_up(length: int) -> Callable[[], float]:
    manager, tokens = new_manager(length // BLOCK_SIZE), prompt(0, length)
    cached(manager, tokens)
    return lambda: timed(lambda: manager.probe(tokens))


def cached(manager: kvspan.KvCacheManager, tokens: np.ndarray) -> kvspan.KeyChain:
    """The keys of a prompt that is cached."""
    chain = manager.block_keys(tokens)
    with manager.allocate(chain) as handle:
        manager.commit(handle, tokens)
    return chain


def look_up() -> Callable[[], float]:
    manager = new_manager(NUM_BLOCKS)
    chain = cached(manager, prompt(0, PROMPT))
    assert manager.probe(chain) == PROMPT - BLOCK_SIZE
    return lambda: timed(lambda: manager.probe(chain))


def full_hit() -> Callable[[], float]:
    manager = new_manager(NUM_BLOCKS)
    chain = cached(manager, prompt(0, PROMPT))

    def sample() -> float:
        start = timeit.default_timer()
        handle = manager.allocate(chain)
        elapsed = timeit.default_timer() - start
        manager.free(handle)
        return elapsed * 1e9

    return sample


def allocate(part: str) -> Callable[[], float]:
    manager, tokens = new_manager(NUM_BLOCKS), prompt(0, PROMPT)
    chain = manager.block_keys(tokens)

    def sample() -> float:
        manager.reset_prefix_cache()
        start = timeit.default_timer()
        handle = manager.allocate(chain)
        manager.commit(handle, tokens)
        middle = timeit.default_timer()
        manager.free(handle)
        end = timeit.default_timer()
        return (middle - start if part == "allocate" else end - middle) * 1e9

    return sample


def evicting() -> Callable[[], float]:
    """More prompts than the pool holds, in turn, so that none is there when it comes again."""
    manager = new_manager(4 * PROMPT // BLOCK_SIZE)
    prompts = [prompt(number, PROMPT) for number in range(5)]
    chains = [manager.block_keys(tokens) for tokens in prompts]
    turn = 0

    def sample() -> float:
        nonlocal turn
        tokens, chain = prompts[turn % len(prompts)], chains[turn % len(prompts)]
        turn += 1
        start = timeit.default_timer()
        handle = manager.allocate(chain)
        manager.commit(handle, tokens)
        elapsed = timeit.default_timer() - start
        manager.free(handle)
        return elapsed * 1e9

    for _ in prompts:
        sample()
    return sample


def decode(num_sequences: int, *, commit: bool) -> Callable[[], float]:
    """One token more for each of many sequences, of a step of one."""
    manager = new_manager(NUM_BLOCKS)
    prompts = [prompt(number, length) for number, length in enumerate(DECODE_LENGTHS)]
    prompts = prompts[:num_sequences]

    def sample() -> float:
        handles = manager.allocate_many(prompts)
        for handle, tokens in zip(handles, prompts):
            manager.commit(handle, tokens[handle.num_cached_tokens :])
        tokens = np.full(num_sequences, 7)
        names = {"manager": manager, "handles": handles, "handle": handles[0], "tokens": tokens}
        code = "manager.extend(handle)" if num_sequences == 1 else "manager.extend_many(handles)"
        if commit:
            one = "manager.commit(handle, tokens)"
            code += f"; {one if num_sequences == 1 else 'manager.commit_many(handles, tokens)'}"
        elapsed = timeit.timeit(code, number=STEPS, globals=names)
        manager.free_many(handles)
        return elapsed / STEPS / num_sequences * 1e9

    return sample
