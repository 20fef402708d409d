"""What the tests of blocks share: small managers, and sequences whose rows say what led to them."""

import contextlib
import gc

import numpy as np
import pytest

import kvspan

BLOCK_SIZE, NUM_LAYERS, HEADS, DIM = 4, 2, 1, 2


def new_manager(num_blocks=8, **options):
    shape = {
        "block_size": BLOCK_SIZE,
        "num_layers": NUM_LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
    }
    return kvspan.KvCacheManager(num_blocks, **{**shape, **options})


def computed(tokens, layer):
    """A number that the tokens up to a position, and the layer, decide. Never 0."""
    mixed = layer
    for token in tokens:
        mixed = (mixed * 31 + int(token) + 1) % 65_520
    return mixed + 1


def keys_of(numbers):
    """Keys of rows with these numbers."""
    return np.repeat(np.asarray(numbers, np.float32), HEADS * DIM).reshape(-1, HEADS, DIM)


def rows_of(numbers):
    """Keys and values of rows with these numbers."""
    keys = keys_of(numbers)
    return keys, -keys


def numbers_in(keys, values):
    """The numbers of rows; no row has more than one."""
    numbers = keys[:, 0, 0]
    np.testing.assert_array_equal((keys, values), rows_of(numbers))
    return numbers.tolist()


def read(manager, handle, layer=0):
    """The numbers of all rows of a layer."""
    return numbers_in(*manager.read_range(handle, layer))


def right(tokens, layer=0):
    """The numbers that a sequence of these tokens has."""
    return [computed(tokens[: end + 1], layer) for end in range(len(tokens))]


def compute(manager, handle, tokens, start):
    """Writes what is computed for the tokens from `start` on, in all layers, and commits them."""
    for layer in range(manager.num_layers):
        manager.write(handle, layer, start, *rows_of(right(tokens, layer)[start:]))
    manager.commit(handle, tokens[start:])


def start(manager, tokens, *arguments, **options):
    """A sequence that was computed as far as it was not cached."""
    handle = manager.allocate(tokens, *arguments, **options)
    if manager.has_storage:
        compute(manager, handle, tokens, handle.num_cached_tokens)
    else:
        manager.commit(handle, tokens[handle.num_cached_tokens :])
    return handle


def assert_holds(manager, handle, tokens):
    """All rows of the sequence are what its tokens make them."""
    for layer in range(manager.num_layers):
        assert read(manager, handle, layer) == right(tokens, layer)


def assert_nothing_leaks(manager):
    """Nobody has a block any more, and all of them are there."""
    if manager.leak_report():
        # A traceback that was caught can be part of a cycle.
        gc.collect()
    manager.check_integrity()
    report = manager.leak_report()
    assert not report, report
    stats = manager.stats()
    assert (stats.num_in_use, stats.num_pinned, stats.num_sequences) == (0, 0, 0)
    assert stats.num_free + stats.num_cached == stats.num_blocks
    assert sorted(manager.inspect().free_queue) == list(range(1, stats.num_blocks + 1))


@contextlib.contextmanager
def unchanged(manager):
    """Whatever happens inside changes no count, no order and no name of a block."""
    before = manager.inspect()
    yield
    assert manager.inspect() == before
    manager.check_integrity()


def refused(manager, error, call, *arguments, **keywords):
    """The exception of a call that must raise just `error`, and must leave everything as it was."""
    with unchanged(manager):
        try:
            call(*arguments, **keywords)
        except BaseException as caught:
            # Without the traceback, which would keep the arguments alive.
            raised = caught.with_traceback(None)
        else:
            pytest.fail(f"{error.__name__} was not raised")
    assert type(raised) is error, repr(raised)
    return raised
