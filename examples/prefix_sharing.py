"""Sequences that begin alike share blocks, in a `kvspan.KvCacheManager`.

    python examples/prefix_sharing.py

Two prompts with the same beginning, a tenant that must not share, and two answers to one prompt. The keys and values
are a function of token and position here, so that what a sequence finds in its blocks can be compared with it.
"""

import numpy as np

import kvspan

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 8

SYSTEM_PROMPT = list(range(100, 150))
FIRST_QUESTION = [7, 8, 9, 10]
SECOND_QUESTION = [21, 22, 23]


def rows(layer, tokens, start):
    """Keys or values of tokens at the positions from `start` on, [tokens, heads, dim]. A model computes them."""
    angles = np.arange(start, start + len(tokens))[:, None] + np.arange(NUM_KV_HEADS * HEAD_DIM)
    table = np.sin(angles + layer) + np.array(tokens)[:, None]
    return table.astype(np.float32).reshape(-1, NUM_KV_HEADS, HEAD_DIM)


def compute(manager, handle, tokens):
    """Compute the tokens at the end of a sequence, and let others find them."""
    start = handle.num_tokens - len(tokens)
    for layer in range(NUM_LAYERS):
        keys = rows(layer, tokens, start)
        manager.write(handle, layer, start, keys, -keys)
    manager.commit(handle, tokens)


def check(manager, handle, tokens):
    """The sequence has the keys and values of just these tokens, whoever computed them."""
    for layer in range(NUM_LAYERS):
        keys, values = manager.read_range(handle, layer)
        np.testing.assert_array_equal(keys, rows(layer, tokens, 0))
        np.testing.assert_array_equal(values, -keys)


def main():
    manager = kvspan.KvCacheManager(
        num_blocks=32,
        block_size=16,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
    )

    # The first sequence computes all of its prompt. Its blocks go back at the end of the `with`, but can be found until
    # they are needed for something else.
    prompt = SYSTEM_PROMPT + FIRST_QUESTION
    with manager.allocate(prompt) as first:
        compute(manager, first, prompt[first.num_cached_tokens :])
        print(f"first prompt:  {first.num_cached_tokens} of {len(prompt)} tokens were there")

    # The second has the whole blocks in which it agrees with the first, and computes the rest.
    prompt = SYSTEM_PROMPT + SECOND_QUESTION
    assert manager.probe(prompt) == 48
    with manager.allocate(prompt) as second:
        compute(manager, second, prompt[second.num_cached_tokens :])
        check(manager, second, prompt)
        print(f"second prompt: {second.num_cached_tokens} of {len(prompt)} tokens were there")

        # Who has another salt shares with nobody, and can not find out what others asked.
        print(
            f"other tenant:  {manager.probe(prompt, cache_salt='tenant 2')} tokens would be there"
        )

        # Two answers to the prompt. They have all blocks in common until one of them writes: then it gets a copy of the
        # one block that it writes to.
        with manager.fork(second) as other:
            assert list(other.block_table.physical_blocks) == list(
                second.block_table.physical_blocks
            )
            for handle, answer in [(second, [1, 2]), (other, [3, 4, 5])]:
                manager.extend(handle, len(answer))
                compute(manager, handle, answer)
            check(manager, second, [*prompt, 1, 2])
            check(manager, other, [*prompt, 3, 4, 5])
            pairs = zip(second.block_table.physical_blocks, other.block_table.physical_blocks)
            shared = [one == two for one, two in pairs]
            print(f"two answers:   {sum(shared)} of {len(shared)} blocks are shared")

    assert not manager.leak_report()  # nobody has anything
    stats = manager.stats()
    print(
        f"in the end:    {stats.num_in_use} blocks in use, {stats.num_cached} cached, {stats.num_free} free"
    )


if __name__ == "__main__":
    main()
