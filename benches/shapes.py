"""What both halves of the rows about blocks have in common: tokens, sizes, and what a sample is."""

import statistics
from collections.abc import Callable

import numpy as np

BLOCK_SIZE = 16
NUM_BLOCKS = 16_384
PROMPT = 16_384  # tokens
LONG = 131_072
STEPS = 256  # of a decode sample
# 64 sequences that come to the ends of their blocks at different steps.
DECODE_LENGTHS = [512 + number % BLOCK_SIZE for number in range(64)]


def prompt(number: int, length: int) -> np.ndarray:
    """Token ids as a tokenizer would give them: random, and other ones for each number."""
    return np.random.default_rng(number).integers(0, 50_000, length)


def hot(sample: Callable[[], float]) -> Callable[[], float]:
    """The median of some samples in a row, the first of which finds the caches as the other half left
    them."""
    return lambda: statistics.median(sample() for _ in range(7))
