"""Each script in `examples` runs and says what it is there to show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

SHOWN = {
    "attention": [
        r"a prompt in 3 chunks: +error [1-9]e-0[6-9]",
        r"a sequence of 5 tokens: +error [1-9]e-0[6-9]",
        r"a sequence of 70 tokens: +error [1-9]e-0[6-9]",
        r"a sequence of 300 tokens: +error [1-9]e-0[6-9]",
    ],
    "layer_cache": [
        r"120 tokens in 122,880 bytes",
        r"one more: tokens 120\.\.121 do not fit",
        r"truncated to 100 tokens",
    ],
    "prefix_sharing": [
        r"first prompt: +0 of 54 tokens were there",
        r"second prompt: +48 of 53 tokens were there",
        r"other tenant: +0 tokens would be there",
        r"two answers: +3 of 4 blocks are shared",
        r"in the end: +0 blocks in use, 3 cached, 29 free",
    ],
    "speculative_decoding": [
        r"token by token: 60 steps for 60 tokens",
        r"with guesses: +\d\d steps; [1-9]\d* blocks were copied",
    ],
}


@pytest.mark.parametrize("name", list(SHOWN))
def test_example_shows_what_it_is_for(name):
    run = subprocess.run(
        [sys.executable, "-W", "error", FOLDER / f"{name}.py"],
        capture_output=True,
        check=False,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(SHOWN[name])
    for line, shown in zip(lines, SHOWN[name]):
        assert re.match(shown, line), line


def test_every_example_is_run_by_a_test():
    # smollm2.py has tests of its own.
    assert {file.stem for file in FOLDER.glob("*.py")} == {*SHOWN, "smollm2"}
