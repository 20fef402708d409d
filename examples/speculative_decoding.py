"""Speculative decoding with `fork` and `truncate` of a `kvspan.KvCacheManager`.

    python examples/speculative_decoding.py

Guesses of the next tokens are cheap here: what came after earlier occurrences of the last token. The model checks a
whole guess in one step. Each guess gets a fork of the sequence; the best one goes on, without its wrong end, and the
others are freed. The result is what decoding token by token gives, in fewer steps.

The model is one attention layer with random weights, which soon repeats itself, as good guesses need it.
"""

import numpy as np

import kvspan

NUM_HEADS, HEAD_DIM, VOCABULARY = 2, 16, 24
GUESS_LEN, NUM_GUESSES = 4, 2
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
NUM_NEW_TOKENS = 60

random = np.random.default_rng(seed=5)
query_of, key_of, value_of = random.standard_normal(
    (3, VOCABULARY, NUM_HEADS, HEAD_DIM), np.float32
)
output = random.standard_normal((NUM_HEADS * HEAD_DIM, VOCABULARY), np.float32)


def run(manager, handle, tokens):
    """Run the last tokens of a sequence through the model; returns what should come after each of them."""
    start = handle.num_tokens - len(tokens)
    manager.write(handle, 0, start, key_of[tokens], value_of[tokens])
    keys, values = manager.read_range(handle, 0)
    scores = np.einsum("qhd,khd->hqk", query_of[tokens], keys) * HEAD_DIM**-0.5
    hidden = np.arange(handle.num_tokens) > start + np.arange(len(tokens))[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(len(tokens), -1)
    return (mixed @ output).argmax(axis=-1).tolist()


def guesses_after(tokens):
    """What came after the last token where it occurred before, latest first; an empty guess if it did not."""
    found = [
        tokens[position + 1 : position + 1 + GUESS_LEN]
        for position in reversed(range(len(tokens) - 1))
        if tokens[position] == tokens[-1]
    ]
    return found[:NUM_GUESSES] or [[]]


def step(manager, handle, tokens, guesses):
    """Check all guesses; returns the sequence that goes on, and its new tokens, of which there is at least one.

    A model would run the guesses as one batch.
    """
    branches = []
    for guess in guesses:
        fork = manager.fork(handle)
        new = [tokens[-1], *guess]  # the last token is known, but did not run yet
        manager.extend(fork, len(new))
        expected = run(manager, fork, new)
        num_right = 0
        while num_right < len(guess) and guess[num_right] == expected[num_right]:
            num_right += 1
        branches.append((expected[: num_right + 1], fork))
    accepted, best = max(branches, key=lambda branch: len(branch[0]))

    for one in [handle, *(fork for _, fork in branches if fork is not best)]:
        manager.free(one)
    # Give up the keys and values of wrong guesses. The last token that is right has none yet.
    manager.truncate(best, len(tokens) + len(accepted) - 1)
    manager.commit(best, [tokens[-1], *accepted[:-1]])
    return best, accepted


def decode(guesses_after):
    """Decode after the prompt; returns all tokens, how many steps it took, and the manager."""
    manager = kvspan.KvCacheManager(
        num_blocks=64, block_size=4, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM
    )
    handle = manager.allocate(PROMPT)
    tokens = PROMPT + run(manager, handle, PROMPT)[-1:]
    manager.commit(handle, PROMPT)
    num_steps = 1
    while len(tokens) < len(PROMPT) + NUM_NEW_TOKENS:
        handle, accepted = step(manager, handle, tokens, guesses_after(tokens))
        tokens += accepted
        num_steps += 1
    manager.free(handle)
    return tokens[: len(PROMPT) + NUM_NEW_TOKENS], num_steps, manager


def main():
    one_by_one, num_steps, _ = decode(lambda tokens: [[]])
    print(f"token by token: {num_steps} steps for {NUM_NEW_TOKENS} tokens")

    speculated, num_steps, manager = decode(guesses_after)
    print(f"with guesses:   {num_steps} steps; {manager.stats().num_copies} blocks were copied")

    assert speculated == one_by_one
    assert not manager.leak_report()  # whatever was forked is back


if __name__ == "__main__":
    main()
