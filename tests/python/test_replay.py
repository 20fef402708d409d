"""A trace hits in `kvspan.replay` and on the command line what is on record; bad traces are refused."""

import doctest
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import kvspan.replay
from kvspan.__main__ import main
from kvspan.replay import Request, Summary, Trace, TraceError, read_trace, replay, summarize

KEYS = [
    "num_blocks",
    "requests",
    "full_blocks",
    "hit_blocks",
    "block_hit_rate",
    "token_hit_rate",
    "evictions",
    "seconds",
]
# Two requests that begin alike, and a third that begins like the second.
PACKED = ["[0, 1100, 5, [[7, 3]]]", "[1, 1700, 5, [7, [20, 3]]]", "[2, 1536, 5, [7, 20, 21]]"]
HITS = [0, 1, 2]


@pytest.fixture
def trace_file(tmp_path):
    """Writes lines to a file."""

    def write(lines, name="trace.jsonl"):
        file = tmp_path / name
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return write


@pytest.fixture
def packed(trace_file):
    return trace_file(PACKED)


@pytest.fixture(scope="session")
def conversation(test_data):
    return read_trace(test_data / "traces" / "conversation_packed.jsonl.gz")


def hits_of(trace, num_blocks, **options):
    return [outcome.hit_blocks for outcome in replay(trace, num_blocks, **options)]


def as_json(numbers):
    return json.dumps(numbers, separators=(",", ":"))


# Numbers on record


def on_record(test_data):
    file = test_data / "traces" / "expected_public.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["block_manager"]["conversation"]
    return {run["pool"]: run for run in runs if run["part"] == "head"}


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 50_000])
def test_hits_and_evictions_are_those_on_record(test_data, conversation, num_blocks):
    run = on_record(test_data)[num_blocks]
    outcomes = list(replay(conversation, num_blocks))

    assert (
        zlib.crc32(as_json([outcome.hit_blocks for outcome in outcomes]).encode())
        == (run["per_request_hits_crc32"])
    )
    assert summarize(outcomes) == Summary(
        requests=run["requests"],
        refused=run["rejected"],
        num_tokens=144_793_823,
        full_blocks=run["full_blocks"],
        hit_blocks=run["hit_blocks"],
        block_hit_rate=run["block_hit_rate"],
        token_hit_rate=run["token_hit_rate"],
        evictions=run["evictions"],
        peak_blocks_in_use=run["peak_used"],
    )


def test_with_room_for_everything_all_that_came_before_hits(conversation):
    summary = summarize(replay(conversation, 300_000))
    assert (summary.hit_blocks, summary.evictions) == (105_592, 0)


def test_each_of_the_first_requests_has_the_hits_on_record(test_data, conversation):
    # They were recorded where a partial block goes to the tail of the queue. That is where ours goes
    # if it is full, and nobody else asks for it.
    def filled(request, private):
        num_ids, partial = len(request.ids), request.num_tokens % conversation.block_size > 0
        ids = np.append(request.ids[:-1], np.uint32(private)) if partial else request.ids
        return Request(num_ids * conversation.block_size, ids)

    first = [filled(conversation.requests[i], private=2**31 + i) for i in range(1000)]
    file = test_data / "traces" / "conversation_first1000_pool5860_alone_hits.json"
    hits = hits_of(Trace(conversation.block_size, first), 5860)
    assert hits == json.loads(file.read_text(encoding="utf-8"))


