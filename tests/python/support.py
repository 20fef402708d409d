"""What the tests share: tokens that can be told apart, caches, refusals, processes, threads."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvspan

CAPACITY, HEADS, DIM = 16, 2, 4
WIDTH = HEADS * DIM
# For what should happen at once: long enough for a machine that is busy with other things.
SOON = 30.0


def new_cache(capacity=CAPACITY, heads=HEADS, dim=DIM, dtype="float32"):
    return kvspan.LayerKvCache(kvspan.KVCacheConfig(capacity, heads, dim, dtype))


def tokens(count, first=1):
    """Keys and values of `count` tokens; no element occurs twice, and none is zero."""
    elements = np.arange(first * WIDTH, (first + count) * WIDTH, dtype=np.float32)
    keys = elements.reshape(count, HEADS, DIM)
    return keys, -keys - 0.5


def token(number=1):
    """Keys and values of one token."""
    keys, values = tokens(1, first=number)
    return keys[0], values[0]


def new_filled_cache(count=6, dtype="float32"):
    """A cache of `tokens(count)`."""
    cache = new_cache(dtype=dtype)
    cache.append(*tokens(count))
    return cache


def address(array):
    return array.__array_interface__["data"][0]


def contents(cache):
    """All there is to see of a cache."""
    keys, values = cache.read_range(0, len(cache))
    return len(cache), keys.tobytes(), values.tobytes()


def assert_holds(cache, keys, values):
    """The cache's tokens are these, and no others."""
    np.testing.assert_array_equal(cache.read_range(0, len(cache)), (keys, values))


@contextlib.contextmanager
def unchanged(cache):
    """Whatever happens inside leaves the cache with the same tokens, and usable."""
    before = contents(cache)
    yield
    assert contents(cache) == before
    if len(cache) < cache.capacity:
        row = np.ones((cache.config.num_heads, cache.config.hidden_dim_per_head), np.float32)
        with contextlib.suppress(kvspan.errors.ReservedError):
            cache.append(row, row)
            cache.truncate(before[0])
    assert contents(cache) == before


def refused(cache, error, call, *arguments, **keywords):
    """The exception of a call that must raise just `error`, and must leave the cache as it was."""
    with unchanged(cache):
        try:
            call(*arguments, **keywords)
        except BaseException as caught:
            # Without the traceback, which would keep the arguments alive.
            raised = caught.with_traceback(None)
        else:
            pytest.fail(f"{error.__name__} was not raised")
    assert type(raised) is error, repr(raised)
    return raised


def said(error):
    """The message of an exception, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def run_python(code, timeout=SOON):
    """The output of a script that must end well in time, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # Who starts a command in the background may have it ignore Ctrl-C.
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", code],
        capture_output=True,
        check=False,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
    assert run.stderr == ""
    return run.stdout


def isolated(test):
    """A test in a process of its own: what hangs with the interpreter held hangs nobody else.

    Its parameters must be such that their `repr` makes them.
    """

    @functools.wraps(test)
    def runs_in_a_process(**parameters):
        module, name = test.__module__, test.__name__
        run_python(f"import {module}; {module}.{name}.__wrapped__(**{parameters!r})")

    return runs_in_a_process


class Threads:
    """Threads that the block waits for at its end; it raises what they raised."""

    def __init__(self):
        self._threads = []
        self._errors = []

    def start(self, call, *arguments):
        thread = threading.Thread(target=self._run, args=(call, arguments), daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _run(self, call, arguments):
        try:
            call(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self):
        return self

    def __exit__(self, exception_type, *_):
        if exception_type is not None:
            return
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive(), "a thread hangs"
        if self._errors:
            raise self._errors[0]
