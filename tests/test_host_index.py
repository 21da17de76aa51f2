"""The host's tree in plain Python: what is usable, who leaves first, what stays."""

import itertools
from typing import cast

import jax.numpy as jnp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.host_cache import (
    FileStorage,
    HostCache,
    HostConfig,
    HostIndex,
    MemoryStorage,
    Storage,
    StorageWorker,
    plan_host,
    token_keys,
)
from swa_jax.host_cache.check import check_index, nodes_of
from swa_jax.host_cache.index import Placed
from swa_jax.models import KVPool, get_model
from swa_jax.prefix_cache.match import window_start
from swa_jax.prefix_cache.tree import CacheConfig

_texts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
_flags = st.lists(st.booleans(), max_size=6)
NO_WORK = StorageWorker(cast("Storage", None))


def usable_by_rule(index, keys, space, device_pages, live):
    """The definition: every page's full KV on either side, the last window's SWA on either."""
    path = index.find(keys, space)

    def has_full(page):
        return page < device_pages or (page < len(path) and path[page].full >= 0)

    def has_swa(page):
        on_device = page < device_pages and page < len(live) and live[page]
        return on_device or (page < len(path) and path[page].swa >= 0)

    for pages in range(len(keys), 0, -1):
        window = range(index.config.window_start(pages), pages)
        if all(map(has_full, range(pages))) and all(map(has_swa, window)):
            return pages
    return 0


def test_what_is_usable_is_the_definition_for_every_choice_of_rows() -> None:
    tree, empty, keys = HostIndex(HostConfig(20, 12, 2, 3)), index(), "abcd"
    tree.put(keys[:3], full=range(3), swa=range(3))  # the last page has no node
    path = tree.find(keys)
    empty.config = tree.config
    lives = [(), (True,), (False, True), (True, False, True), (False, True, True, True, True)]
    for full, of_swa, device, live in itertools.product(
        itertools.product([0, -1], repeat=3),
        itertools.product([0, -1], repeat=3),
        range(6),
        lives,
    ):
        for node, *rows in zip(path, full, of_swa, strict=True):
            node.full, node.swa = rows
        got = tree.usable(keys, device_pages=device, device_live=live)
        assert got.pages == usable_by_rule(tree, keys, 0, device, live), (full, of_swa, device)
        assert got.device_pages == usable_by_rule(empty, keys, 0, min(device, 4), live)
        if got.pages == got.device_pages:
            assert (got.full, got.swa) == ((), ())
            continue
        on_device = [page < device and page < len(live) and live[page] for page in range(4)]
        window = range(tree.config.window_start(got.pages), got.pages)
        assert got.full == tuple(range(min(device, got.pages), got.pages))
        assert got.swa == tuple(page for page in window if not on_device[page])


