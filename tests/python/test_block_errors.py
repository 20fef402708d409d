"""Bad input: each is refused with its numbers at the guilty call, and changes and leaks nothing."""

import numpy as np
import pytest

import kvspan
from blocks import (
    DIM,
    HEADS,
    assert_holds,
    assert_nothing_leaks,
    new_manager,
    refused,
    rows_of,
    start,
)
from kvspan.errors import (
    BlocksInUseError,
    ForeignHandleError,
    InvalidConfigError,
    InvalidInputError,
    LayerOutOfRangeError,
    NoStorageError,
    OutOfBlocksError,
    OutOfMemoryError,
    OutOfRangeError,
    RequestExistsError,
    StaleHandleError,
    TokenMismatchError,
    UnknownRequestError,
    WrongBlockStateError,
)
from support import run_python, said

PROMPT = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def manager():
    manager = new_manager()
    yield manager
    assert_nothing_leaks(manager)


# Geometry


@pytest.mark.parametrize(
    "field", ["num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim"]
)
@pytest.mark.parametrize("storage", [True, False])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "{field} must be at least 1, but it is 0"),
        (-3, "a dimension must be at least 1 and fit 64 bits, but it is -3"),
        (2**64, f"a dimension must be at least 1 and fit 64 bits, but it is {2**64}"),
        (
            10**5000,
            "a dimension must be at least 1 and fit 64 bits, but it is a number of thousands",
        ),
    ],
    ids=["zero", "negative", "too large", "endless"],
)
def test_impossible_dimensions_are_refused(field, storage, given, message):
    with pytest.raises(InvalidConfigError) as caught:
        new_manager(**{"num_blocks": 1, field: given, "storage": storage})
    assert str(caught.value).startswith(message.format(field=field))


@pytest.mark.parametrize("bad", ["4", 4.0, None, [4]])
def test_dimensions_that_are_no_integers_are_refused(bad):
    with pytest.raises(TypeError):
        kvspan.KvCacheManager(bad)
    if bad is not None:
        with pytest.raises(TypeError):
            new_manager(block_size=bad)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ({"num_blocks": 2**32}, OutOfMemoryError, r"cannot allocate \d+ bytes"),
        (
            {"num_blocks": 2**20, "head_dim": 2**40},
            InvalidConfigError,
            "the size of the blocks overflows: 2 x 1048576 blocks x 4 tokens x 2 layers x",
        ),
        ({"head_dim": 2**63}, InvalidConfigError, "the size of the blocks overflows"),
        ({"num_layers": 2**64 - 1}, InvalidConfigError, "x 18446744073709551615 layers x"),
        (
            {"num_blocks": 2**32, "storage": False},
            InvalidConfigError,
            "num_blocks is 4294967296, but",
        ),
        ({"num_blocks": 2**64 - 1, "storage": False}, InvalidConfigError, "num_blocks is 184467"),
        (
            {"block_size": 2**32, "storage": False},
            InvalidConfigError,
            "block_size is 4294967296, but",
        ),
        ({"head_dim": 2**50}, OutOfMemoryError, r"cannot allocate \d+ bytes"),
    ],
)
def test_huge_geometry_is_refused(shape, error, message):
    with pytest.raises(error, match=message):
        new_manager(**shape)


@pytest.mark.parametrize("dtype", ["float64", "int4", np.int64, ">f4"])
def test_other_element_types_are_refused(dtype):
    with pytest.raises(InvalidConfigError, match="dtype must be"):
        new_manager(dtype=dtype)


def test_options_of_the_wrong_kind_are_refused():
    for options, message in [
        ({"namespace": 3}, "a str or bytes is wanted, not int"),
        ({"namespace": ["llama"]}, "a str or bytes is wanted, not list"),
        ({"storage": 1}, "'int' object is not an instance of 'bool'"),
        ({"epoch": "1"}, "'str' object cannot be interpreted as an integer"),
        ({"block_siz": 4}, "unexpected keyword argument 'block_siz'"),
    ]:
        with pytest.raises(TypeError, match=message):
            new_manager(**options)
    with pytest.raises(TypeError):
        kvspan.KvCacheManager(4, 16)
    for epoch in [-1, 2**64]:
        with pytest.raises(InvalidInputError, match=f"the epoch must be .*, but it is {epoch}"):
            new_manager(epoch=epoch)


