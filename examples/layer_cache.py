"""One attention layer that decodes with a `kvspan.LayerKvCache`.

    python examples/layer_cache.py

The keys and values of a token are computed once and kept; each new token attends to all of them where they lie. The
weights are random, and the result is compared with that of computing everything anew.
"""

import numpy as np

import kvspan

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
PROMPT_LEN, NUM_STEPS = 100, 20

random = np.random.default_rng(seed=1)
# Whatever comes into the layer: the prompt's tokens, and then those that are decoded one by one.
queries = random.standard_normal((PROMPT_LEN + NUM_STEPS, NUM_QUERY_HEADS, HEAD_DIM), np.float32)
keys = random.standard_normal((PROMPT_LEN + NUM_STEPS, NUM_KV_HEADS, HEAD_DIM), np.float32)
values = random.standard_normal((PROMPT_LEN + NUM_STEPS, NUM_KV_HEADS, HEAD_DIM), np.float32)


def attend(query, keys, values):
    """Attention of one token, [query heads, dim], to all that are given, [tokens, KV heads, dim].

    The query heads that share a KV head are the rows of one matrix; nothing is repeated, and transposed views are read
    as they are.
    """
    grouped = query.reshape(NUM_KV_HEADS, -1, HEAD_DIM)
    scores = grouped @ keys.transpose(1, 2, 0) * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values.transpose(1, 0, 2)).reshape(NUM_QUERY_HEADS, HEAD_DIM)


def main():
    config = kvspan.KVCacheConfig(
        max_tokens_per_seq=PROMPT_LEN + NUM_STEPS,
        num_heads=NUM_KV_HEADS,
        hidden_dim_per_head=HEAD_DIM,
    )
    cache = kvspan.LayerKvCache(config)

    cache.append(keys[:PROMPT_LEN], values[:PROMPT_LEN])  # the prompt, all at once
    for position in range(PROMPT_LEN, PROMPT_LEN + NUM_STEPS):
        cache.append(keys[position], values[position])
        # All tokens up to now, without a copy. They can not change before the block ends.
        with cache.view() as span:
            output = attend(queries[position], span.keys, span.values)
        anew = attend(queries[position], keys[: position + 1], values[: position + 1])
        np.testing.assert_allclose(output, anew, rtol=1e-5, atol=1e-6)
    print(
        f"{len(cache)} tokens in {cache.nbytes:,} bytes; each step gave what computing anew gives"
    )

    # A mistake is an exception, and after it everything is as it was.
    try:
        cache.append(keys[:1], values[:1])
    except IndexError as error:  # kvspan.errors.CapacityExceededError
        print(f"one more: {error}")

    # Back to the prompt, for another answer to it.
    cache.truncate(PROMPT_LEN)
    print(f"truncated to {len(cache)} tokens")


if __name__ == "__main__":
    main()
