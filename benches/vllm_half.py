"""vLLM's half of the rows about blocks: reads the name of a row a line, and answers each with the
nanoseconds that vLLM took, as one line of JSON.

It is a process of its own, since what vLLM sets on import is not for others. Its classes are used as
its scheduler uses them: SHA-256, one group of layers, blocks of 16 tokens, lists of token ids.
"""

import gc
import json
import logging
import sys
import time
from collections.abc import Callable

logging.disable(logging.WARNING)

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from shapes import BLOCK_SIZE, DECODE_LENGTHS, LONG, NUM_BLOCKS, PROMPT, STEPS, hot, prompt

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)
MAX_LEN = 1 << 20


def new_manager(num_blocks: int) -> KVCacheManager:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.float32
    )
    config = KVCacheConfig(
        num_blocks=num_blocks + 1,  # the null block is one of them
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=MAX_LEN,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
    )


def new_request(name: int, tokens: list[int], *, keyed: bool = True) -> Request:
    return Request(
        str(name),
        tokens,
        SamplingParams(max_tokens=STEPS + 1),
        None,
        block_hasher=HASHER if keyed else None,
    )


def timed(call: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def keys(length: int) -> Callable[[], float]:
    request = new_request(0, prompt(0, length).tolist(), keyed=False)
    return lambda: timed(lambda: HASHER(request))


def cached(manager: KVCacheManager, length: int) -> Request:
    """A request whose prompt is cached."""
    request = new_request(0, prompt(0, length).tolist())
    assert manager.allocate_slots(request, length) is not None
    manager.free(request)
    return request


def look_up() -> Callable[[], float]:
    manager = new_manager(NUM_BLOCKS)
    request = cached(manager, PROMPT)
    assert manager.get_computed_blocks(request)[1] == PROMPT - BLOCK_SIZE
    return lambda: timed(lambda: manager.get_computed_blocks(request))


def full_hit() -> Callable[[], float]:
    manager = new_manager(NUM_BLOCKS)
    request = cached(manager, PROMPT)

    def allocate() -> None:
        blocks, num_hits, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, PROMPT - num_hits, num_hits, blocks) is not None

    def sample() -> float:
        elapsed = timed(allocate)
        manager.free(request)
        return elapsed

    return sample


def allocate(part: str) -> Callable[[], float]:
    manager = new_manager(NUM_BLOCKS)
    request = new_request(0, prompt(0, PROMPT).tolist())

    def sample() -> float:
        manager.reset_prefix_cache()
        allocated = timed(lambda: manager.allocate_slots(request, PROMPT))
        freed = timed(lambda: manager.free(request))
        return allocated if part == "allocate" else freed

    return sample


def evicting() -> Callable[[], float]:
    """More prompts than the pool holds, in turn, so that none is there when it comes again."""
    manager = new_manager(4 * PROMPT // BLOCK_SIZE)
    requests = [new_request(number, prompt(number, PROMPT).tolist()) for number in range(5)]
    turn = 0

    def sample() -> float:
        nonlocal turn
        request = requests[turn % len(requests)]
        turn += 1
        elapsed = timed(lambda: manager.allocate_slots(request, PROMPT))
        manager.free(request)
        return elapsed

    for _ in requests:
        sample()
    return sample


def decode(num_sequences: int, *, whole: bool) -> Callable[[], float]:
    """One token more for each of many sequences, of a step of one; `whole` counts that vLLM takes note of
    the token, and hashes a block that it fills."""
    manager = new_manager(NUM_BLOCKS)

    def sample() -> float:
        requests = []
        for number, length in enumerate(DECODE_LENGTHS[:num_sequences]):
            request = new_request(number, prompt(number, length).tolist())
            blocks, num_hits, _ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, length - num_hits, num_hits, blocks)
            requests.append(request)
        elapsed = 0
        for _ in range(STEPS):
            start = time.perf_counter_ns()
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                request.append_output_token_ids(7)
            middle = time.perf_counter_ns()
            for request in requests:
                manager.allocate_slots(request, 1)
            end = time.perf_counter_ns()
            elapsed += end - (start if whole else middle)
        for request in requests:
            manager.free(request)
        return elapsed / STEPS / num_sequences

    return sample


ROWS: dict[str, Callable[[], Callable[[], float]]] = {
    "keys": lambda: hot(keys(PROMPT)),
    "keys of a long prompt": lambda: keys(LONG),
    "look-up": lambda: hot(look_up()),
    "full hit": lambda: hot(full_hit()),
    "allocate": lambda: hot(allocate("allocate")),
    "free": lambda: hot(allocate("free")),
    "evicting": lambda: hot(evicting()),
    "decode 1": lambda: decode(1, whole=False),
    "decode 64": lambda: decode(64, whole=False),
    "whole decode 1": lambda: decode(1, whole=True),
    "whole decode 64": lambda: decode(64, whole=True),
}


def main() -> None:
    gc.disable()
    samplers: dict[str, Callable[[], float]] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name not in samplers:
            samplers[name] = ROWS[name]()
            samplers[name]()  # a round to warm up
        print(json.dumps(samplers[name]()), flush=True)


if __name__ == "__main__":
    main()