# Tokens

NO_TOKENS = [
    ([1, -1], InvalidInputError, "token 1 is -1, but it must be 0 to 4294967295"),
    ((2**32,), InvalidInputError, "token 0 is 4294967296, but it must be 0 to 4294967295"),
    ([1, 2, -(2**70)], InvalidInputError, f"token 2 is {-(2**70)}, but it must be 0 to 4294967295"),
    (np.array([1, -1]), InvalidInputError, "token 1 is -1, but it must be 0 to 4294967295"),
    (np.array([-5], np.int32), InvalidInputError, "token 0 is -5, but it must be 0 to 4294967295"),
    (np.array([2**32]), InvalidInputError, "token 0 is 4294967296, but it must be 0 to 4294967295"),
    (
        np.array([1.0]),
        InvalidInputError,
        "tokens have dtype float64, but int32, uint32 or int64 is wanted: convert them first, for "
        "example with .astype('int64')",
    ),
    (np.array([1], np.uint64), InvalidInputError, "tokens have dtype uint64, but"),
    (np.array([1], ">i4"), InvalidInputError, "tokens have dtype >i4, but"),
    (np.array([True]), InvalidInputError, "tokens have dtype bool, but"),
    (np.array(["a"]), InvalidInputError, "tokens have dtype <U1, but"),
    (b"abc", InvalidInputError, "tokens have dtype 'B' (a struct format), but"),
    (
        memoryview(b"abcd").cast("f"),
        InvalidInputError,
        "tokens have dtype 'f' (a struct format), but",
    ),
    (
        np.ones((1, 3), int),
        InvalidInputError,
        "tokens have 2 axes ([1, 3]), but one is wanted: those of one sequence",
    ),
    (np.array(3), InvalidInputError, "tokens have 0 axes ([]), but one is wanted"),
    (np.int64(3), InvalidInputError, "tokens have 0 axes ([]), but one is wanted"),
    (memoryview(np.array(3)), InvalidInputError, "tokens have 0 axes ([]), but one is wanted"),
    (
        np.arange(6)[::2],
        InvalidInputError,
        "tokens are not C-contiguous: pass np.ascontiguousarray of them",
    ),
    (np.arange(6)[::-1], InvalidInputError, "tokens are not C-contiguous"),
    (["a"], TypeError, "token 0 must be an integer, not str"),
    ([1, 2.0], TypeError, "token 1 must be an integer, not float"),
    ([1, None], TypeError, "token 1 must be an integer, not NoneType"),
    ([[1, 2]], TypeError, "token 0 must be an integer, not list"),
    (
        "abc",
        TypeError,
        "tokens must be an array of int32, uint32 or int64 (NumPy, or any C-contiguous buffer or "
        "DLPack exporter), or a sequence of integers, not str",
    ),
    (3, TypeError, "tokens must be an array of int32, uint32 or int64"),
    (None, TypeError, "tokens must be an array of int32, uint32 or int64"),
    ({1, 2}, TypeError, "tokens must be an array of int32, uint32 or int64"),
    ({1: 2}, TypeError, "tokens must be an array of int32, uint32 or int64"),
    (iter([1]), TypeError, "tokens must be an array of int32, uint32 or int64"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), NO_TOKENS)
def test_what_is_no_token_is_refused(manager, tokens, error, message):
    handle = start(manager, PROMPT)
    stats = manager.stats()
    for call in [
        lambda: manager.allocate(tokens, "taken"),
        lambda: manager.probe(tokens),
        lambda: manager.commit(handle, tokens),
    ]:
        assert str(refused(manager, error, call)).startswith(message)
    assert manager.stats() == stats
    # Nor is the name taken.
    manager.allocate(PROMPT, "taken")