def test_command_prints_the_numbers_on_record(test_data, capsys):
    file = test_data / "traces" / "conversation_packed.jsonl.gz"
    assert main(["replay", str(file), "--num-blocks", "1000", "10000", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, num_blocks in zip(lines, [1000, 10000], strict=True):
        numbers, run = json.loads(line), on_record(test_data)[num_blocks]
        assert list(numbers) == KEYS
        assert numbers.pop("num_blocks") == num_blocks
        assert numbers.pop("seconds") > 0
        assert numbers == {key: run[key] for key in numbers}


def test_other_traces_of_the_data_can_be_read(test_data):
    traces = test_data / "traces"
    synthetic = read_trace(traces / "synthetic_packed.jsonl.gz")
    assert (synthetic.block_size, len(synthetic.requests)) == (512, 3_993)
    agentic = read_trace(traces / "agentic_mix_64tok.jsonl.gz")
    assert (agentic.block_size, len(agentic.requests)) == (64, 2_311)


# Formats


def hash_runs(lengths_and_runs):
    return [
        json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_runs": runs})
        for length, runs in lengths_and_runs
    ]


def hash_ids(lengths_and_ids):
    return [
        json.dumps({"input_length": length, "hash_ids": ids}) for length, ids in lengths_and_ids
    ]


FORMATS = {
    "packed": (512, PACKED),
    "hash_runs": (64, hash_runs([(138, [[7, 9]]), (213, [[7, 7], [20, 22]]), (192, [[7, 7], [20, 21]])])),
    "hash_ids": (512, hash_ids([(1100, [7, 8, 9]), (1700, [7, 20, 21, 22]), (1536, [7, 20, 21])])),
    "strings": (512, hash_ids([(1100, [*"abc"]), (1700, [*"axyz"]), (1536, [*"axy"])])),
    "no lengths": (512, ['{"hash_ids": [7, 8]}', '{"hash_ids": [7, 20, 21]}', '{"hash_ids": [7, 20, 1]}']),
    "blocks of 16": (16, hash_ids([(35, [7, 8, 9]), (60, [7, 20, 21, 22]), (48, [7, 20, 21])])),
    "partial blocks without ids": (512, ["[0, 1100, 1, [[7, 2]]]", "[0, 1700, 1, [7, 20, 21]]", PACKED[2]]),
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("block_size", "lines"), list(FORMATS.values()), ids=list(FORMATS))
def test_formats_are_told_apart_by_their_content(trace_file, block_size, lines, compressed):
    file = trace_file(lines)
    if compressed:
        file.write_bytes(gzip.compress(file.read_bytes()))
    trace = read_trace(file)
    assert trace.block_size == block_size
    assert hits_of(trace, 100) == HITS


def test_empty_lines_and_a_missing_last_newline_do_no_harm(tmp_path):
    file = tmp_path / "trace"
    file.write_text("\n" + "\n\n".join(PACKED), encoding="utf-8")
    assert hits_of(read_trace(file), 100) == HITS


def test_a_partial_block_without_an_id_is_nobody_else_s(trace_file):
    trace = read_trace(trace_file(["[0, 700, 1, [1]]", "[0, 700, 1, [1]]"]))
    # Of blocks of 100 tokens, the first five lie in what both have.
    assert hits_of(trace, 100, block_size=100) == [0, 5]


@pytest.mark.parametrize(
    ("block_size", "hits"),
    [(512, [0, 1, 2]), (256, [0, 2, 5]), (16, [0, 32, 95]), (1, [0, 512, 1535]), (1024, [0, 0, 1])],
)
def test_blocks_of_the_pool_can_have_another_size(packed, block_size, hits):
    trace = read_trace(packed, block_size=block_size)
    assert trace.block_size == 512
    assert hits_of(trace, 10_000, block_size=block_size) == hits


@pytest.mark.parametrize("block_size", [6, 12, 4, 5, 18, 24, 1])
def test_the_manager_counts_as_if_it_had_every_token(block_size):
    random = np.random.default_rng(seed=block_size)
    numbers = {}  # of prefixes

    def some_request():
        num_tokens = int(random.integers(1, 80))
        content = random.integers(0, 2, size=-(-num_tokens // 12)).tolist()
        prefixes = [tuple(content[: i + 1]) for i in range(len(content))]
        ids = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        return Request(num_tokens, np.array(ids, np.uint32))

    requests = [some_request() for _ in range(60)]
    num_blocks = 70 // block_size  # too few for the longest
    manager = kvspan.KvCacheManager(num_blocks, block_size=block_size, storage=False)
    expected = []
    for request in requests:
        tokens = np.repeat(request.ids, 12)[: request.num_tokens]
        try:
            handle = manager.allocate(tokens)
        except kvspan.errors.OutOfBlocksError:
            expected.append((0, True))
            continue
        with handle:
            manager.commit(handle, tokens[handle.num_cached_tokens :])
            expected.append((handle.num_cached_tokens, False))

    outcomes = list(replay(Trace(12, requests), num_blocks, block_size=block_size))

    assert [(outcome.hit_tokens, outcome.refused) for outcome in outcomes] == expected
    summary = summarize(outcomes)
    assert summary.evictions == manager.stats().num_evictions
    assert summary.hit_blocks > 0 and summary.evictions > 0 and summary.refused > 0


def test_the_size_that_is_asked_for_is_the_trace_s_if_it_agrees(trace_file):
    file = trace_file(hash_ids([(24, [1, 2]), (36, [1, 3, 4])]))
    assert read_trace(file, block_size=12).block_size == 12
    assert read_trace(file, block_size=512).block_size == 16
    assert read_trace(trace_file(['{"hash_ids": [1]}']), block_size=12).block_size == 12


def test_request_of_no_tokens_has_no_blocks(trace_file):
    trace = read_trace(trace_file(["[0, 0, 1, []]", *PACKED]))
    assert hits_of(trace, 100) == [0, *HITS]


# A pool that is too small


def test_request_that_does_not_fit_is_refused_and_counts(packed):
    outcomes = list(replay(read_trace(packed), 3))
    assert [outcome.refused for outcome in outcomes] == [False, True, False]
    summary = summarize(outcomes)
    assert (summary.requests, summary.refused, summary.num_tokens) == (3, 1, 4336)
    assert (summary.full_blocks, summary.hit_blocks) == (8, 1)
    assert (summary.evictions, summary.peak_blocks_in_use) == (1, 3)


def test_command_says_what_was_refused(packed, capsys):
    assert main(["replay", str(packed), "--num-blocks", "3", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["requests"] for line in said.out.splitlines()] == [3, 3]
    one, all_of_them = said.err.splitlines()
    assert "1 of 3 requests need more than 3 blocks" in one
    assert "3 of 3 requests need more than 1 blocks" in all_of_them


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_of_no_tokens_is_refused(packed, block_size):
    with pytest.raises(ValueError, match=f"a block has at least 1 token, not {block_size}"):
        replay(read_trace(packed), 8, block_size=block_size)


# Bad traces

BAD_LINES = {
    "no JSON": ("{", "no JSON"),
    "half a line": (PACKED[0][:9], "no JSON"),
    "no text": ("\udcff\udcfe", "no JSON"),
    "too deep": ("[" * 100_000, "no JSON"),
    "a number of too many digits": ("[0, " + "9" * 5_000 + "]", "no JSON"),
    "no object or list": ("17", "neither a list nor an object with hash_runs or hash_ids"),
    "another object": ('{"input_length": 3}', "neither a list nor an object"),
    "too short": ("[0, 1100, 5]", "not [timestamp, input_length, output_length, ["),
    "ids are no list": ("[0, 1100, 5, 7]", "not [timestamp, input_length, output_length, ["),
    "an id of three": ("[0, 1100, 5, [[7, 8, 9]]]", "[7, 8, 9] is neither an id nor [first, count]"),
    "a negative length": ("[0, -1, 5, []]", "-1 is no length"),
    "a length that is none": ('[0, "1100", 5, [7]]', "'1100' is no length"),
    "a huge length": ("[0, 1000000000000, 5, [[0, 3]]]", "1000000000000 is no length from 0 to"),
    "a huge count": ("[0, 1100, 5, [[0, 1000000000000]]]", "1000000000000 is no length from 0 to"),
    "a negative count": ("[0, 1100, 5, [[7, -3]]]", "-3 is no length"),
    "runs without a length": ('{"hash_runs": [[0, 3]]}', "no object with input_length"),
    "runs are no list": ('{"input_length": 64, "hash_runs": 3}', "no object with input_length"),
    "a run backwards": ('{"input_length": 64, "hash_runs": [[3, 2]]}', "[3, 2] is not [first, last]"),
    "a huge run": ('{"input_length": 64, "hash_runs": [[0, 9e99]]}', "[0, 9e+99] is not [first, last]"),
    "an id that is true": ("[0, 512, 5, [true]]", "True is neither an id nor [first, count]"),
    "a count that is true": ("[0, 512, 5, [[7, true]]]", "True is no length"),
    "a first id that is true": ("[0, 512, 5, [[true, 1]]]", "[True, 1] is neither an id nor"),
    "a length that is true": ('{"input_length": true, "hash_ids": [7]}', "True is no length"),
    "a run from false": ('{"input_length": 64, "hash_runs": [[false, 0]]}', "[False, 0] is not [first"),
    "ids of truth": ('{"hash_ids": [7, true]}', "True is no id"),
    "ids of lists": ('{"input_length": 64, "hash_ids": [[1]]}', "[1] is no id"),
    "ids that are no list": ('{"input_length": 64, "hash_ids": null}', "no object with a list"),
    "ids of too many tokens": (json.dumps({"hash_ids": [7] * 32_769}), "32,769 ids of 512 tokens"),
    "too many ids": ("[0, 5, 5, [7, 8, 9, 10, 11, 12, 13, 14, 15]]", "9 ids for 5 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), list(BAD_LINES.values()), ids=list(BAD_LINES))
def test_bad_line_is_named(tmp_path, line, reason):
    file = tmp_path / "trace.jsonl"
    text = line.encode("utf-8", "surrogateescape")
    file.write_bytes(b"\n" + text)
    with pytest.raises(TraceError) as raised:
        read_trace(file)
    assert str(raised.value).startswith("line 2: ")
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_line_of_another_format_is_refused(trace_file):
    with pytest.raises(TraceError, match=r"line 4: not \[timestamp, input_length"):
        read_trace(trace_file([*PACKED, *FORMATS["hash_ids"][1]]))


def test_ids_that_do_not_agree_are_refused(trace_file):
    with pytest.raises(TraceError, match=r"line 4: 3 ids for 9,999 tokens; at 512 tokens a block"):
        read_trace(trace_file([*PACKED, "[3, 9999, 5, [7, 20, 21]]"]))


def test_ids_that_may_stand_for_several_sizes_are_refused(trace_file):
    file = trace_file(hash_ids([(40, [1, 2])]))
    with pytest.raises(TraceError, match="an id may stand for 16 or 32 tokens"):
        read_trace(file)
    assert read_trace(file, block_size=32).block_size == 32


@pytest.mark.parametrize("text", [b"", b"\n\n", gzip.compress(b"")])
def test_file_without_requests_is_refused(tmp_path, text):
    file = tmp_path / "trace"
    file.write_bytes(text)
    with pytest.raises(TraceError, match="no requests"):
        read_trace(file)


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:12] + b"x" * 40])
def test_damaged_gzip_data_is_refused(tmp_path, damage):
    file = tmp_path / "trace.gz"
    file.write_bytes(damage(gzip.compress("\n".join(PACKED * 100).encode())))
    with pytest.raises(TraceError, match="damaged gzip data"):
        read_trace(file)


# The command line


def failure_of(capsys, *arguments):
    """What a command that must fail says, in one line and without a traceback."""
    try:
        code = main(["replay", *map(str, arguments)])
    except SystemExit as error:  # out of argparse
        code = error.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == "" and "Traceback" not in said.err
    return said.err


def test_command_prints_a_table(packed, capsys):
    assert main(["replay", str(packed), "--num-blocks", "100", "2000"]) == 0
    said = capsys.readouterr()
    heading, empty, columns, *rows = said.out.splitlines()
    assert heading == "trace.jsonl: 3 requests of 4,336 tokens, 8 full blocks of 512"
    assert empty == ""
    assert columns.split() == (
        [
            "blocks",
            "hit",
            "blocks",
            "of",
            "blocks",
            "of",
            "tokens",
            "evictions",
            "peak",
            "use",
            "seconds",
        ]
    )
    assert [row.split()[:-1] for row in rows] == [
        ["100", "3", "37.50%", "35.42%", "0", "4"],
        ["2,000", "3", "37.50%", "35.42%", "0", "4"],
    ]
    assert len({len(line) for line in [columns, *rows]}) == 1
    assert said.err == ""  # no bar where there is no terminal


def test_command_takes_blocks_of_another_size(packed, capsys):
    assert (
        main(["replay", str(packed), "--num-blocks", "999", "--block-size", "256", "--json"]) == 0
    )
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["full_blocks"], numbers["hit_blocks"]) == (16, 7)


def test_command_shows_a_bar_on_a_terminal(packed, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["replay", str(packed), "--num-blocks", "1000"]) == 0
    assert "1,000 blocks:" in terminal.getvalue() and "/3" in terminal.getvalue()


def test_command_needs_no_tqdm(packed, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["replay", str(packed), "--num-blocks", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_blocks"] == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--num-blocks", "0"], "--num-blocks: 0 is less than 1"),
        (["--num-blocks", "-5"], "--num-blocks: -5 is less than 1"),
        (["--num-blocks", "many"], "--num-blocks: 'many' is no whole number"),
        (["--num-blocks", "5", "--block-size", "0"], "--block-size: 0 is less than 1"),
        ([], "the following arguments are required: --num-blocks"),
        (["--num-blocks"], "--num-blocks: expected at least one argument"),
    ],
)
def test_bad_arguments_are_refused(packed, capsys, arguments, reason):
    said = failure_of(capsys, packed, *arguments)
    assert reason in said
    assert "usage: python -m kvspan replay TRACE --num-blocks N [N ...]" in said


def test_a_trace_behind_the_sizes_of_pools_is_refused_with_what_to_do(packed, capsys):
    said = failure_of(capsys, "--num-blocks", 10, packed)
    assert f"'{packed}' is no whole number: TRACE comes before --num-blocks" in said


def test_a_pool_too_large_is_refused(packed, capsys):
    said = failure_of(capsys, packed, "--num-blocks", 10**18, "--json")
    assert said.startswith("kvspan replay: error: no pool of 1,000,000,000,000,000,000 blocks: ")


def test_missing_file_is_named(tmp_path, capsys):
    said = failure_of(capsys, tmp_path / "missing.jsonl", "--num-blocks", 10)
    assert (
        said == f"kvspan replay: error: {tmp_path / 'missing.jsonl'}: No such file or directory\n"
    )


def test_folder_is_no_trace(tmp_path, capsys):
    said = failure_of(capsys, tmp_path, "--num-blocks", 10)
    assert said == f"kvspan replay: error: {tmp_path}: Is a directory\n"


def test_bad_line_is_named_with_its_file(trace_file, capsys):
    file = trace_file([*PACKED, "oops"])
    said = failure_of(capsys, file, "--num-blocks", 10)
    assert said.startswith(f"kvspan replay: error: {file}: line 4: no JSON: ")
    assert said.count("\n") == 1


def test_command_runs_as_a_module_and_reads_a_pipe(packed):
    run = run_module(
        "replay", "/dev/stdin", "--num-blocks", "10", "--json", input=packed.read_text()
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["hit_blocks"] == 3


def test_command_without_a_command_says_what_there_is():
    run = run_module()
    assert run.returncode == 2
    assert "COMMAND" in run.stderr


def run_module(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "kvspan", *arguments],
        capture_output=True,
        check=False,
        text=True,
        encoding="utf-8",
        timeout=60,
        **options,
    )


def test_ctrl_c_ends_the_command_in_one_line(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Whoever runs the tests may have Ctrl-C ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from kvspan.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "replay", str(pipe), "--num-blocks", "10"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        with open(pipe, "w") as trace:  # waits until it is read
            trace.write(PACKED[0] + "\n")
            trace.flush()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        assert process.stderr.read() == "kvspan replay: interrupted\n"


def test_command_needs_no_standard_error(packed):
    command = [
        sys.executable,
        "-m",
        "kvspan",
        "replay",
        str(packed),
        "--num-blocks",
        "10",
        "--json",
    ]
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0
    assert json.loads(run.stdout)["num_blocks"] == 10


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_output_that_can_not_be_written_is_an_error_of_one_line(packed):
    command = [sys.executable, "-m", "kvspan", "replay", str(packed), "--num-blocks", "10"]
    with open("/dev/full", "wb") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert run.stderr == b"kvspan replay: error: No space left on device\n"
    assert run.returncode == 2


def test_output_that_nobody_reads_ends_the_command_quietly(packed):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "kvspan", "replay", str(packed), "--num-blocks", "10"]
    run = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write_end)
    assert run.stderr == b""
    assert run.returncode == 2


