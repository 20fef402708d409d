"""Recorded scenarios of allocating, decoding and freeing end as recorded, block by block."""

import json

import pytest

import kvspan
from blocks import assert_nothing_leaks
from kvspan.errors import OutOfBlocksError


def tokens(runs):
    """From runs like ``["fill", value, count]`` and ``["range", from, to]``."""
    ids = []
    for kind, a, b in runs:
        assert kind in ("fill", "range")
        ids += [a] * b if kind == "fill" else range(a, b)
    return ids


class Scenario:
    def __init__(self, description):
        self.manager = kvspan.KvCacheManager(
            # The null block is one of theirs, and comes on top of ours.
            description["num_blocks"] - 1,
            block_size=description["block_size"],
            storage=False,
            prefix_caching=description["caching"],
            merge_duplicates=description.get("merge", True),
        )
        self.handles = {}

    def step(self, op):
        {"start": self.start, "append": self.append, "free": self.free, "check": self.check}[
            op["op"]
        ](op)
        self.manager.check_integrity()

    def start(self, op):
        ids = tokens(op["tokens"])
        if op.get("fails"):
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(ids, op["req"], lookahead=op.get("lookahead", 0))
            return
        handle = self.manager.allocate(ids, op["req"], lookahead=op.get("lookahead", 0))
        cached = handle.num_cached_tokens
        self.manager.commit(handle, ids[cached:])
        blocks = handle.block_table.physical_blocks
        num_hits = cached // self.manager.block_size
        self.check_list(op, "hit", blocks[:num_hits])
        self.check_list(op, "new", blocks[num_hits:])
        assert cached == op.get("hit_tokens", cached)
        assert len(blocks) - num_hits == op.get("new_count", len(blocks) - num_hits)
        self.check_hashed(op)
        self.handles[op["req"]] = handle

    def append(self, op):
        handle, ids = self.handles[op["req"]], tokens(op["tokens"])
        before = handle.block_table.num_blocks
        self.manager.extend(handle, len(ids))
        added = handle.block_table.num_blocks - before
        assert added == op.get("new_count", added)
        self.manager.commit(handle, ids)
        last = self.picture(handle.block_table.physical_blocks[-1]).key is not None
        assert last == op.get("last_block_hashed", last)
        self.check_hashed(op)

    def free(self, op):
        self.manager.free(self.handles.pop(op["req"]))

    def check(self, op):
        stats = self.manager.stats()
        available = stats.num_free + stats.num_cached
        assert available == op.get("free", available)
        self.check_list(op, "queue", self.manager.inspect().free_queue)
        for block, count in op.get("ref", {}).items():
            assert self.picture(int(block)).reference_count == count, f"of block {block}"

    def check_hashed(self, op):
        for field, hashed in [("hashed", True), ("unhashed", False)]:
            for block in op.get(field, []):
                assert (self.picture(block).key is not None) == hashed, f"block {block}"

    def check_list(self, op, field, found):
        expected = op.get(field, found)
        assert found == (expected["head"] if isinstance(expected, dict) else expected), field

    def picture(self, block):
        picture = self.manager.inspect().blocks[block - 1]
        assert picture.block == block
        return picture


def test_every_scenario_ends_as_recorded(test_data):
    file = json.loads((test_data / "block_scenarios.json").read_text(encoding="utf-8"))
    assert file["scenarios"]
    for description in file["scenarios"]:
        print(description["id"], description["title"])
        scenario = Scenario(description)
        for op in description["ops"]:
            print(" ", op["op"], op.get("req"))
            scenario.step(op)
        scenario.handles.clear()
        assert_nothing_leaks(scenario.manager)