def test_misaligned_tokens_are_refused(manager):
    shifted = np.zeros(17, np.uint8)[1:].view(np.int64)
    error = refused(manager, InvalidInputError, manager.probe, shifted)
    assert str(error) == "tokens are not aligned: pass a copy"


class Token:
    def __index__(self):
        raise ZeroDivisionError("my own")


class Emptying:
    def __init__(self, tokens):
        self.tokens = tokens

    def __index__(self):
        self.tokens.clear()
        return 7


class Backwards(list):
    def __iter__(self):
        return reversed(self)


class Exporter:
    def __dlpack__(self, **_):
        raise RuntimeError("on another device")

    def __dlpack_device__(self):
        return (2, 0)


# There is memory for the tokens, of which the system gives no page before they are read, but not for a
# copy.
NO_MEMORY_FOR_TOKENS = """
import resource, numpy as np, kvspan
manager = kvspan.KvCacheManager(8, storage=False)
given = [np.zeros(2**28, dtype) for dtype in (np.int32, np.uint32, np.int64)]
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
for tokens in given:
    try:
        manager.probe(tokens)
    except kvspan.errors.OutOfMemoryError as error:
        print(error)
"""


def test_tokens_that_there_is_no_memory_for_are_refused():
    pytest.importorskip("resource", reason="this system has no resource limits")
    assert run_python(NO_MEMORY_FOR_TOKENS) == "cannot allocate 1073741824 bytes\n" * 3


def test_what_an_object_raises_is_not_hidden(manager):
    refused(manager, ZeroDivisionError, manager.allocate, [1, Token()])
    error = refused(manager, InvalidInputError, manager.allocate, Exporter())
    assert str(error).startswith("tokens can not be read as integers in host memory: ")
    assert error.__cause__ is not None


def test_a_list_that_gets_shorter_while_it_is_read_has_what_was_read(manager):
    tokens = [1, 2, 3]
    tokens[1] = Emptying(tokens)
    assert manager.allocate(tokens).tokens.tolist() == [1, 7]


def test_a_list_that_is_iterated_in_its_own_way_is_read_in_that_way(manager):
    assert manager.allocate(Backwards([1, 2, 3])).tokens.tolist() == [3, 2, 1]


def test_other_tokens_than_those_allocated_can_not_be_committed(manager):
    handle = manager.allocate(PROMPT)
    error = refused(manager, TokenMismatchError, manager.commit, handle, [*PROMPT[:3], 99])
    assert (error.token, str(error)) == (
        3,
        "the token at position 3 is not the one that the sequence was allocated with",
    )
    assert handle.num_committed_tokens == 0
    error = refused(manager, OutOfRangeError, manager.commit, handle, [*PROMPT, 1])
    assert (error.start, error.end, error.len) == (0, 7, 6)
    assert str(error) == (
        "tokens 0..7 can not be committed: the sequence has 6; make room with extend first"
    )


# What else a sequence is


def test_salts_that_are_not_text_are_refused(manager):
    for name in ["cache_salt", "lora_id", "request_id"]:
        for bad in [b"salt", 3, ["salt"], True]:
            error = refused(manager, TypeError, manager.allocate, PROMPT, **{name: bad})
            assert str(error) == f"{name} must be str or None, not {type(bad).__name__}" + (
                ": pass str(id)" if name == "lora_id" and isinstance(bad, int) else ""
            )
        refused(manager, UnicodeEncodeError, manager.allocate, PROMPT, **{name: "\udc80"})
    refused(manager, TypeError, manager.free_request, 3)


def test_the_number_of_an_adapter_is_to_be_made_text(manager):
    for call in [manager.allocate, manager.probe, manager.block_keys]:
        error = refused(manager, TypeError, call, PROMPT, lora_id=3)
        assert str(error) == "lora_id must be str or None, not int: pass str(id)"
        error = refused(manager, TypeError, call, PROMPT, cache_salt=3)
        assert str(error) == "cache_salt must be str or None, not int"
    error = refused(manager, TypeError, manager.allocate_many, [PROMPT, PROMPT], lora_ids=["a", 3])
    assert str(error) == "lora_ids must be str or None, but entry 1 is int: pass str(id)"
    error = refused(manager, TypeError, manager.allocate_many, [PROMPT], cache_salts=[b"a"])
    assert str(error) == "cache_salts must be str or None, but entry 0 is bytes"


