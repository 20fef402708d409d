"""What a manager should do, as naively as it can be said: every block for itself in a list, every
sequence with numbers of its own, and nothing shared but names and counts.

A row of a layer is a number, 0 if nothing was written. Each method gives what the manager must
answer and makes the change, or raises just the exception that the manager must raise.
"""

import copy
from dataclasses import dataclass, field

from blocks import BLOCK_SIZE, NUM_LAYERS
from kvspan.errors import (
    BlocksInUseError,
    InconsistentTableError,
    InvalidInputError,
    OutOfBlocksError,
    OutOfRangeError,
    RequestExistsError,
    TokenMismatchError,
    UnknownRequestError,
    WrongBlockStateError,
)


class RefusedError(Exception):
    """The manager must raise `error` with these fields, and nothing may change."""

    def __init__(self, error, **fields):
        super().__init__(error, fields)
        self.error, self.fields = error, fields


@dataclass
class Block:
    holders: int = 0
    pins: int = 0
    name: tuple | None = None  # once it is committed
    rows: list | None = None  # those that it had then

    @property
    def state(self):
        if self.holders:
            return "in_use"
        if self.pins:
            return "pinned"
        return "free" if self.name is None else "cached"


@dataclass
class Sequence:
    request_id: str | None
    kind: tuple  # what separates it from other sequences with the same tokens
    extra_keys: dict
    tokens: list  # that are known
    blocks: list = field(default_factory=list)
    rows: list = field(default_factory=lambda: [[] for _ in range(NUM_LAYERS)])
    cached: int = 0
    committed: int = 0

    def __len__(self):
        return len(self.rows[0])

    def name(self, index):
        """What decides the content of a block."""
        keys = tuple(tuple(self.extra_keys.get(i, ())) for i in range(index + 1))
        return self.kind, tuple(self.tokens[: (index + 1) * BLOCK_SIZE]), keys

    def note_write(self, start):
        """What was committed from the block on that is written to is committed no more."""
        block_start = start // BLOCK_SIZE * BLOCK_SIZE
        if block_start < self.committed // BLOCK_SIZE * BLOCK_SIZE:
            self.committed = block_start

    def resize(self, length):
        for rows in self.rows:
            rows[length:] = [0] * (length - len(rows))


@dataclass(eq=False)
class View:
    layer: int
    places: list  # block and slots
    numbers: list


