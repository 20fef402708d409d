"""Attention over keys and values where they lie: `kvspan.attention`.

    python examples/attention.py

One layer of a model with eight query heads that share two KV heads. A prompt goes through in chunks, then three
sequences of different lengths take a step together, in blocks of int8; each result is compared with a softmax in NumPy.
"""

import numpy as np

import kvspan

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 32


def softmax_attention(queries, keys, values):
    """The same in NumPy, which repeats the keys and values of each KV head for all its query heads."""
    keys, values = (np.repeat(part, NUM_Q_HEADS // NUM_KV_HEADS, axis=1) for part in (keys, values))
    scores = np.einsum("qhd,thd->hqt", queries, keys) / np.sqrt(HEAD_DIM)
    hidden = np.triu(np.ones(scores.shape[1:], bool), len(keys) - len(queries) + 1)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqt,thd->qhd", weights, values)


def main():
    rng = np.random.default_rng(1)

    def rows(*shape):  # a model computes them
        return rng.standard_normal(shape, np.float32)

    # A prompt in chunks: each chunk's queries see what is before them, and themselves.
    cache = kvspan.LayerKvCache(
        kvspan.KVCacheConfig(num_heads=NUM_KV_HEADS, hidden_dim_per_head=HEAD_DIM)
    )
    queries = rows(100, NUM_Q_HEADS, HEAD_DIM)
    results = []
    for start in range(0, 100, 40):
        chunk = queries[start : start + 40]
        cache.append(*(rows(len(chunk), NUM_KV_HEADS, HEAD_DIM) for _ in "kv"))
        results.append(kvspan.attention(chunk, cache))
    error = np.abs(np.concatenate(results) - softmax_attention(queries, *cache.read_range(0, 100)))
    print(f"a prompt in {len(results)} chunks:  error {error.max():.0e}")

    # A step of three sequences: one call, and threads that belong to whoever made the pool.
    manager = kvspan.KvCacheManager(64, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="int8")
    handles = manager.allocate_many([np.arange(length) for length in (5, 70, 300)])
    for handle in handles:
        manager.write(
            handle, 0, 0, *(rows(handle.num_tokens, NUM_KV_HEADS, HEAD_DIM) for _ in "kv")
        )
    queries = rows(len(handles), NUM_Q_HEADS, HEAD_DIM)
    together = kvspan.attention(queries, handles, 0, pool=kvspan.AttentionPool(2))
    for index, handle in enumerate(handles):
        own = slice(index, index + 1)
        error = np.abs(
            together[own] - softmax_attention(queries[own], *manager.read_range(handle, 0))
        )
        print(f"a sequence of {handle.num_tokens} tokens:  error {error.max():.0e}")


if __name__ == "__main__":
    main()