class IndexMachine(RuleBasedStateMachine):
    """Few rows, so that somebody always leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(HostConfig(14, 8, 2, 3))  # 7 and 4 rows; an end needs 2 of SWA
        self.pins = []

    @rule(text=_texts, space=st.integers(0, 1))
    def store(self, text, space) -> None:
        placed = self.index.store(text, space)
        path = self.index.find(text, space)
        assert all(path[page].full == row for page, row in placed.full)
        assert all(path[page].swa == row for page, row in placed.swa)
        if not self.pins:
            assert len(path) == len(text)
            assert self.index.usable(text, space).pages == len(text)

    @rule(text=_texts, which=_flags, side=st.booleans())
    def put_some(self, text, which, side) -> None:
        pages = [page for page, wanted in enumerate(which[: len(text)]) if wanted]
        self.index.put(text, 0, full=pages if side else (), swa=() if side else pages)

    @rule(text=_texts, live=_flags, device=st.integers(0, 6))
    def look(self, text, live, device) -> None:
        got = self.index.usable(text, device_pages=device, device_live=live)
        assert got.pages == usable_by_rule(self.index, text, 0, device, live)
        path = self.index.find(text)
        assert all(path[page].full >= 0 for page in got.full)
        assert all(path[page].swa >= 0 for page in got.swa)

    @rule(text=_texts)
    def touch(self, text) -> None:
        before = [node.hits for node in self.index.find(text)]
        self.index.touch(text)
        assert [node.hits for node in self.index.find(text)] == [hits + 1 for hits in before]

    @rule(text=_texts)
    def pin(self, text) -> None:
        if len(self.pins) < 3:
            pin = self.index.pin(text)
            rows = [(node.full, node.swa) for node in pin.nodes]
            self.pins.append((text, pin, rows))

    @rule(which=st.integers(0, 2))
    def unpin(self, which) -> None:
        if which < len(self.pins):
            _, pin, _ = self.pins.pop(which)
            self.index.unpin(pin)
            self.index.unpin(pin)

    @rule(text=_texts)
    def forget(self, text) -> None:
        self.index.forget(text)

    @invariant()
    def laws(self) -> None:
        check_index(self.index)
        for text, _, rows in self.pins:
            now = [(node.full, node.swa) for node in self.index.find(text)][: len(rows)]
            assert len(now) == len(rows)
            for (full, of_swa), (old_full, old_swa) in zip(now, rows, strict=True):
                assert old_full in (-1, full), "a pinned full row left"
                assert old_swa in (-1, of_swa), "a pinned SWA row left"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def index(full=20, of_swa=12, window=4):
    return HostIndex(HostConfig(full, of_swa, 1, window))


def test_the_window_is_the_devices() -> None:
    for pool in (
        swa.PoolConfig(64, 64, 4, 6),
        swa.PoolConfig(64, 64, 4, 8, chunked=True),
        swa.PoolConfig(64, 64, 4, 9, chunked=True),
        swa.PoolConfig(64, 64, 4),
    ):
        device = CacheConfig(pool, 64, False, "lru", 32)
        host = HostConfig.beside(pool, 64, 64)
        for pages in range(9):
            wanted = int(window_start(device, jnp.int32(pages)))
            assert host.window_start(pages) == wanted


def test_a_long_prefix_takes_a_window_and_a_page_of_swa_rows() -> None:
    tree = index()
    placed = tree.store("abcdefghij")
    assert (len(placed.full), len(placed.swa)) == (10, 5)
    assert tree.usable("abcdefghij").swa == (6, 7, 8, 9)
    assert tree.usable("abcdefghi").swa == (5, 6, 7, 8)  # the same text again (B38)
    assert tree.usable("abcdefgh").pages == 0  # its window is not there


def test_leaves_go_first_and_the_oldest_branch_before_a_younger() -> None:
    tree = index(full=6, of_swa=6, window=1)
    tree.store("abcd")
    tree.store("abxy")
    tree.touch("abcd")
    tree.store("pq")  # two rows: the younger end of abxy goes, its shared part stays
    assert tree.usable("abxy").pages == 0
    assert len(tree.find("abxy")) == 2
    assert tree.usable("abcd").pages == 4


def test_swa_rows_that_no_end_needs_go_first() -> None:
    tree = index(full=20, of_swa=5, window=2)
    tree.store("abc")
    tree.store("abcdef")  # a, b and c are further above every end now
    tree.store("xy")
    assert tree.usable("abcdef").pages == 6
    assert tree.usable("abc").pages == 0
    assert tree.usable("xy").pages == 2


def test_what_is_pinned_takes_nobodys_place_and_gives_none() -> None:
    tree = index(full=4, of_swa=4, window=1)
    tree.store("abcd")
    pin = tree.pin("abcd")
    assert tree.store("xy").full == ()
    assert not list(tree.find("xy"))
    tree.unpin(pin)
    assert len(tree.store("xy").full) == 2


def test_namespaces_share_nothing_and_none_is_left_behind() -> None:
    tree = index()
    tree.store("ab", 1)
    assert tree.find("ab", 2) == []
    assert tree.forget("ab", 1)
    assert tree.forget("a", 1)
    assert list(nodes_of(tree)) == []
    assert not tree._roots
    assert (tree.full_pages, tree.swa_pages) == (0, 0)


def test_keys_are_the_pages_tokens_and_pairs_reach_one_further() -> None:
    assert token_keys([1, 2, 3, 4, 5], 2) == token_keys([1, 2, 3, 4], 2)
    pairs = token_keys([1, 2, 3, 4, 5], 2, is_bigram=True)
    assert len(pairs) == 2
    assert pairs[:1] == token_keys([1, 2, 3], 2, is_bigram=True)
    assert pairs[1:] != token_keys([1, 2, 3, 4, 6], 2, is_bigram=True)[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_tokens": 0}, "full_tokens must be an integer from 1"),
        ({"swa_tokens": 6}, "multiple of page_size=4, got 6; try 4"),
        ({"sliding_window": 0}, "sliding_window must be an integer from 1"),
        ({"sliding_window": None, "chunked": True}, "needs sliding_window"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change, message) -> None:
    sizes = {"full_tokens": 8, "swa_tokens": 8, "page_size": 4, "sliding_window": 6}
    with pytest.raises(ValueError, match=message):
        HostConfig(**{**sizes, **change})


def test_a_pool_without_full_layers_has_no_host_tier() -> None:
    with pytest.raises(ValueError, match="a host tier has nothing"):
        HostConfig.beside(swa.PoolConfig.pure_swa(32, 4, 6), 32, 32)


def test_host_memory_holds_a_window_for_each_typical_prefix() -> None:
    model = get_model("gpt-oss-20b")
    plan = plan_host(model, 8 * 2**30, 64)
    used = plan.full_tokens * model.full_bytes_per_token
    used += plan.swa_tokens * model.swa_bytes_per_token
    assert 0.99 * 8 * 2**30 < used <= 8 * 2**30
    prefixes = plan.full_tokens / 8192
    assert 0.95 < plan.swa_pages / (prefixes * plan.kept_pages) < 1.1
    with pytest.raises(ValueError, match="cannot hold one window"):
        plan_host(model, 1000, 64)
    of_window = -(-model.past_window // 64) * 64
    least = of_window * (model.full_bytes_per_token + model.swa_bytes_per_token)
    assert plan_host(model, least, 64).full_tokens == of_window
    with pytest.raises(ValueError, match=f"need at least {least} bytes"):
        plan_host(model, least - 1, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "write"}, "policy must be one of write_through"),
        ({"memory": "disk"}, "memory must be one of auto"),
        ({"min_hits": 0}, "min_hits must be an integer from 1"),
        ({"storage": MemoryStorage()}, "a storage needs a fingerprint"),
        ({"storage": MemoryStorage(), "fingerprint": "abc"}, "fingerprint must be bytes"),
        ({"storage": object(), "fingerprint": b"a"}, "storage must have the methods of Storage"),
        (
            {"storage": StorageWorker(cast("Storage", None)), "fingerprint": b"a"},
            "must have the methods",
        ),
        ({"pools": KVPool((jnp.zeros((4, 4)),), ())}, r"full layer 0 must be \[5, 4"),
        ({"pools": KVPool((), (jnp.zeros((5, 2)),))}, r"swa layer 0 must be \[5, 4"),
        ({"config": HostConfig(8, 8, 4, 9)}, "the tier must fit the device's pages and window"),
    ],
)
def test_a_tier_that_cannot_work_is_refused(options, message) -> None:
    pool = swa.PoolConfig(16, 16, 4, 6)
    options = {"pools": KVPool((), ()), **options}
    config = options.pop("config", HostConfig.beside(pool, 32, 32))
    with pytest.raises(ValueError, match=message):
        HostCache(config, pc.init(pool), **options)


def test_a_tree_of_another_configuration_is_refused() -> None:
    pool = swa.PoolConfig(16, 16, 4, 6)
    host = HostCache(HostConfig.beside(pool, 32, 32), pc.init(pool), KVPool((), ()))
    other = pc.init(pool, is_bigram=True)
    for call in (host.backup, host.evict):
        with pytest.raises(ValueError, match="the tier was made for a tree of"):
            call(other, swa.init(pool), KVPool((), ()))
    with pytest.raises(ValueError, match="the tier was made for a tree of"):
        host.match(other, swa.init(pool), [1, 2], 2)


def test_a_storage_of_another_model_is_refused(tmp_path) -> None:
    pool = swa.PoolConfig(16, 16, 4, 6)
    config, layers = HostConfig.beside(pool, 32, 32), KVPool((), ())
    with (
        FileStorage(tmp_path, b"a", 10_000) as below,
        pytest.raises(ValueError, match="fingerprint must be the storage's, b'a', got b'b'"),
    ):
        HostCache(config, pc.init(pool), layers, storage=below, fingerprint=b"b")


@pytest.mark.parametrize(
    ("full", "of_swa", "message"),
    [
        ((5, 4), ("float32", 2), r"full layer 0 must be float32\[5, 4, 2\], got float32\[5, 4\]"),
        ((5, 4, 2), ("float16", 2), r"swa layer 0 must be float32.*got float16"),
        ((5, 4, 1), ("float32", 2), "full layer 0 must be"),
        ((3, 4, 2), ("float32", 2), "full layer 0 must be"),
        ((5, 4, 2), None, "pools must have 1 swa layer"),
    ],
)
def test_kv_that_is_not_the_tiers_is_refused_before_anything(full, of_swa, message) -> None:
    pool = swa.PoolConfig(16, 16, 4, 6)
    right = KVPool((jnp.zeros((5, 4, 2)),), (jnp.zeros((5, 4, 2)),))
    swa_layers = () if of_swa is None else (jnp.zeros((5, 4, of_swa[1]), of_swa[0]),)
    other = KVPool((jnp.zeros(full),), swa_layers)
    cache, state = pc.init(pool), swa.init(pool)
    host = HostCache(HostConfig.beside(pool, 32, 32), cache, right)
    host.index.store([b"a"])
    for call in (
        lambda: host.backup(cache, state, other),
        lambda: host.evict(cache, state, other),
        lambda: host.restore(cache, state, other, [1] * 9, 9),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not any(node.pins for node in nodes_of(host.index))


def test_a_namespace_is_a_whole_number_for_a_pin_too() -> None:
    pool = swa.PoolConfig(16, 16, 4, 6)
    host = HostCache(HostConfig.beside(pool, 32, 32), pc.init(pool), KVPool((), ()))
    with pytest.raises(ValueError, match="namespace must hold integers"):
        host.pin([1] * 8, namespace=1.2)  # type: ignore[arg-type]


@pytest.mark.parametrize("pages", [[3], [-1], [1, 0], [0, 0]])
@pytest.mark.parametrize("kind", ["full", "swa"])
def test_pages_that_a_prefix_has_not_are_refused(kind, pages) -> None:
    tree = index()
    tree.store("a")
    with pytest.raises(ValueError, match=f"{kind} must be ascending pages from 0 to 2, got"):
        tree.put("abc", **{kind: pages})
    assert [node.pins for node in nodes_of(tree)] == [0]
    check_index(tree)


def test_rows_that_could_not_be_written_are_taken_back() -> None:
    tree = index()
    tree.store("ab")
    placed = tree.put("abcd", full=[2, 3], swa=[1, 3])
    tree.take_back("abcd", 0, placed)
    assert len(tree.find("abcd")) == 2
    assert (tree.full_pages, tree.swa_pages) == (2, 2)
    tree.take_back("abcd", 0, placed)  # nothing of it is there
    check_index(tree)


def test_only_rows_that_were_given_are_taken_back() -> None:
    tree = index()
    placed = tree.store("ab")
    others = Placed(((0, placed.full[0][1] + 5),), ((1, placed.swa[-1][1] + 5),))
    tree.take_back("ab", 0, others)
    assert (tree.full_pages, tree.swa_pages) == (2, 2)
    check_index(tree)


def test_only_the_end_of_a_path_is_forgotten() -> None:
    tree = index()
    tree.store("ab")
    pin = tree.pin("ab")
    assert not any(map(tree.forget, ("ab", "a", "abc", "x", "")))
    tree.unpin(pin)
    assert not any(map(tree.forget, ("a", "abc", "x", "")))
    assert len(tree.find("ab")) == 2
    assert tree.forget("ab")
    assert (len(tree.find("ab")), tree.full_pages, tree.swa_pages) == (1, 1, 1)
    check_index(tree)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_long_path_hands_its_own_rows_on_to_its_end(pinned) -> None:
    tree = index(20, 4, 2)
    assert tree.config.kept_pages == 3
    tree.store("x")
    pins = [tree.pin("x")]
    tree.put("abcd", full=range(4), swa=[1, 2, 3])
    if pinned:
        pins.append(tree.pin("ab"))
    placed = tree.put("abcdefg", full=range(7), swa=[4, 5, 6])
    assert [page for page, _ in placed.swa] == ([5, 6] if pinned else [4, 5, 6])
    left = [page for page, node in enumerate(tree.find("abcdefg")) if node.swa >= 0]
    assert left == ([1, 5, 6] if pinned else [4, 5, 6])
    check_index(tree)


def test_a_path_does_not_take_rows_from_its_own_last_window() -> None:
    tree = index(20, 3, 2)
    tree.store("x")
    pin = tree.pin("x")
    tree.put("abc", full=range(3), swa=[0, 1])
    assert tree.put("abc", swa=[2]).swa == ()
    tree.unpin(pin)
    assert [page for page, _ in tree.put("abc", swa=[2]).swa] == [2]
    check_index(tree)


def test_a_row_that_no_end_needs_any_more_is_the_first_to_go() -> None:
    tree = index(20, 4, 2)
    tree.put("abcde", full=range(5), swa=[0, 3, 4])
    tree.put("ax", full=[0, 1], swa=[1])
    assert tree.forget("ax")  # the next end below "a" is four pages away now
    tree.put("z", full=[0], swa=[0])
    tree.put("y", full=[0], swa=[0])
    assert [page for page, node in enumerate(tree.find("abcde")) if node.swa >= 0] == [3, 4]
    check_index(tree)