def test_a_salt_can_be_long(manager):
    salt = "s" * 10_000_000
    start(manager, PROMPT, cache_salt=salt)
    assert manager.probe(PROMPT, cache_salt=salt) == 4
    assert manager.probe(PROMPT, cache_salt=salt[:-1]) == 0


EXTRA_KEYS = [
    (
        [(1, ["a"]), (0, ["b"])],
        InvalidInputError,
        "the extra keys of block 0 are given out of order: after those of block 1, but they must "
        "come in ascending order",
    ),
    ([(0, ["a"]), (0, ["b"])], InvalidInputError, "the extra keys of block 0 are given twice"),
    (
        [(-1, ["a"])],
        InvalidInputError,
        "the block index of extra keys is -1, but it must be 0 or more",
    ),
    (
        {-1: ["a"]},
        InvalidInputError,
        "the block index of extra keys is -1, but it must be 0 or more",
    ),
    (
        {2**64: ["a"]},
        InvalidInputError,
        f"the block index of extra keys is {2**64}, but it must be 0 or more, and fit 64 bits",
    ),
    ([("0", ["a"])], TypeError, "'str' object cannot be interpreted as an integer"),
    (
        [(0, "key")],
        TypeError,
        "the extra keys of block 0 must be a list of str or bytes, not one str",
    ),
    (
        [(0, b"key")],
        TypeError,
        "the extra keys of block 0 must be a list of str or bytes, not one bytes",
    ),
    ([(0, [3])], TypeError, "the extra keys of block 0 must be str or bytes, not int"),
    ([(0, 3)], TypeError, "'int' object is not iterable"),
    ([3], TypeError, "extra keys are pairs of a block index and a list of its keys, not int"),
    ([(0,)], TypeError, "extra keys are pairs of a block index and a list of its keys, not tuple"),
    (["ab"], TypeError, "'str' object cannot be interpreted as an integer"),
    (3, TypeError, "'int' object is not iterable"),
]


@pytest.mark.parametrize(("extra_keys", "error", "message"), EXTRA_KEYS)
def test_extra_keys_that_make_no_sense_are_refused(manager, extra_keys, error, message):
    for call in [manager.allocate, manager.probe]:
        assert str(refused(manager, error, call, PROMPT, extra_keys=extra_keys)).startswith(message)


def test_a_live_name_can_not_be_taken_again(manager):
    handle = start(manager, PROMPT, "chat")
    for call in [
        lambda: manager.allocate([1], "chat"),
        lambda: manager.fork(handle, "chat"),
        lambda: manager.fork(handle, request_id="chat"),
    ]:
        error = refused(manager, RequestExistsError, call)
        assert str(error) == 'there is a live request "chat" already'
    manager.free_request("chat")
    for name in ["chat", "never", ""]:
        error = refused(manager, UnknownRequestError, manager.free_request, name)
        assert (error.request_id, str(error)) == (name, f'there is no live request "{name}"')


# Handles

USES = {
    "extend": lambda manager, handle: manager.extend(handle),
    "extend by nothing": lambda manager, handle: manager.extend(handle, 0),
    "truncate": lambda manager, handle: manager.truncate(handle, 1),
    "fork": lambda manager, handle: manager.fork(handle),
    "free": lambda manager, handle: manager.free(handle),
    "write": lambda manager, handle: manager.write(handle, 0, 0, *rows_of([1])),
    "write_many": lambda manager, handle: manager.write_many(0, [handle], [0], *rows_of([1])),
    "prepare_write": lambda manager, handle: manager.prepare_write(handle, 0, 1),
    "view": lambda manager, handle: manager.view(handle, 0),
    "read_range": lambda manager, handle: manager.read_range(handle, 0),
    "read_range_into": lambda manager, handle: manager.read_range_into(
        handle, 0, 0, 1, *rows_of([1])
    ),
    "commit": lambda manager, handle: manager.commit(handle, PROMPT[:1]),
    "extend_many": lambda manager, handle: manager.extend_many([handle]),
    "commit_many": lambda manager, handle: manager.commit_many([handle], [[]]),
    "free_many": lambda manager, handle: manager.free_many([handle]),
    "block_tables": lambda manager, handle: manager.block_tables([handle]),
    "slot_mappings": lambda manager, handle: manager.slot_mappings([handle], 0),
    "num_cached_tokens": lambda manager, handle: manager.num_cached_tokens([handle]),
}
each_use = pytest.mark.parametrize("use", USES)


