"""Attention in the plainest terms: a softmax in float64 that has every score in front of it."""

import numpy as np


def softmax_attention(query, keys, values, *, scale=None, causal=True, window=None, softcap=None):
    """What attention is, one query head after the other."""
    query, keys, values = (np.asarray(part, np.float64) for part in (query, keys, values))
    (num_queries, num_heads, dim), num_tokens = query.shape, len(keys)
    group = num_heads // keys.shape[1]
    positions = np.arange(num_tokens)
    result = np.zeros(query.shape)
    for row in range(num_queries):
        last = num_tokens - num_queries + row if causal else num_tokens - 1
        seen = positions <= last
        if window is not None:
            seen &= positions > last - window
        for head in range(num_heads):
            scores = keys[seen, head // group] @ query[row, head] * (scale or dim**-0.5)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            result[row, head] = weights @ values[seen, head // group] / weights.sum()
    return result
