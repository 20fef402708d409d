"""Runs a recorded trace of requests through a manager without storage, and counts what hits.

A trace says of each request how many tokens its prompt had, and names its blocks by ids: requests
have the same id where they agree in that block and in all before it. There are three formats, one
request a line, gzipped or not:

=========  =========================================================================  ============
format     line                                                                       tokens an id
=========  =========================================================================  ============
packed     ``[timestamp, input_length, output_length, [id or [first, count], ...]]``  512
hash_runs  ``{"input_length": ..., "hash_runs": [[first, last], ...], ...}``          64
hash_ids   ``{"input_length": ..., "hash_ids": [id, ...], ...}``                      512
=========  =========================================================================  ============

The last id may stand for a partial block, or a partial block may have none. A line of ``hash_ids``
needs no ``input_length`` if all its blocks are full. If the numbers of ids do not agree with the
lengths at the block size of the format, then they are those of the block size that is asked for, or
of the one power of two that agrees with all lines.

The tokens themselves are not recorded, so each is the number of its id: equal prefixes have equal
tokens, and different ones have not. The blocks of the pool may be smaller or larger than those of
the trace. What the manager counts as a token are as many of the trace's as divide both sizes, which
changes no number of blocks: where the sizes are the same, a block of either is one token.

Requests run one at a time, in the order of the file. Each is allocated, committed and freed before
the next one comes; what the model answered is no part of it. A request that needs more blocks than
there are is refused: it counts with all its tokens and blocks, and none of them hits.

>>> import numpy as np
>>> from kvspan.replay import Request, Trace, replay, summarize
>>> request = Request(num_tokens=1100, ids=np.array([7, 8, 9], np.uint32))
>>> trace = Trace(block_size=512, requests=[request, request])
>>> outcomes = list(replay(trace, num_blocks=100))
>>> [outcome.hit_blocks for outcome in outcomes]
[0, 2]
>>> summarize(outcomes).token_hit_rate
0.465455
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from kvspan import KvCacheManager
from kvspan.errors import OutOfBlocksError

__all__ = [
    "Outcome",
    "Request",
    "Summary",
    "Trace",
    "TraceError",
    "read_trace",
    "replay",
    "summarize",
]

# More are a mistake in the file. At worst, where each is a block of the pool, as many take two
# gigabytes for the time of their request.
MAX_TOKENS_OF_A_REQUEST = 2**24
POWERS_OF_TWO = [1 << exponent for exponent in range(17)]


class TraceError(ValueError):
    """A file is no trace, or a line of it is no request."""


@dataclass(frozen=True)
class Request:
    """The prompt of a request: its length, and a number for each block, a partial one included."""

    num_tokens: int
    ids: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival; each id stands for ``block_size`` tokens."""

    block_size: int
    requests: list[Request]


@dataclass(frozen=True)
class Outcome:
    """What became of one request: ``blocks_in_use`` while it ran, ``evictions`` to make room."""

    num_tokens: int
    full_blocks: int
    hit_tokens: int = 0
    hit_blocks: int = 0
    evictions: int = 0
    blocks_in_use: int = 0
    refused: bool = False


@dataclass(frozen=True)
class Summary:
    """What became of all requests; the rates are rounded to six decimals."""

    requests: int
    refused: int
    num_tokens: int
    full_blocks: int
    hit_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    evictions: int
    peak_blocks_in_use: int