def test_every_call_that_takes_a_handle_is_used():
    takes = set()
    for name in dir(kvspan.KvCacheManager):
        signature = getattr(getattr(kvspan.KvCacheManager, name), "__text_signature__", None) or ""
        if not name.startswith("_") and "handle" in signature:
            takes.add(name)
    assert takes == {name.split()[0] for name in USES}


@each_use
def test_a_freed_handle_is_refused(manager, use):
    handle = start(manager, PROMPT, "chat")
    manager.free_request("chat")
    error = refused(manager, StaleHandleError, USES[use], manager, handle)
    assert (error.cache_id, str(error)) == (
        handle.cache_id,
        f"the handle {handle.cache_id} is stale: its sequence was freed",
    )


@each_use
def test_a_handle_of_another_manager_is_refused(manager, use):
    other = new_manager()
    handle = start(other, PROMPT)
    with pytest.raises(ForeignHandleError) as caught:
        refused(other, ForeignHandleError, USES[use], manager, handle)
        USES[use](manager, handle)
    assert str(caught.value) == f"the handle {handle.cache_id} belongs to another manager"
    assert_holds(other, handle, PROMPT)


@each_use
@pytest.mark.parametrize("bad", [None, 3, "paged-1", kvspan.BlockTable(4), kvspan.LayerKvCache()])
def test_what_is_no_handle_is_refused(manager, use, bad):
    error = refused(manager, TypeError, USES[use], manager, bad)
    assert str(error) == (
        "a PagedKvCacheHandle is wanted, which KvCacheManager.allocate and fork make, not "
        f"{type(bad).__name__}"
    )


def test_doubled_handles_are_refused(manager):
    one, other = start(manager, PROMPT), start(manager, PROMPT)
    handles = [one, other, one]
    error = refused(
        manager, InvalidInputError, manager.write_many, 0, handles, [0] * 3, *rows_of([1] * 3)
    )
    assert str(error) == f"the handle {one.cache_id} is given twice, at 0 and at 2"
    for handle in [one, other]:
        assert_holds(manager, handle, PROMPT)


def test_one_bad_handle_of_many_refuses_all(manager):
    one, freed, rows = start(manager, PROMPT), start(manager, PROMPT), rows_of([7, 8])
    manager.free(freed)
    refused(manager, StaleHandleError, manager.write_many, 0, [one, freed], [0, 0], *rows)
    foreign = start(new_manager(), PROMPT)
    refused(manager, ForeignHandleError, manager.write_many, 0, [one, foreign], [0, 0], *rows)
    error = refused(manager, TypeError, manager.write_many, 0, [one, None], [0, 0], *rows)
    assert "in entry 1 of the batch" in said(error)
    refused(
        manager, OutOfRangeError, manager.write_many, 0, [one, start(manager, [1])], [0, 1], *rows
    )
    refused(manager, TypeError, manager.write_many, 0, one, [0, 0], *rows)
    assert_holds(manager, one, PROMPT)


def test_counts_of_many_must_agree(manager):
    handles = [start(manager, PROMPT) for _ in range(2)]
    for positions, numbers, message in [
        ([0], [1, 2], "got 1 positions, but there are 2 sequences"),
        ([0, 1, 2], [1, 2], "got 3 positions, but there are 2 sequences"),
        ([0, 1], [1], "got 1 rows, but there are 2 sequences"),
    ]:
        call = manager.write_many
        error = refused(manager, InvalidInputError, call, 0, handles, positions, *rows_of(numbers))
        assert str(error) == message
    keys, values = rows_of([1, 2])
    error = refused(manager, InvalidInputError, call, 0, handles, [0, 1], keys, values[:1])
    assert "elements but values have" in str(error)
    error = refused(manager, OutOfRangeError, call, 0, handles, [0, -1], keys, values)
    assert "-1 is no position" in said(error) and "in entry 1" in said(error)