def segments(start, end):
    """Which blocks the tokens touch, by index, and which slots of them."""
    touched = {}
    for position in range(start, end):
        touched.setdefault(position // BLOCK_SIZE, []).append(position % BLOCK_SIZE)
    return [(index, set(slots)) for index, slots in touched.items()]


def blocks_for(length):
    return -(-length // BLOCK_SIZE)


class ManagerModel:
    def __init__(self, num_blocks):
        self.epoch = 0
        self.blocks = {number: Block() for number in range(1, num_blocks + 1)}
        self.queue = list(self.blocks)  # the one that is reused next first
        self.sequences = []
        self.views = []
        self.counts = dict.fromkeys(
            ["query_tokens", "hit_tokens", "num_allocations", "num_failures", "num_evictions"], 0
        )
        self.counts["num_copies"] = 0

    def count(self, state):
        return sum(block.state == state for block in self.blocks.values())

    def find(self, name):
        return next((n for n, block in self.blocks.items() if block.name == name), None)

    # Blocks

    def check_room(self, needed, spared=()):
        """Whether so many blocks can be taken, none of them one of those spared."""
        spared = set(spared) & set(self.queue)
        if needed > len(self.queue) - len(spared):
            evictable = self.count("cached") - len(spared)
            free, pinned = self.count("free"), self.count("pinned")
            raise RefusedError(
                OutOfBlocksError, needed=needed, free=free, evictable=evictable, pinned=pinned
            )

    def take(self, count):
        taken, self.queue = self.queue[:count], self.queue[count:]
        for number in taken:
            self.counts["num_evictions"] += self.blocks[number].name is not None
            self.blocks[number] = Block(holders=1)
        return taken

    def hold(self, numbers):
        for number in numbers:
            self.blocks[number].holders += 1
        self.queue = [number for number in self.queue if number not in numbers]

    def give_back(self, numbers):
        for number in reversed(numbers):
            self.blocks[number].holders -= 1
            self.enqueue_if_unused(number)

    def enqueue_if_unused(self, number):
        match self.blocks[number].state:
            case "free":
                self.queue.insert(0, number)
            case "cached":
                self.queue.append(number)

    # Sequences

    def check_names(self, request_ids):
        taken = [sequence.request_id for sequence in self.sequences]
        for request_id in request_ids:
            if request_id is not None and request_id in taken:
                raise RefusedError(RequestExistsError, request_id=request_id)
            taken.append(request_id)

    def hits(self, sequence):
        """The blocks of what is cached of a new sequence."""
        hits = []
        for index in range(max(len(sequence.tokens) - 1, 0) // BLOCK_SIZE):
            number = self.find(sequence.name(index))
            if number is None:
                break
            hits.append(number)
        return hits

    def allocate(self, new, lookahead):
        """Starts sequences that have only tokens yet, all or none."""
        try:
            self.check_names(sequence.request_id for sequence in new)
            hits = [self.hits(sequence) for sequence in new]
            needed = [
                blocks_for(len(sequence.tokens) + lookahead) - len(own)
                for sequence, own in zip(new, hits)
            ]
            self.check_room(sum(needed), [number for own in hits for number in own])
        except RefusedError:
            self.counts["num_failures"] += len(new)
            raise
        for own in hits:
            self.hold(own)
        for sequence, own, count in zip(new, hits, needed):
            for number in own:
                for rows, cached in zip(sequence.rows, self.blocks[number].rows):
                    rows += cached
            sequence.cached = sequence.committed = len(sequence)
            sequence.resize(len(sequence.tokens))
            sequence.blocks = own + self.take(count)
            self.sequences.append(sequence)
            self.counts["num_allocations"] += 1
            self.counts["query_tokens"] += len(sequence)
            self.counts["hit_tokens"] += sequence.cached

    def fork(self, sequence, request_id):
        self.check_names([request_id])
        fork = copy.deepcopy(sequence)
        fork.request_id = request_id
        del fork.blocks[blocks_for(len(fork)) :]
        self.hold(fork.blocks)
        self.sequences.append(fork)

    def free(self, sequences):
        for sequence in sequences:
            self.sequences = [other for other in self.sequences if other is not sequence]
            self.give_back(sequence.blocks)

    def named(self, request_id):
        for sequence in self.sequences:
            if sequence.request_id == request_id:
                return sequence
        raise RefusedError(UnknownRequestError, request_id=request_id)

    def extend(self, additional):
        """Makes sequences longer, all or none; `additional` has pairs of them and numbers."""
        needs = []
        for sequence, count in additional:
            capacity, end = len(sequence.blocks) * BLOCK_SIZE, len(sequence) + count
            inside = segments(len(sequence), min(end, capacity))
            wants = [(index, range(NUM_LAYERS), slots) for index, slots in inside]
            needs.append((sequence, wants, max(blocks_for(end) - len(sequence.blocks), 0)))
        copies = self.prepare(needs)
        for sequence, count in additional:
            sequence.resize(len(sequence) + count)
        return copies

    def write(self, layer, writes):
        """Each of the writes is a sequence, a position, and numbers."""
        needs = []
        for sequence, start, numbers in writes:
            end = start + len(numbers)
            if end > len(sequence):
                raise RefusedError(OutOfRangeError, start=start, end=end, len=len(sequence))
            wants = [(index, [layer], slots) for index, slots in segments(start, end)]
            needs.append((sequence, wants, 0))
        self.prepare(needs)
        for sequence, start, numbers in writes:
            if numbers:
                sequence.rows[layer][start : start + len(numbers)] = numbers
                sequence.note_write(start)

    def prepare_write(self, sequence, start, end):
        if end > len(sequence):
            raise RefusedError(OutOfRangeError, start=start, end=end, len=len(sequence))
        wants = [(index, range(NUM_LAYERS), slots) for index, slots in segments(start, end)]
        copies = self.prepare([(sequence, wants, 0)])
        if start < end:
            sequence.note_write(start)
        return copies

    def prepare(self, needs):
        """Who is to change rows that others see gets a block of its own, and there are new blocks."""
        plan, left, renamed = [], [], []
        for sequence, wants, num_new in needs:
            for index, layers, slots in wants:
                number = sequence.blocks[index]
                shared = self.blocks[number].holders - left.count(number) > 1
                if shared or self.is_viewed(number, layers, slots):
                    plan.append((sequence, index))
                    left.append(number)
                else:
                    renamed.append(number)
            plan += [(sequence, None)] * num_new
        self.check_room(len(plan))
        copies = []
        for (sequence, index), number in zip(plan, self.take(len(plan))):
            if index is None:
                sequence.blocks.append(number)
            else:
                copies.append((sequence, index, sequence.blocks[index], number))
                sequence.blocks[index] = number
        for number in renamed:
            self.blocks[number].name = None
        for sequence, _, _ in needs:
            self.give_back([from_ for owner, _, from_, _ in copies if owner is sequence])
        self.counts["num_copies"] += len(copies)
        return [(index, from_, to) for _, index, from_, to in copies]

    def is_viewed(self, number, layers, slots):
        return any(
            view.layer in layers and any(n == number and slots & rows for n, rows in view.places)
            for view in self.views
        )

    def truncate(self, sequence, new_len):
        length, num_blocks = len(sequence), blocks_for(new_len)
        if new_len > length:
            raise RefusedError(OutOfRangeError, start=0, end=new_len, len=length)
        tail, last = sequence.blocks[num_blocks:], None
        if new_len < length and new_len % BLOCK_SIZE:
            last = sequence.blocks[num_blocks - 1]
            last = None if self.blocks[last].name is None else last
        shared = last is not None and self.blocks[last].holders > 1
        comes_free = [
            number
            for number in tail
            if (self.blocks[number].holders, self.blocks[number].pins) == (1, 0)
        ]
        if shared and not comes_free:
            self.check_room(1)
        self.give_back(tail)
        del sequence.blocks[num_blocks:], sequence.tokens[new_len:]
        sequence.resize(new_len)
        emptied = range(num_blocks, blocks_for(length))
        sequence.extra_keys = {i: k for i, k in sequence.extra_keys.items() if i not in emptied}
        sequence.cached = min(sequence.cached, new_len)
        sequence.committed = min(sequence.committed, new_len)
        if shared:
            [number] = self.take(1)
            sequence.blocks[-1] = number
            self.give_back([last])
            self.counts["num_copies"] += 1
            return [(num_blocks - 1, last, number)]
        if last is not None:
            self.blocks[last].name = None
        return []

    def assign_table(self, sequence, length):
        """Makes the sequence as long as a table of its blocks says."""
        if length > len(sequence.blocks) * BLOCK_SIZE:
            raise RefusedError(
                InconsistentTableError, reason="it has more tokens than its blocks can hold"
            )
        if length < len(sequence):
            self.truncate(sequence, length)
        else:
            self.extend([(sequence, length - len(sequence))])

    def commit(self, commits):
        """Each of the commits is a sequence and tokens; all or none."""
        changed, given = [], {}
        for sequence, tokens in commits:
            start, end = sequence.committed, sequence.committed + len(tokens)
            if end > len(sequence):
                raise RefusedError(OutOfRangeError, start=start, end=end, len=len(sequence))
            for position, (known, token) in enumerate(zip(sequence.tokens[start:], tokens), start):
                if known != token:
                    raise RefusedError(TokenMismatchError, token=position)
            committed = copy.copy(sequence)
            committed.tokens = sequence.tokens + list(tokens[len(sequence.tokens) - start :])
            changed.append((committed, range(start // BLOCK_SIZE, end // BLOCK_SIZE)))
        for committed, indices in changed:
            for index in indices:
                number, name = committed.blocks[index], committed.name(index)
                own = self.blocks[number].name or given.setdefault(number, name)
                if own != name:
                    state, wanted = "committed under another key", "uncommitted"
                    raise RefusedError(
                        WrongBlockStateError, block=number, state=state, wanted=wanted
                    )
        for (sequence, tokens), (committed, indices) in zip(commits, changed):
            sequence.tokens = committed.tokens
            sequence.committed += len(tokens)
            for index in indices:
                self.commit_block(sequence, index)

    def commit_block(self, sequence, index):
        number, name = sequence.blocks[index], sequence.name(index)
        places = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
        other = self.find(name)
        if other is None:
            self.blocks[number].name = name
            self.blocks[number].rows = [rows[places] for rows in sequence.rows]
        elif other != number:
            for rows, shared in zip(sequence.rows, self.blocks[other].rows):
                rows[places] = shared
            sequence.blocks[index] = other
            self.hold([other])
            self.give_back([number])

    def attend(self, sequences, layer):
        """The numbers of what each attends to."""
        if not all(map(len, sequences)):
            raise RefusedError(InvalidInputError)
        return [list(sequence.rows[layer]) for sequence in sequences]

    # Views

    def view(self, sequence, layer, start, end):
        if start > end or end > len(sequence):
            raise RefusedError(OutOfRangeError, start=start, end=end)
        places = [(sequence.blocks[index], slots) for index, slots in segments(start, end)]
        for number, _ in places:
            self.blocks[number].pins += 1
        view = View(layer, places, sequence.rows[layer][start:end])
        self.views.append(view)
        return view

    def end_view(self, view):
        self.views.remove(view)
        for number, _ in reversed(view.places):
            self.blocks[number].pins -= 1
            self.enqueue_if_unused(number)

    def reset(self):
        if in_use := len(self.blocks) - len(self.queue):
            raise RefusedError(BlocksInUseError, in_use=in_use)
        cached = [number for number, block in self.blocks.items() if block.name is not None]
        self.queue = cached + [number for number in self.queue if number not in cached]
        for number in cached:
            self.blocks[number].name = None

    def stats(self):
        """All numbers but the size of a block."""
        pinned = self.count("pinned")
        counts = self.counts
        return {
            **counts,
            "num_blocks": len(self.blocks),
            "num_free": self.count("free"),
            "num_cached": self.count("cached"),
            "num_in_use": self.count("in_use") + pinned,
            "num_pinned": pinned,
            "num_committed": sum(block.name is not None for block in self.blocks.values()),
            "num_sequences": len(self.sequences),
            "miss_tokens": counts["query_tokens"] - counts["hit_tokens"],
        }