def replay(trace: Trace, num_blocks: int, *, block_size: int | None = None) -> Iterator[Outcome]:
    """Run a trace through a new manager of ``num_blocks`` blocks; yields what becomes of each request.

    A block of the pool has ``block_size`` tokens; by default, as many as one of the trace. Raises
    ``ValueError`` if there are no blocks, or no tokens in one.
    """
    if block_size is None:
        block_size = trace.block_size
    if block_size < 1:
        raise ValueError(f"a block has at least 1 token, not {block_size}")
    scale = math.gcd(block_size, trace.block_size)
    manager = KvCacheManager(num_blocks, block_size=block_size // scale, storage=False)
    return (serve(manager, request, trace.block_size, scale) for request in trace.requests)


def serve(manager: KvCacheManager, request: Request, tokens_per_id: int, scale: int) -> Outcome:
    # A token that is there in part needs a slot, but its block is not full and can not be found.
    num_slots, num_whole = -(-request.num_tokens // scale), request.num_tokens // scale
    tokens = np.repeat(request.ids, tokens_per_id // scale)[:num_slots]
    full_blocks = num_whole // manager.block_size
    evictions_before = manager.stats().num_evictions
    try:
        handle = manager.allocate(tokens)
    except OutOfBlocksError:
        return Outcome(request.num_tokens, full_blocks, refused=True)
    with handle:
        num_cached = handle.num_cached_tokens
        manager.commit(handle, tokens[num_cached:num_whole])
        stats = manager.stats()
        return Outcome(
            request.num_tokens,
            full_blocks,
            hit_tokens=num_cached * scale,
            hit_blocks=num_cached // manager.block_size,
            evictions=stats.num_evictions - evictions_before,
            blocks_in_use=stats.num_in_use,
        )


def summarize(outcomes: Iterable[Outcome]) -> Summary:
    """Add up what :func:`replay` yields."""
    requests = refused = num_tokens = full_blocks = hit_tokens = hit_blocks = evictions = peak = 0
    for outcome in outcomes:
        requests += 1
        refused += outcome.refused
        num_tokens += outcome.num_tokens
        full_blocks += outcome.full_blocks
        hit_tokens += outcome.hit_tokens
        hit_blocks += outcome.hit_blocks
        evictions += outcome.evictions
        peak = max(peak, outcome.blocks_in_use)
    return Summary(
        requests=requests,
        refused=refused,
        num_tokens=num_tokens,
        full_blocks=full_blocks,
        hit_blocks=hit_blocks,
        block_hit_rate=round(hit_blocks / max(full_blocks, 1), 6),
        token_hit_rate=round(hit_tokens / max(num_tokens, 1), 6),
        evictions=evictions,
        peak_blocks_in_use=peak,
    )


# Reading

Ids = Sequence[Sequence[Hashable]]  # in runs, which may be ranges


class Line(NamedTuple):
    number: int
    num_tokens: int | None  # all blocks are full if it is not said
    ids: Ids

    @property
    def num_ids(self) -> int:
        return sum(map(len, self.ids))


class Format(NamedTuple):
    tokens_per_id: int
    read: Callable[[Any], tuple[int | None, Ids]]


def read_trace(path: str | Path, *, block_size: int | None = None) -> Trace:
    """Read a trace of any format, gzipped or not.

    Each of its ids stands for ``block_size`` tokens if that agrees with all lines, and otherwise for
    as many as the format says. Raises ``OSError`` if the file can not be read, and
    :class:`TraceError` if it is no trace, or a request has more than 2**24 tokens.

    It takes up to 200 bytes of memory for each different id, of which a few letters can name 2**24 in
    the formats that have runs: read no file of somebody who means ill.
    """
    with open(path, "rb") as file:
        # Only looked at, so that a pipe will do.
        if file.peek(2)[:2] != b"\x1f\x8b":
            return trace_of(file, block_size)
        try:
            with gzip.open(file) as lines:
                return trace_of(lines, block_size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"damaged gzip data: {error}") from error


def trace_of(file: Iterable[bytes], block_size: int | None) -> Trace:
    lines = []
    kind = None
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            entry = parse(text)
            kind = kind or format_of(entry)
            lines.append(Line(number, *kind.read(entry)))
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from error
    if kind is None:
        raise TraceError("no requests")
    tokens_per_id = find_tokens_per_id(
        lines, [kind.tokens_per_id] if block_size is None else [block_size, kind.tokens_per_id]
    )
    return Trace(tokens_per_id, list(requests_of(lines, tokens_per_id)))


def parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"no JSON: {error}") from error


def format_of(entry: Any) -> Format:
    match entry:
        case list():
            return Format(512, read_packed)
        case {"hash_runs": _}:
            return Format(64, read_hash_runs)
        case {"hash_ids": _}:
            return Format(512, read_hash_ids)
    raise TraceError("neither a list nor an object with hash_runs or hash_ids")


def read_packed(entry: Any) -> tuple[int, Ids]:
    match entry:
        case [_, num_tokens, _, [*ids], *_]:
            return length(num_tokens), [run_of(one) for one in ids]
    raise TraceError("not [timestamp, input_length, output_length, [id or [first, count], ...]]")


def run_of(one: Any) -> Sequence[Hashable]:
    match one:
        case [first, count] if is_whole(first):
            return range(first, first + length(count))
        case int() if is_whole(one):
            return (one,)
    raise TraceError(f"{one!r:.80} is neither an id nor [first, count]")


def read_hash_runs(entry: Any) -> tuple[int, Ids]:
    match entry:
        case {"input_length": num_tokens, "hash_runs": [*runs]}:
            return length(num_tokens), [range_of(run) for run in runs]
    raise TraceError("no object with input_length and a list of hash_runs")


def range_of(run: Any) -> range:
    match run:
        case [first, last] if is_whole(first) and is_whole(last) and first <= last:
            return range(first, first + length(last - first + 1))
    raise TraceError(f"{run!r:.80} is not [first, last]")


def read_hash_ids(entry: Any) -> tuple[int | None, Ids]:
    match entry:
        case {"hash_ids": [*ids]}:
            for one in ids:
                if not (is_whole(one) or isinstance(one, str)):
                    raise TraceError(f"{one!r:.80} is no id: neither a whole number nor a string")
            num_tokens = entry.get("input_length")
            return None if num_tokens is None else length(num_tokens), [ids]
    raise TraceError("no object with a list of hash_ids")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, which JSON's ``true`` is not."""
    return type(value) is int


def length(value: object) -> int:
    if is_whole(value) and 0 <= value <= MAX_TOKENS_OF_A_REQUEST:
        return value
    raise TraceError(f"{value!r:.80} is no length from 0 to {MAX_TOKENS_OF_A_REQUEST:,}")


def find_tokens_per_id(lines: Iterable[Line], preferred: list[int]) -> int:
    candidates = [*preferred, *POWERS_OF_TWO]
    for line in lines:
        before, candidates = candidates, [one for one in candidates if agrees(line, one)]
        if not candidates:
            size, num_tokens = before[0], line.num_tokens or 0
            raise TraceError(
                f"line {line.number}: {line.num_ids:,} ids for {num_tokens:,} tokens; "
                f"at {size:,} tokens a block there are {num_tokens // size:,} full blocks"
            )
    for size in preferred:
        if size in candidates:
            return size
    if len(candidates) > 1:
        sizes = " or ".join(f"{size:,}" for size in candidates)
        raise TraceError(f"an id may stand for {sizes} tokens: say how many by the block size")
    return candidates[0]


def agrees(line: Line, tokens_per_id: int) -> bool:
    num_tokens = line.num_ids * tokens_per_id if line.num_tokens is None else line.num_tokens
    return line.num_ids in (num_tokens // tokens_per_id, -(-num_tokens // tokens_per_id))


def requests_of(lines: Iterable[Line], tokens_per_id: int) -> Iterator[Request]:
    numbers: dict[Hashable, int] = {}
    for line in lines:
        num_tokens = line.num_ids * tokens_per_id if line.num_tokens is None else line.num_tokens
        if num_tokens > MAX_TOKENS_OF_A_REQUEST:
            raise TraceError(
                f"line {line.number}: {line.num_ids:,} ids of {tokens_per_id:,} tokens are more than "
                f"{MAX_TOKENS_OF_A_REQUEST:,} tokens"
            )
        ids = [numbers.setdefault(one, len(numbers)) for run in line.ids for one in run]
        if num_tokens > len(ids) * tokens_per_id:
            # A partial block without an id, which no other request has.
            ids.append(numbers.setdefault(object(), len(numbers)))
        yield Request(num_tokens, np.array(ids, np.uint32))