def test_handles_of_one_sequence_s_memory_that_disagree_are_refused(manager):
    one = manager.allocate([9])
    manager.extend(one, 3)
    other = manager.fork(one)
    manager.commit(one, [9, 7, 7, 7])
    error = refused(manager, WrongBlockStateError, manager.commit, other, [9, 8, 8, 8])
    assert str(error) == "block 1 is committed under another key, but it must be uncommitted"


# Numbers


def test_positions_and_layers_that_are_not_there_are_refused(manager):
    handle, rows = start(manager, PROMPT), rows_of([1, 2])
    one = rows_of([1])
    for call, error, message in [
        (
            lambda: manager.write(handle, 2, 0, *rows),
            LayerOutOfRangeError,
            "there is no layer 2: there are 2",
        ),
        (lambda: manager.write(handle, -1, 0, *rows), LayerOutOfRangeError, "-1 is no layer"),
        (
            lambda: manager.write_many(2, [handle], [0], *one),
            LayerOutOfRangeError,
            "there is no layer 2",
        ),
        (lambda: manager.view(handle, 2**64), LayerOutOfRangeError, f"{2**64} is no layer"),
        (lambda: manager.read_range(handle, 2), LayerOutOfRangeError, "there is no layer 2"),
        (
            lambda: manager.write(handle, 0, 5, *rows),
            OutOfRangeError,
            "the range 5..7 is out of bounds: 6 tokens are stored",
        ),
        (lambda: manager.write(handle, 0, 2**64 - 1, *rows), OutOfRangeError, "the range 1844"),
        (lambda: manager.write(handle, 0, -1, *rows), OutOfRangeError, "-1 is no position"),
        (
            lambda: manager.view(handle, 0, 4, 2),
            OutOfRangeError,
            "the range 4..2 ends before it starts",
        ),
        (lambda: manager.view(handle, 0, 0, 7), OutOfRangeError, "the range 0..7 is out of bounds"),
        (lambda: manager.view(handle, 0, 7), OutOfRangeError, "the range 7..6 ends before"),
        (lambda: manager.read_range(handle, 0, 0, 2**62), OutOfRangeError, "the range 0..4611"),
        (
            lambda: manager.read_range(handle, 0, 5, 3),
            OutOfRangeError,
            "the range 5..3 ends before",
        ),
        (
            lambda: manager.truncate(handle, 7),
            OutOfRangeError,
            "the range 0..7 is out of bounds: 6 tokens are stored",
        ),
        (lambda: manager.truncate(handle, -1), OutOfRangeError, "-1 is no position"),
        (lambda: manager.extend(handle, -1), OutOfRangeError, "-1 is no position or number"),
        (lambda: manager.allocate(PROMPT, lookahead=-1), OutOfRangeError, "-1 is no position"),
        (lambda: manager.extend(handle, 1.0), TypeError, "'float' object cannot be interpreted"),
        (lambda: manager.view(handle, "0"), TypeError, "'str' object cannot be interpreted"),
    ]:
        assert str(refused(manager, error, call)).startswith(message)
    assert_holds(manager, handle, PROMPT)


