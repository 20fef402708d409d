"""Random histories of a manager of any element type, its handles, and views that NumPy holds, beside a
model.

After every step the manager must say of every block, count and name what the model says, every
sequence must hold its numbers, and whatever is held must be as it was when it was taken.
"""

import array
import gc
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import kvspan
from blocks import BLOCK_SIZE, NUM_LAYERS, assert_nothing_leaks, new_manager
from kvspan.errors import InvalidInputError, StaleHandleError, ViewsAliveError
from manager_model import ManagerModel, RefusedError, Sequence, View, blocks_for
from rounding import DTYPES, assert_same, rounded, stored
from softmax import softmax_attention

NUM_BLOCKS = 8
HEADS, DIM = 2, 4
# The elements of a row are multiples of its number, of which narrow types hold few.
KEY_FACTORS = np.float32([[1, -0.3, 0.07, 1.9], [0.6, -2.2, 0.001, 1.1]])
VALUE_FACTORS = np.float32([[-0.7, 2.3, 0.9, -0.05], [1.3, 0.4, -1.7, 3.1]])
# With which the scores of such keys are neither all alike nor far apart.
SCALE = 2.0**-10

# Beginnings are often equal.
tokens = st.builds(
    lambda count, others: [0] * count + others,
    st.integers(0, 14),
    st.lists(st.integers(0, 1), max_size=3),
)
request_ids = st.sampled_from([None, None, None, "one", "two"])
salts = loras = st.sampled_from([None, None, None, None, "a", ""])
extra_keys = st.sampled_from(
    [{}, {}, {}, {}, {}, {0: ["cat"]}, {1: ["cat", b"dog"]}, {2: [""], 3: []}]
)
counts = st.integers(0, 6)
layers = st.integers(0, NUM_LAYERS - 1)
windows = st.none() | st.integers(1, 12)
# A few whole requests, and which of them are over at once.
requests = st.lists(st.tuples(tokens, st.booleans()), min_size=1, max_size=3)
# Which ones of several. Not of a large range, in which Hypothesis prefers small numbers, and so none.
bits_of_places = st.integers(0, 63)
# Which one of several, or where in what there is.
choices = st.integers(0, 1_000)

FORMS = [
    list,
    tuple,
    lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.int64),
    lambda tokens: np.array(tokens, np.uint32),
    lambda tokens: memoryview(array.array("i", tokens)),
]


@dataclass
class Live:
    handle: kvspan.PagedKvCacheHandle
    sequence: Sequence


@dataclass(eq=False)
class Held:
    """Something that keeps a view alive, and what it shows: numbers of rows, or an array."""

    view: View
    thing: object
    numbers: list
    expected: np.ndarray | None
    memory: object  # what arrays over it keep alive besides


def is_span(held):
    return isinstance(held.thing, kvspan.PagedSpan | kvspan.KVSpan)