# The plot


def test_command_draws_a_curve(packed, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for file in [tmp_path / "rates.svg", tmp_path / "rates.png"]:
        assert main(["replay", str(packed), "--num-blocks", "4", "100", "--plot", str(file)]) == 0
    assert "100" in capsys.readouterr().out
    svg = (tmp_path / "rates.svg").read_text(encoding="utf-8")
    assert svg.startswith("<?xml")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_curve_is_drawn_over_the_sizes_in_order():
    pytest.importorskip("matplotlib")
    figure = kvspan._plot.plot_hit_rates([(200, 0.5, 0.4), (100, 0.25, 0.2)], "a title")
    [ax] = figure.axes
    blocks, tokens = ax.lines
    assert blocks.get_xydata().tolist() == [[100, 0.25], [200, 0.5]]
    assert tokens.get_xydata().tolist() == [[100, 0.2], [200, 0.4]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "of full blocks",
        "of tokens",
    ]


def test_plot_without_matplotlib_says_what_to_install(packed, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = failure_of(capsys, packed, "--num-blocks", 10, "--plot", tmp_path / "rates.svg")
    assert said == "kvspan replay: error: matplotlib is not installed: pip install matplotlib\n"


def test_plot_of_an_unknown_format_is_refused(packed, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    said = failure_of(capsys, packed, "--num-blocks", 10, "--plot", tmp_path / "rates.txt")
    assert "rates.txt: a plot can be one of" in said and "png" in said


def test_plot_in_a_missing_folder_is_refused(packed, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "missing" / "rates.svg"
    assert main(["replay", str(packed), "--num-blocks", "10", "--plot", str(file)]) == 2
    assert f"{file}: No such file or directory" in capsys.readouterr().err


def test_examples_run():
    assert doctest.testmod(kvspan.replay).failed == 0


def test_the_lines_in_the_readme_are_a_trace(tmp_path, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r'^{"input_length".*$', readme, re.MULTILINE)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    assert main(["replay", str(trace), "--num-blocks", "10", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    # The second request finds the 1,024 tokens that it shares with the first.
    assert (summary["requests"], summary["full_blocks"], summary["hit_blocks"]) == (2, 4, 2)