def test_arrays_of_another_kind_are_refused(manager):
    handle, (keys, values) = start(manager, PROMPT), rows_of([1, 2])
    for bad, message in [
        ((keys.astype(float), values), "keys have dtype float64, but float32 is wanted"),
        ((keys, values.astype(int)), "values have dtype int64, but float32 is wanted"),
        ((keys[:, :, ::-1], values), "keys are not C-contiguous"),
        ((keys[..., :1].copy(), values), "keys have shape (2, 1, 1), but"),
        ((keys[:1], values), f"keys have {HEADS * DIM} elements but values have {2 * HEADS * DIM}"),
    ]:
        error = refused(manager, InvalidInputError, manager.write, handle, 0, 0, *bad)
        assert str(error).startswith(message)
    refused(manager, TypeError, manager.write, handle, 0, 0, None, values)
    refused(manager, TypeError, manager.write, handle, 0, 0, keys.tolist(), values)
    read_into = manager.read_range_into
    error = refused(manager, InvalidInputError, read_into, handle, 0, 0, 3, keys, values)
    assert str(error) == "the buffer for the keys has 4 elements, but 6 are needed"
    values.flags.writeable = False
    error = refused(manager, InvalidInputError, read_into, handle, 0, 0, 2, keys, values)
    assert str(error) == "values_out are read-only, and can not be written to"
    assert_holds(manager, handle, PROMPT)


def test_a_pool_that_is_too_small_says_what_it_has():
    manager = new_manager(3)
    for tokens in [range(13), range(10**5)]:
        error = refused(manager, OutOfBlocksError, manager.allocate, tokens)
        needed = -(-len(tokens) // 4)
        assert (error.needed, error.free, error.evictable, error.pinned) == (needed, 3, 0, 0)
        assert str(error) == (
            f"out of blocks: {needed} needed, but 3 are free and 0 evictable (0 more are only kept "
            "by views)"
        )
    error = refused(manager, OutOfBlocksError, manager.allocate, [1], lookahead=2**64 - 1)
    assert error.free == 3
    handle = start(manager, PROMPT)
    span = manager.view(handle, 0)
    manager.free(handle)
    error = refused(manager, OutOfBlocksError, manager.allocate, range(100, 112))
    assert (error.needed, error.free, error.evictable, error.pinned) == (3, 1, 0, 2)
    del span
    handle = manager.allocate(range(100, 112))
    refused(manager, OutOfBlocksError, manager.extend, handle)
    refused(manager, OutOfBlocksError, manager.extend, handle, 2**64 - 1)
    fork = manager.fork(handle)
    refused(manager, OutOfBlocksError, manager.write, fork, 0, 11, *rows_of([1]))
    many = manager.write_many
    refused(manager, OutOfBlocksError, many, 0, [fork, handle], [11, 11], *rows_of([1, 2]))
    del handle, fork
    assert_nothing_leaks(manager)


def test_without_storage_there_is_no_content():
    manager = new_manager(storage=False)
    handle, rows = start(manager, PROMPT), rows_of([1])
    for call in [
        lambda: manager.write(handle, 0, 0, *rows),
        lambda: manager.write_many(0, [handle], [0], *rows),
        lambda: manager.view(handle, 0),
        lambda: manager.read_range(handle, 0),
        lambda: manager.read_range_into(handle, 0, 0, 1, *rows),
    ]:
        error = refused(manager, NoStorageError, call)
        assert str(error) == "the manager has no storage: it keeps count of blocks alone"


def test_without_storage_a_token_can_be_larger_than_any_array():
    manager = new_manager(storage=False, num_kv_heads=2**63, head_dim=2**63)
    handle, rows = start(manager, PROMPT), rows_of([1])
    for call in [
        lambda: manager.write(handle, 0, 0, *rows),
        lambda: manager.write_many(0, [handle], [0], *rows),
        lambda: manager.read_range_into(handle, 0, 0, 1, *rows),
    ]:
        error = refused(manager, InvalidInputError, call)
        assert f"have shape (1, {HEADS}, {DIM}), but (tokens, {2**63}, {2**63})" in str(error)


def test_resetting_is_refused_while_blocks_are_in_use(manager):
    handle = start(manager, PROMPT)
    error = refused(manager, BlocksInUseError, manager.reset_prefix_cache)
    message = "the prefix cache can not be reset: 2 blocks are in use, or pinned by views"
    assert (error.in_use, str(error)) == (2, message)
    span = manager.view(handle, 0, 0, 1)
    del handle
    error = refused(manager, BlocksInUseError, manager.reset_prefix_cache)
    assert error.in_use == 1
    del span
    manager.reset_prefix_cache()