# Keys or values, what of them, and how to get it from a segment.
FROM_SEGMENT = [
    (0, "elements", lambda segment: segment.keys),
    (1, "elements", lambda segment: segment.values),
    (0, "elements", lambda segment: np.asarray(segment.key_view)),
    (0, "elements", lambda segment: memoryview(segment.key_view)),
    (1, "elements", lambda segment: segment.value_view),
]
FROM_DLPACK = [(1, "elements", lambda segment: np.from_dlpack(segment.value_view))]
FROM_INT8 = [
    (0, "scales", lambda segment: segment.key_scales),
    (1, "scales", lambda segment: segment.value_scales),
]
FROM_ARRAY = [
    lambda array: array[1:],
    lambda array: array[..., :1],
    lambda array: array.T,
    lambda array: array[::-1],
]


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.manager = None
        self.model = ManagerModel(NUM_BLOCKS)
        self.live, self.stale, self.held = [], [], []
        self.chains = []  # each with its tokens and its epoch
        self.names = {}  # of the model's names, those of the manager
        self.last_number = 0

    @initialize(dtype=st.sampled_from(list(DTYPES)), requests=requests)
    def begin(self, dtype, requests):
        self.dtype = dtype
        self.manager = new_manager(NUM_BLOCKS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)
        self.serve(requests)

    def new_numbers(self, count):
        self.last_number += count
        return list(range(self.last_number - count + 1, self.last_number + 1))

    def given(self, numbers, narrow=False):
        """Keys and values to write, which may have been rounded before."""
        dtype = np.float32 if self.dtype == "int8" or not narrow else DTYPES[self.dtype]
        return [side.astype(dtype) for side in rows_of(numbers)]

    def stored(self, numbers):
        """Elements and scales of the keys, and of the values."""
        return [stored(side, self.dtype) for side in rows_of(numbers)]

    def shown(self, numbers):
        """Keys and values as float32."""
        return [rounded(side, self.dtype) for side in rows_of(numbers)]

    def one(self, choice):
        return self.live[choice % len(self.live)]

    @staticmethod
    def agree(model, call, *arguments, **keywords):
        """What the model and the call say; or nothing, if the call raises just what the model does."""
        refusal = None
        try:
            expected = model()
        except RefusedError as refused:
            refusal = refused.with_traceback(None)
        try:
            result = call(*arguments, **keywords)
        except Exception as caught:
            # Without the traceback, which would keep the arguments alive.
            raised = caught.with_traceback(None)
            if refusal is None:
                raise
            assert type(raised) is refusal.error, repr(raised)
            for field, value in refusal.fields.items():
                assert getattr(raised, field) == value, (raised, field)
            return None
        assert refusal is None, f"{refusal} was not raised"
        return expected, result

    def has_handles(self):
        return bool(self.live)

    # Sequences

    @rule(
        given=tokens,
        form=st.sampled_from(FORMS),
        name=request_ids,
        salt=salts,
        lora=loras,
        extra=extra_keys,
        lookahead=st.sampled_from([0, 0, 1, 5]),
    )
    def allocate(self, given, form, name, salt, lora, extra, lookahead):
        keys = {index: [text(key) for key in keys] for index, keys in extra.items()}
        new = Sequence(name, (self.model.epoch, salt, lora), keys, list(given))
        kind = {"cache_salt": salt, "lora_id": lora, "extra_keys": extra or None}
        hits = self.manager.probe(form(given), **kind)
        done = self.agree(
            lambda: self.model.allocate([new], lookahead),
            self.manager.allocate,
            form(given),
            name,
            lookahead=lookahead,
            **kind,
        )
        if done:
            self.live.append(Live(done[1], new))
            assert hits == new.cached

    @rule(requests=requests)
    def serve(self, requests):
        for given, frees in requests:
            before = len(self.live)
            self.allocate(given, list, None, None, None, {}, 0)
            if len(self.live) > before:
                self.compute(before)
                if frees:
                    self.end(before, "close")

    @rule(given=tokens)
    def make_chain(self, given):
        self.chains = [*self.chains[-3:], (self.manager.block_keys(given), given, self.model.epoch)]

    @precondition(lambda self: self.chains)
    @rule(choice=choices, lookahead=st.sampled_from([0, 0, 5]))
    def allocate_keyed(self, choice, lookahead):
        """A sequence of the epoch in which its keys were made."""
        chain, given, epoch = self.chains[choice % len(self.chains)]
        new = Sequence(None, (epoch, None, None), {}, list(given))
        done = self.agree(
            lambda: self.model.allocate([new], lookahead),
            self.manager.allocate,
            chain,
            lookahead=lookahead,
        )
        if done:
            self.live.append(Live(done[1], new))

    @rule(requests=requests)
    def advance_epoch(self, requests):
        self.model.epoch += 1
        assert self.manager.advance_epoch() == self.manager.epoch == self.model.epoch
        self.serve(requests)

    @precondition(has_handles)
    @rule(choice=choices, name=request_ids, clones=st.booleans())
    def fork(self, choice, name, clones):
        one = self.one(choice)
        name = None if clones else name
        make = one.handle.clone_handle if clones else lambda: self.manager.fork(one.handle, name)
        done = self.agree(lambda: self.model.fork(one.sequence, name), make)
        if done:
            self.live.append(Live(done[1], self.model.sequences[-1]))

    @precondition(has_handles)
    @rule(choice=choices, count=counts)
    def extend(self, choice, count):
        one = self.one(choice)
        grown = [(one.sequence, count)]
        self.check_copy(
            self.agree(lambda: self.model.extend(grown), self.manager.extend, one.handle, count)
        )

    @precondition(has_handles)
    @rule(choice=choices, at=choices)
    def truncate(self, choice, at):
        one = self.one(choice)
        new_len = at % (len(one.sequence) + 2)
        self.check_copy(
            self.agree(
                lambda: self.model.truncate(one.sequence, new_len),
                self.manager.truncate,
                one.handle,
                new_len,
            )
        )

    @precondition(has_handles)
    @rule(choice=choices, start=choices, count=counts)
    def prepare_write(self, choice, start, count):
        one = self.one(choice)
        start %= len(one.sequence) + 1
        end = start + count
        done = self.agree(
            lambda: self.model.prepare_write(one.sequence, start, end),
            self.manager.prepare_write,
            one.handle,
            start,
            end,
        )
        if done:
            expected, copies = done
            assert [(copy.block_index, copy.source, copy.target) for copy in copies] == expected

    @staticmethod
    def check_copy(done):
        if done:
            expected, copied = done
            found = copied and (copied.block_index, copied.source, copied.target)
            assert found == (expected[0] if expected else None)

    # Many at once

    def some(self, bits):
        """Sequences that the bits choose."""
        return [one for place, one in enumerate(self.live) if bits >> place % 6 & 1]

    @rule(
        requests=st.lists(st.tuples(tokens, request_ids, salts, loras), max_size=3),
        lookahead=st.sampled_from([0, 0, 5]),
        as_chains=st.booleans(),
    )
    def allocate_many(self, requests, lookahead, as_chains):
        if as_chains:
            requests = [(given, name, None, None) for given, name, _, _ in requests]
        new = [
            Sequence(name, (self.model.epoch, salt, lora), {}, list(given))
            for given, name, salt, lora in requests
        ]
        given, names, *secrets = zip(*requests) if requests else [()] * 4
        if as_chains:
            given, secrets = [self.manager.block_keys(one) for one in given], [None, None]
        done = self.agree(
            lambda: self.model.allocate(new, lookahead),
            self.manager.allocate_many,
            given,
            names,
            cache_salts=secrets[0],
            lora_ids=secrets[1],
            lookahead=lookahead,
        )
        if done:
            self.live += [Live(handle, sequence) for handle, sequence in zip(done[1], new)]

    @rule(
        bits=bits_of_places,
        additional=st.lists(counts, min_size=40, max_size=40),
        same=st.booleans(),
    )
    def extend_many(self, bits, additional, same):
        some = self.some(bits)
        additional = [additional[0]] * len(some) if same else additional[: len(some)]
        grown = [(one.sequence, count) for one, count in zip(some, additional)]
        lengths = [len(one.sequence) for one in some]
        copies = []
        done = self.agree(
            lambda: self.model.extend(grown),
            self.manager.extend_many,
            [one.handle for one in some],
            additional[0] if same and some else additional,
            copies=copies,
        )
        found = [(copied.block_index, copied.source, copied.target) for _, copied in copies]
        assert found == (done[0] if done else [])
        if done:
            expected = [
                slot
                for one, start in zip(some, lengths)
                for slot in slots(one.sequence, start, len(one.sequence))
            ]
            assert done[1].tolist() == expected

    @rule(bits=bits_of_places, count=st.integers(0, 5), token=st.integers(0, 1), rows=st.booleans())
    def commit_many(self, bits, count, token, rows):
        some = self.some(bits)
        given = [
            (one.sequence.tokens[one.sequence.committed :] + [token] * count)[:count]
            for one in some
        ]
        self.agree(
            lambda: self.model.commit([(one.sequence, own) for one, own in zip(some, given)]),
            self.manager.commit_many,
            [one.handle for one in some],
            np.array(given, np.int64).reshape(len(some), count) if rows else given,
        )

    @rule(
        bits=bits_of_places,
        additional=st.lists(st.integers(0, 2), min_size=40, max_size=40),
        count=st.integers(1, 2),
    )
    def decode(self, bits, additional, count):
        """Makes room, of which there may be too little for some."""
        self.extend_many(bits, additional, False)
        self.commit_many(bits, count, 0, False)

    @rule(bits=bits_of_places)
    def free_many(self, bits):
        some = self.some(bits)[:2]
        self.manager.free_many([one.handle for one in some])
        self.freed(*some)

    @rule(
        bits=bits_of_places,
        starts=st.lists(choices, min_size=40, max_size=40),
        to_the_end=st.booleans(),
    )
    def ask_many(self, bits, starts, to_the_end):
        some = self.some(bits)
        handles = [one.handle for one in some]
        found = self.manager.block_tables(handles)
        width = max([len(one.sequence.blocks) for one in some], default=0)
        expected = [one.sequence.blocks + [0] * (width - len(one.sequence.blocks)) for one in some]
        assert (found.shape, found.tolist()) == ((len(some), width), expected)
        starts = [at % (len(one.sequence) + 1) for one, at in zip(some, starts)]
        ends = [len(one.sequence) if to_the_end else at for one, at in zip(some, starts)]
        if not to_the_end:
            starts = [at // 2 for at in starts]
        found = self.manager.slot_mappings(handles, starts, None if to_the_end else ends)
        ranges = zip(some, starts, ends)
        expected = [slot for one, start, end in ranges for slot in slots(one.sequence, start, end)]
        assert found.tolist() == expected
        cached = self.manager.num_cached_tokens(handles)
        assert cached.tolist() == [one.sequence.cached for one in some]

    @precondition(has_handles)
    @rule(choice=choices, length=st.integers(0, 16))
    def assign_table(self, choice, length):
        one = self.one(choice)
        table = kvspan.BlockTable(BLOCK_SIZE)
        table.add_blocks(one.handle.block_table.physical_blocks)
        fits = length <= len(one.sequence.blocks) * BLOCK_SIZE
        if fits:
            table.extend_sequence(length)
            self.agree(
                lambda: self.model.assign_table(one.sequence, length),
                lambda: setattr(one.handle, "block_table", table),
            )

    # Content

    @precondition(has_handles)
    @rule(
        choice=choices,
        layer=layers,
        at=choices,
        count=counts,
        flat=st.booleans(),
        narrow=st.booleans(),
    )
    def write(self, choice, layer, at, count, flat, narrow):
        one = self.one(choice)
        start = at % (len(one.sequence) + 1)
        numbers = self.new_numbers(count)
        shape = (count, HEADS * DIM) if flat else (count, HEADS, DIM)
        rows = (side.reshape(shape) for side in self.given(numbers, narrow))
        self.agree(
            lambda: self.model.write(layer, [(one.sequence, start, numbers)]),
            self.manager.write,
            one.handle,
            layer,
            start,
            *rows,
        )

    @rule(bits=bits_of_places, layer=layers, at=choices, narrow=st.booleans())
    def write_many(self, bits, layer, at, narrow):
        some = [one for one in self.some(bits) if len(one.sequence)]
        positions = [at % len(one.sequence) for one in some]
        numbers = self.new_numbers(len(some))
        writes = [
            (one.sequence, position, [number])
            for one, position, number in zip(some, positions, numbers)
        ]
        self.agree(
            lambda: self.model.write(layer, writes),
            self.manager.write_many,
            layer,
            [one.handle for one in some],
            positions,
            *self.given(numbers, narrow),
        )

    @precondition(has_handles)
    @rule(
        choice=choices,
        count=st.integers(0, 9),
        others=st.lists(st.integers(0, 1), min_size=9, max_size=9),
        form=st.sampled_from(FORMS),
    )
    def commit(self, choice, count, others, form):
        one = self.one(choice)
        known = one.sequence.tokens[one.sequence.committed :]
        self.commit_tokens(one, (known + others)[:count], form)

    @precondition(has_handles)
    @rule(choice=choices, given=tokens)
    def commit_anything(self, choice, given):
        self.commit_tokens(self.one(choice), given, list)

    def commit_tokens(self, one, given, form):
        commits = [(one.sequence, given)]
        self.agree(lambda: self.model.commit(commits), self.manager.commit, one.handle, form(given))

    @precondition(has_handles)
    @rule(choice=choices)
    def compute(self, choice):
        """Writes all rows that are not committed, and commits them."""
        one = self.one(choice)
        start, length = one.sequence.committed, len(one.sequence)
        for layer in range(NUM_LAYERS):
            numbers = self.new_numbers(length - start)
            writes = [(one.sequence, start, numbers)]
            done = self.agree(
                lambda layer=layer, writes=writes: self.model.write(layer, writes),
                self.manager.write,
                one.handle,
                layer,
                start,
                *self.given(numbers),
            )
            if done is None:
                return
        start = one.sequence.committed
        known = one.sequence.tokens + [0] * length
        self.commit_tokens(one, known[start:length], list)

    @precondition(has_handles)
    @rule(choice=choices, layer=layers, start=choices, more=counts)
    def read_range_into(self, choice, layer, start, more):
        one = self.one(choice)
        length = len(one.sequence)
        start %= length + 1
        room = np.full((2, length - start + more, HEADS, DIM), -1, np.float32)
        self.manager.read_range_into(one.handle, layer, start, length, *room)
        expected = self.shown(one.sequence.rows[layer][start:])
        assert_same(room[:, : length - start], np.stack(expected))
        assert (room[:, length - start :] == -1).all()

    @rule(
        bits=bits_of_places,
        layer=layers,
        count=st.integers(1, 3),
        window=windows,
        alone=st.booleans(),
    )
    def attend(self, bits, layer, count, window, alone):
        """With the last tokens of each of some sequences."""
        some = self.some(bits)
        lens = [min(count, max(len(one.sequence), 1)) for one in some]
        query, handles = new_query(sum(lens)), [one.handle for one in some]
        alone = alone and len(some) == 1
        done = self.agree(
            lambda: self.model.attend([one.sequence for one in some], layer),
            kvspan.attention,
            query,
            handles[0] if alone else handles,
            layer,
            scale=SCALE,
            window=window,
            query_lens=None if alone else lens,
        )
        if done:
            self.check_attention(done[1], np.split(query, np.cumsum(lens)), done[0], window)

    @precondition(lambda self: any(map(is_span, self.held)))
    @rule(choice=choices, window=windows)
    def attend_to_span(self, choice, window):
        spans = [held for held in self.held if is_span(held)]
        held, query = spans[choice % len(spans)], new_query(1)
        if held.numbers:
            found = kvspan.attention(query, held.thing, scale=SCALE, window=window)
            self.check_attention(found, [query], [held.numbers], window)
        else:
            with pytest.raises(InvalidInputError):
                kvspan.attention(query, held.thing)

    def check_attention(self, found, queries, contexts, window):
        for query, numbers in zip(queries, contexts):
            own, found = found[: len(query)], found[len(query) :]
            sides = self.shown(numbers)
            expected = softmax_attention(query, *sides, scale=SCALE, window=window)
            tolerance = 1e-5 * np.abs(sides[1]).max()
            np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)
        assert not len(found)

    # The end of a sequence

    def freed(self, *ones):
        self.model.free([one.sequence for one in ones])
        self.live = [one for one in self.live if one not in ones]
        self.stale += [one.handle for one in ones]
        del self.stale[:-3]

    @precondition(has_handles)
    @rule(choice=choices, way=st.sampled_from(["free", "close", "with", "raise", "drop", "cycle"]))
    def end(self, choice, way):
        one = self.one(choice)
        if way == "free":
            self.manager.free(one.handle)
        elif way == "close":
            one.handle.close()
            one.handle.close()
        elif way in ("with", "raise"):
            try:
                with one.handle as handle:
                    assert handle is one.handle
                    if way == "raise":
                        raise ZeroDivisionError
            except ZeroDivisionError as error:
                error.__traceback__ = None
        self.freed(one)
        if way in ("drop", "cycle"):
            self.stale.pop()
            if way == "cycle":
                one.itself = one
            del one
            if way == "cycle":
                gc.collect()

    @rule(name=st.sampled_from(["one", "two"]))
    def free_request(self, name):
        done = self.agree(lambda: self.model.named(name), lambda: self.manager.free_request(name))
        if done:
            self.freed(next(one for one in self.live if one.sequence is done[0]))

    @precondition(lambda self: self.stale)
    @rule(choice=choices, way=choices)
    def use_stale(self, choice, way):
        handle, manager = self.stale[choice % len(self.stale)], self.manager
        rows = self.given([1])
        ways = [
            lambda: manager.extend(handle),
            lambda: manager.truncate(handle, 0),
            lambda: manager.fork(handle),
            lambda: manager.free(handle),
            lambda: manager.extend_many([handle]),
            lambda: manager.commit_many([handle], [[0]]),
            lambda: manager.free_many([handle]),
            lambda: manager.block_tables([handle]),
            lambda: manager.slot_mappings([handle], 0),
            lambda: kvspan.attention(new_query(1), handle, 0),
            lambda: manager.commit(handle, [0]),
            lambda: manager.prepare_write(handle, 0, 0),
            lambda: manager.view(handle, 0),
            lambda: manager.write(handle, 0, 0, *rows),
            lambda: manager.write_many(0, [handle], [0], *rows),
            lambda: manager.read_range(handle, 0),
            lambda: handle.key_cache(0),
            lambda: handle.clone_handle(),
            lambda: handle.__enter__(),
            lambda: setattr(handle, "block_table", handle.block_table),
        ]
        assert not handle.is_valid
        with pytest.raises(StaleHandleError) as caught:
            ways[way % len(ways)]()
        assert caught.value.cache_id == handle.cache_id
        del caught

    @rule()
    def reset_prefix_cache(self):
        self.agree(self.model.reset, self.manager.reset_prefix_cache)

    # Views

    @precondition(has_handles)
    @rule(choice=choices, layer=layers, start=choices, count=st.integers(-1, 10))
    def view(self, choice, layer, start, count):
        one = self.one(choice)
        start %= len(one.sequence) + 1
        end = max(start + count, 0)
        done = self.agree(
            lambda: self.model.view(one.sequence, layer, start, end),
            self.manager.view,
            one.handle,
            layer,
            start,
            end,
        )
        if done:
            view, span = done
            self.held.append(Held(view, span, view.numbers, None, object()))

    @precondition(has_handles)
    @rule(choice=choices, layer=layers, values=st.booleans())
    def cache_tensor(self, choice, layer, values):
        one = self.one(choice)
        view = self.model.view(one.sequence, layer, 0, len(one.sequence))
        tensor = one.handle.value_cache(layer) if values else one.handle.key_cache(layer)
        expected = self.stored(view.numbers)[values]
        assert tensor.num_segments == blocks_for(len(one.sequence))
        self.held.append(Held(view, tensor, view.numbers, expected, object()))

    @precondition(lambda self: self.held)
    @rule(choice=choices, way=choices)
    def derive(self, choice, way):
        """Makes something else over the same memory."""
        held = self.held[choice % len(self.held)]
        match held.thing:
            case kvspan.PagedSpan() as span if span.num_segments:
                segment = span.segments[way % span.num_segments]
                numbers = held.numbers[segment.start - span.start : segment.end - span.start]
                new = Held(held.view, segment, numbers, None, object())
            case kvspan.KVSpan() as segment:
                ways = FROM_SEGMENT + {"int8": FROM_INT8}.get(self.dtype, [])
                if self.dtype != "bfloat16":  # of which NumPy's DLPack knows nothing
                    ways += FROM_DLPACK
                side, part, make = ways[way % len(ways)]
                expected = self.stored(held.numbers)[side][part == "scales"]
                new = Held(held.view, make(segment), [], expected, held.memory)
            case kvspan.CacheTensor() as tensor if tensor.num_segments:
                index, of_scales = way % tensor.num_segments, self.dtype == "int8" and way % 2
                segments = tensor.scales if of_scales else tensor.segments
                expected = held.expected[of_scales]
                expected = expected[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                new = Held(held.view, segments[index], [], expected, held.memory)
            case np.ndarray() as rows if rows.ndim > 1:
                make = FROM_ARRAY[way % len(FROM_ARRAY)]
                new = Held(held.view, make(rows), [], make(held.expected), held.memory)
            case _:
                return
        self.held.append(new)

    @precondition(lambda self: self.held)
    @rule(choice=choices)
    def drop(self, choice):
        self.let_go(self.held[choice % len(self.held)])

    def let_go(self, held):
        self.held = [other for other in self.held if other is not held]
        held.thing = None
        if all(other.view is not held.view for other in self.held):
            self.model.end_view(held.view)

    def can_be_released(self):
        return any(hasattr(held.thing, "released") for held in self.held)

    @precondition(can_be_released)
    @rule(choice=choices, by_release=st.booleans())
    def end_span(self, choice, by_release):
        spans = [held for held in self.held if hasattr(held.thing, "released")]
        ending = spans[choice % len(spans)]
        others = [held for held in self.held if held is not ending and held.view is ending.view]
        if isinstance(ending.thing, kvspan.KVSpan):
            others = [held for held in others if held.memory is ending.memory]
        if not by_release:
            with ending.thing:
                assert not ending.thing.released
        elif others:
            with pytest.raises(ViewsAliveError):
                ending.thing.release()
            return
        else:
            ending.thing.release()
        assert ending.thing.released
        self.let_go(ending)

    # After every step

    @invariant()
    def every_block_is_what_the_model_says(self):
        picture = self.manager.inspect()
        assert picture.free_queue == self.model.queue
        for found, (number, block) in zip(picture.blocks, self.model.blocks.items(), strict=True):
            assert (found.block, found.state) == (number, block.state)
            assert (found.reference_count, found.pin_count) == (block.holders, block.pins)
            assert (found.key is None) == (block.name is None)
            if found.key is not None:
                assert self.names.setdefault(block.name, found.key) == found.key
        assert len(set(self.names.values())) == len(self.names), "two names have one key"

    @invariant()
    def numbers_are_what_the_model_says(self):
        self.manager.check_integrity()
        stats, expected = self.manager.stats(), self.model.stats()
        assert {name: getattr(stats, name) for name in expected} == expected
        report = self.manager.leak_report()
        assert [(s.cache_id, s.request_id, s.blocks) for s in report.sequences] == [
            (one.handle.cache_id, one.sequence.request_id, one.sequence.blocks) for one in self.live
        ]
        pinned = {n: block.pins for n, block in self.model.blocks.items() if block.pins}
        assert dict(report.pinned_blocks) == pinned

    @invariant()
    def sequences_hold_what_the_model_says(self):
        for one in self.live:
            handle, sequence = one.handle, one.sequence
            assert handle.block_table.physical_blocks == sequence.blocks
            assert (handle.num_tokens, handle.tokens.tolist()) == (len(sequence), sequence.tokens)
            assert handle.num_cached_tokens == sequence.cached
            assert handle.num_committed_tokens == sequence.committed
            for layer in range(NUM_LAYERS):
                sides = self.manager.read_range(handle, layer)
                for found, expected in zip(sides, self.shown(sequence.rows[layer])):
                    assert found.dtype == (np.float32 if self.dtype == "int8" else self.dtype)
                    assert_same(found.astype(np.float32), expected)
                with self.manager.view(handle, layer) as span:
                    self.check_span(span, sequence.rows[layer])

    @invariant()
    def held_things_are_as_they_were(self):
        for held in self.held:
            match held.thing:
                case kvspan.PagedSpan() as span:
                    self.check_span(span, held.numbers)
                case kvspan.KVSpan() as segment:
                    self.check_segment(segment, held.numbers)
                case kvspan.CacheTensor() as tensor:
                    elements, scales = held.expected
                    assert_same(tensor.numpy(), elements)
                    assert (tensor.scales is None) == (scales is None)
                    if tensor.scales:
                        assert_same(np.concatenate(tensor.scales), scales)
                case other:
                    assert_same(np.asarray(other), held.expected)

    def check_span(self, span, numbers):
        for segment in span:
            place = slice(segment.start - span.start, segment.end - span.start)
            self.check_segment(segment, numbers[place])

    def check_segment(self, segment, numbers):
        keys, values = self.stored(numbers)
        assert_same(segment.keys, keys[0])
        assert_same(segment.values, values[0])
        for scales, expected in [(segment.key_scales, keys[1]), (segment.value_scales, values[1])]:
            assert (scales is None) == (expected is None)
            if scales is not None:
                assert_same(scales, expected)

    def teardown(self):
        """Everything comes back, whoever goes first."""
        while self.live:
            one = self.live[len(self.live) // 2]
            self.freed(one)
            self.stale.clear()
            del one
            self.every_block_is_what_the_model_says()
        while self.held:
            self.let_go(self.held[len(self.held) // 2])
            self.every_block_is_what_the_model_says()
        if self.manager is not None:
            assert_nothing_leaks(self.manager)


def rows_of(numbers):
    """Keys and values of rows with these numbers; 0 is zeros without a sign."""
    numbers = np.asarray(numbers, np.float32).reshape(-1, 1, 1)
    return [numbers * factors + 0 for factors in (KEY_FACTORS, VALUE_FACTORS)]


def new_query(num_tokens):
    """Of two heads for each KV head."""
    return np.random.default_rng(num_tokens).standard_normal((num_tokens, 2 * HEADS, DIM), "f")


def slots(sequence, start, end):
    return [
        sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(start, end)
    ]


def text(key):
    """An extra key as both of its forms are hashed."""
    return key.encode() if isinstance(key, str) else key


# To find the shortest history that fails can take minutes, and the slow profile any time.
FAST = settings.get_current_profile_name() == "fast"
TestManager = pytest.mark.timeout(600 if FAST else 0)(ManagerMachine.TestCase)
