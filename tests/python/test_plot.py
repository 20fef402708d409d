"""What `KvCacheManager.plot` draws, and what a notebook shows of a manager."""

import html.parser
import re
import sys

import numpy as np
import pytest

import kvspan
from kvspan import _plot

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    pyplot.close("all")


@pytest.fixture
def manager():
    return kvspan.KvCacheManager(10, block_size=2, num_kv_heads=1, head_dim=1)


@pytest.fixture
def used(manager):
    """Blocks of all kinds: a manager, and what must live for them to stay as they are."""
    three = manager.allocate([1, 2, 3, 4])
    forks = [manager.fork(three) for _ in range(3)]
    manager.truncate(forks[0], 2)
    manager.truncate(forks[1], 2)
    alone = manager.allocate([5])
    with manager.allocate([6, 7]) as cached:
        manager.commit(cached, [6, 7])
    with manager.allocate([8]) as viewed:
        view = manager.view(viewed, 0)
    return manager, [three, forks, alone, view]


def kinds_drawn(ax):
    """The kind of each cell, by its colour; None where there is no block."""
    [image] = ax.images
    colours = matplotlib.colors.to_rgba_array([kind.colour for kind in _plot.KINDS])
    cells = np.asarray(image.get_array()).reshape(-1, 4)
    return [
        next((kind for kind, colour in enumerate(colours) if np.allclose(cell, colour)), None)
        for cell in cells
    ]


def legend_of(ax):
    texts = (text.get_text() for text in ax.get_legend().get_texts())
    return dict(text.split(": ") for text in texts)


def test_every_block_has_the_colour_of_its_kind(used):
    manager, _ = used
    ax = manager.plot()
    blocks = manager.inspect().blocks
    expected = [_plot.kind_of(block) for block in blocks]
    assert kinds_drawn(ax) == [*expected, None, None]  # 4 columns, 3 rows
    assert legend_of(ax) == {
        "free": "5",
        "cached": "1",
        "held by a view only": "1",
        "in use by one sequence": "1",
        "shared by two": "1",
        "shared by more": "1",
    }


def test_shared_blocks_have_the_number_of_their_sequences(used):
    manager, _ = used
    ax = manager.plot()
    num_columns = ax.images[0].get_array().shape[1]
    numbers = {
        round(text.get_position()[1]) * num_columns + round(text.get_position()[0]): text.get_text()
        for text in ax.texts
    }
    blocks = manager.inspect().blocks
    assert numbers == {
        cell: f"{block.reference_count}"
        for cell, block in enumerate(blocks)
        if block.reference_count > 1
    }
    assert sorted(numbers.values()) == ["2", "4"]


def test_title_says_the_numbers(used):
    manager, _ = used
    title = manager.plot().get_title()
    assert title == (
        "10 blocks of 2 tokens, 5 sequences\n4 in use, 1 cached, 5 free; 0.0% of 8 tokens hit"
    )


def test_the_title_agrees_with_the_picture_though_blocks_are_freed_meanwhile(manager):
    handle = manager.allocate([1, 2, 3])

    class Meanwhile:
        block_size = manager.block_size

        def inspect(self):
            inspection = manager.inspect()
            handle.close()
            return inspection

        def stats(self):
            stats = manager.stats()
            handle.close()
            return stats

    ax = _plot.plot_pool(Meanwhile())
    [in_use] = re.findall(r"(\d+) in use", ax.get_title())
    assert legend_of(ax)["in use by one sequence"] == in_use


def test_rows_are_named_by_their_first_block(manager):
    formatter = manager.plot().yaxis.get_major_formatter()
    assert [formatter(row) for row in range(3)] == ["1", "5", "9"]


def test_axes_that_are_given_are_drawn_on(manager):
    _, axes = pyplot.subplots(1, 2)
    assert manager.plot(axes[1]) is axes[1]
    assert manager.plot(ax=axes[0]) is axes[0]
    assert pyplot.get_fignums() == [1]


def test_a_pool_of_one_block_can_be_drawn():
    assert kinds_drawn(kvspan.KvCacheManager(1, storage=False).plot()) == [_plot.FREE]


def test_cells_of_a_large_pool_have_the_mean_of_their_blocks():
    manager = kvspan.KvCacheManager(1_000_000, block_size=1, storage=False)
    handle = manager.allocate(np.zeros(100, np.uint32))
    ax = manager.plot()
    cells = np.asarray(ax.images[0].get_array())
    assert cells.shape == (64, 64, 4)
    free, in_use = matplotlib.colors.to_rgba_array(
        [_plot.KINDS[_plot.FREE].colour, _plot.KINDS[_plot.IN_USE].colour]
    )
    blocks_per_cell = 245  # 1,000,000 in 4,096 cells
    share = 100 / blocks_per_cell
    np.testing.assert_allclose(cells[0, 0], share * in_use + (1 - share) * free)
    np.testing.assert_allclose(cells[0, 1], free)
    assert legend_of(ax)["in use by one sequence"] == "100"
    assert legend_of(ax)["free"] == "999,900"
    assert ax.get_legend().get_title().get_text() == "blocks, 245 a cell"
    assert not ax.texts
    ax.figure.canvas.draw()
    handle.close()


def test_plot_without_matplotlib_says_what_to_install(manager, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib$"):
        manager.plot()


def test_plot_refuses_what_is_no_axes(manager):
    with pytest.raises(AttributeError, match="imshow"):
        manager.plot("axes")


class Page(html.parser.HTMLParser):
    """Text of a page whose elements are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag != "script"
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_notebook_shows_states_and_numbers(used):
    manager, _ = used
    words = Page(manager._repr_html_()).words
    table = dict(zip(words[1::2], words[2::2]))
    assert words[0] == "KvCacheManager"
    assert table == {
        "blocks": "10 of 2 tokens",
        "in use": "4 (40.0%)",
        "cached": "1 (10.0%)",
        "free": "5 (50.0%)",
        "sequences": "5",
        "hits": "0 of 8 tokens (0.0%)",
        "evictions, copies": "0, 0",
        "storage": f"{manager.nbytes:,} bytes: 1 layer, 1 KV head of 1, float32",
    }
    of_more = kvspan.KvCacheManager(1, num_layers=2, num_kv_heads=3, head_dim=4)
    assert "2 layers, 3 KV heads of 4, float32" in of_more._repr_html_()


def test_notebook_says_that_there_is_no_storage():
    words = Page(kvspan.KvCacheManager(10, storage=False)._repr_html_()).words
    assert words[-1] == "none, bookkeeping alone"
