"""Prefix cache: a key is the content and nothing else, and a hit is exactly what was stored."""

import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

from deepinfer.cache.addressing import ending_page
from deepinfer.cache.page_keys import ImageSpan, digest, image_digest, page_key, root_key
from deepinfer.cache.pages import PageManager
from deepinfer.cache.prefix_index import (
    HeldPage,
    PageStore,
    PrefixIndex,
    PrefixMatch,
    SnapshotStore,
    improves,
)
from support.accounting import check_prefix

PAGE = 4


@dataclass
class Rows:
    """Stands for a Snapshot: a position, bytes, and whose rows it holds."""

    position: int
    nbytes: int = 10
    exact: bool = True
    of: tuple = ()
    layers: int = 2

    @property
    def rank(self):
        return self.exact, self.layers


def places(hit) -> list[int]:
    """Positions of the snapshots, highest first."""
    return [s.position for s in hit.snapshots]


def prefix_cache(size=8, budget=100, page=PAGE) -> PrefixIndex:
    return PrefixIndex(page, PageStore(PageManager(size)), SnapshotStore(budget))


def keep(cache, keys, snapshot) -> bool:
    """Store a snapshot as `SnapshotPolicy.keep` does: if it is worth more than what is there."""
    key = keys[ending_page(snapshot.position, cache.page_size)]
    return improves(cache.snapshots, key, snapshot.rank) and cache.snapshots.put(key, snapshot)


def pages_of(cache) -> PageManager:
    return cache.pages.pages


def stored(cache, ids, give=True, exact=True, **more):
    """Keys and pages of a sequence that ran, registered and was given back."""
    keys = cache.keys(ids, **more)
    pages = pages_of(cache).take(-(-len(ids) // cache.page_size))
    cache.register(keys, pages, exact=exact)
    if give:
        pages_of(cache).give(pages)
    return keys, pages


# ------------------------------------------------------------------------------------------ keys

IDS = [5, 6, 7, 8, 9, 10, 11, 12]


def test_equal_prefixes_have_equal_keys_and_only_full_pages_have_one():
    cache = prefix_cache()
    keys = cache.keys(IDS)
    assert [len(cache.keys(IDS[:n])) for n in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert len(set(keys)) == 2 and all(len(k) == 32 for k in keys)
    assert cache.keys(IDS[:7] + [99])[0] == keys[0] and cache.keys(IDS[:7] + [99])[1] != keys[1]
    assert cache.keys([4] + IDS[1:])[1] != keys[1]  # the same tokens behind another page


def test_known_keys_are_taken_over():
    cache = prefix_cache()
    keys = cache.keys(IDS, salt="a")
    assert cache.keys(IDS, salt="a", known=keys[:1]) == keys
    assert cache.keys(IDS, known=keys) == keys
    assert cache.keys(IDS[:4], salt="a", known=keys) == keys[:1]


def test_boundaries_between_ids_are_part_of_the_key():
    parent = root_key()
    keys = [page_key(parent, 0, ids) for ids in ([1, 23], [12, 3], [123], [1, 2, 3], [0, 1, 23])]
    assert len(set(keys)) == 5
    assert digest(("a", b"bc")) != digest(("ab", b"c")) != digest(("a", b"b"), ("c", b""))
    assert digest(("a", b"c")) != digest(("b", b"c"))
    assert page_key(parent, 0, [1 << 40]) != page_key(parent, 0, [(1 << 40) + (1 << 32)])
    assert digest(("a", None)) != digest(("a", b"")) != digest()


def test_salt_adapter_and_model_are_different_things():
    roots = [
        root_key(),
        root_key("a"),
        root_key(salt="a"),
        root_key(salt="b"),
        root_key(salt=""),
        root_key(adapter="a"),
        root_key(salt="a", adapter="a"),
        root_key(salt="aa"),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("other", [{}, dict(salt="b"), dict(adapter="a"), dict(salt="")])
def test_another_salt_or_adapter_shares_nothing(other):
    cache = prefix_cache()
    stored(cache, IDS, salt="a")
    assert cache.lookup(cache.keys(IDS, salt="a"), 8).length == 8
    assert cache.lookup(cache.keys(IDS, **other), 8) == PrefixMatch()


def picture(last: int):
    import torch

    pixels = torch.zeros(3, 70, 70, dtype=torch.uint8)
    pixels[-1, -1, -1] = last
    return pixels


def test_pictures_that_differ_in_the_last_byte_share_only_the_text_before_them():
    cache, ids = prefix_cache(), [5, 6, 7, 8, 4, 4, 4, 4, 9, 9, 9, 9]
    one, two = (ImageSpan(4, 8, image_digest(picture(n))) for n in (0, 1))
    stored(cache, ids, images=[one])
    assert cache.lookup(cache.keys(ids, images=[one]), 12).length == 12
    assert cache.lookup(cache.keys(ids, images=[two]), 12).length == 4
    assert cache.lookup(cache.keys(ids), 12).length == 4


def test_a_picture_elsewhere_or_cut_otherwise_is_another_key():
    a, b = image_digest(picture(0)), image_digest(picture(1))
    parent, ids = root_key(), [4] * 4
    spans = [[], [(0, 2, a)], [(1, 3, a)], [(0, 3, a)], [(2, 4, a)], [(0, 2, a), (2, 4, b)]]
    spans += [[(0, 2, b), (2, 4, a)], [(-2, 2, a)], [(-3, 1, a)]]
    spans += [[(0, 4, bytes(31) + bytes([last]))] for last in (0, 1)]  # every byte counts
    keys = [page_key(parent, 8, ids, [ImageSpan(8 + s, 8 + e, d) for s, e, d in x]) for x in spans]
    assert len(set(keys)) == len(keys)
    pair = [ImageSpan(8, 10, a), ImageSpan(10, 12, b)]
    assert page_key(parent, 8, ids, pair) == page_key(parent, 8, ids, pair[::-1])
    outside = [ImageSpan(4, 8, a), ImageSpan(12, 14, b)]  # neither reaches into the page
    assert page_key(parent, 8, ids, outside) == keys[0]


def test_a_picture_is_its_bytes_shape_and_dtype():
    import torch

    x = torch.arange(6, dtype=torch.uint8)
    same = [x.view(2, 3), x.view(2, 3).clone(), x.view(3, 2).T.contiguous().T.reshape(2, 3)]
    assert len({image_digest(p) for p in same}) == 1
    other = [x, x.view(3, 2), x.view(2, 3).to(torch.int8), x.view(2, 3).float(), x.view(2, 3).T]
    assert len({image_digest(p) for p in [same[0], *other]}) == 6


def test_keys_are_the_same_in_every_process():
    script = (
        "from deepinfer.cache.prefix_index import *; import sys\n"
        "cache = PrefixIndex(4, PageStore(PageManager(2)), SnapshotStore(0), model='m')\n"
        "images = [ImageSpan(2, 6, bytes(range(32)))]\n"
        "keys = cache.keys(range(9), salt='a', adapter='b', images=images)\n"
        "print(b''.join(keys).hex()); assert 'torch' not in sys.modules\n"
    )
    cache = PrefixIndex(4, PageStore(PageManager(2)), SnapshotStore(0), model="m")
    images = [ImageSpan(2, 6, bytes(range(32)))]
    want = b"".join(cache.keys(range(9), salt="a", adapter="b", images=images)).hex()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", script]
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        assert run.stdout.strip() == want, run.stderr


def test_a_key_of_something_else_is_refused():
    with pytest.raises(TypeError, match="token ids are 64-bit integers, found 2.5"):
        page_key(root_key(), 0, [1, 2.5])
    with pytest.raises(TypeError, match="64-bit integers"):
        page_key(root_key(), 0, [1 << 64])
    with pytest.raises(ValueError, match="image digest of 2 bytes: pass all 32"):
        ImageSpan(0, 4, b"ab")
    with pytest.raises(ValueError, match=r"positions 4\.\.3"):
        ImageSpan(4, 4, bytes(32))
    with pytest.raises(ValueError, match="page_size=0"):
        prefix_cache(page=0)


# ---------------------------------------------------------------------------------------- lookup


@pytest.mark.parametrize("length", [3, 4, 7, 8, 9, 12])
def test_a_hit_is_the_full_pages_up_to_the_limit(length):
    cache, ids = prefix_cache(), list(range(20, 20 + length))
    keys, pages = stored(cache, ids)
    assert len(cache.pages) == length // PAGE
    for limit in range(-3, 16):
        hit = cache.lookup(keys, limit)
        full = max(min(limit, length), 0) // PAGE
        assert hit == PrefixMatch(tuple(pages[:full]), full * PAGE)


def test_the_first_unknown_page_ends_a_hit():
    cache = prefix_cache()
    keys, pages = stored(cache, list(range(12)))
    cache.pages.evict(keys[1])
    assert cache.lookup(keys, 12).pages == (pages[0],)


def test_the_snapshot_of_a_hit_is_the_last_one_in_it():
    cache = prefix_cache()
    keys, _ = stored(cache, list(range(16)))
    for position in (4, 12, 16):
        assert keep(cache, keys, Rows(position))
    found = [cache.lookup(keys, limit) for limit in (3, 4, 8, 11, 12, 16)]
    assert [places(hit) for hit in found] == [[], [4], [4], [4], [12, 4], [16, 12, 4]]
    cache.pages.evict(keys[2])  # no pages, no use of the snapshots behind
    assert (cache.lookup(keys, 16).length, places(cache.lookup(keys, 16))) == (8, [4])


def test_a_lookup_uses_no_snapshot():
    """All that lie on its way are told, one of them may be used: `get` says which."""
    cache = prefix_cache(budget=20)
    keys, _ = stored(cache, list(range(12)))
    for position in (4, 8):
        keep(cache, keys, Rows(position))
    assert places(cache.lookup(keys, 12)) == [8, 4]
    keep(cache, keys, Rows(12))
    assert places(cache.lookup(keys, 12)) == [12, 8]
    cache.snapshots.get(keys[1])
    keep(cache, keys, Rows(4))
    assert places(cache.lookup(keys, 12)) == [8, 4]


def test_of_two_snapshots_the_one_with_more_layers_stays_unless_the_other_is_exact():
    cache = prefix_cache()
    keys, _ = stored(cache, list(range(4)))
    for layers, exact, kept in [(2, False, 1), (1, False, 0), (3, False, 1), (2, True, 1)]:
        assert keep(cache, keys, Rows(4, exact=exact, layers=layers)) == bool(kept)
    assert not keep(cache, keys, Rows(4, exact=False, layers=9))
    assert keep(cache, keys, Rows(4, layers=3))
    (left,) = cache.lookup(keys, 4).snapshots
    assert (left.exact, left.layers) == (True, 3)


def test_pages_and_snapshots_are_evicted_apart():
    cache = prefix_cache(budget=20)
    keys, _ = stored(cache, list(range(12)))
    for position in (4, 8, 12):  # 10 bytes each: the first has to go
        assert keep(cache, keys, Rows(position))
        check_prefix(cache)
    assert (cache.lookup(keys, 12).length, places(cache.lookup(keys, 7))) == (12, [])
    pages_of(cache).take(8)
    assert cache.lookup(keys, 12) == PrefixMatch() and len(cache.snapshots) == 2


def test_snapshots_go_least_recently_used_first_within_their_bytes():
    store = SnapshotStore(30)
    for name in (b"a", b"b", b"c"):
        assert store.put(name, Rows(4))
    store.get(b"a")
    assert store.put(b"d", Rows(4, nbytes=20))
    there = [store.get(k) is not None for k in (b"a", b"b", b"c", b"d")]
    assert there == [True, False, False, True]
    assert store.nbytes == 30
    assert not store.put(b"e", Rows(4, nbytes=31)) and store.nbytes == 30  # larger than all
    assert store.put(b"a", Rows(4, nbytes=5)) and store.nbytes == 25  # in place of the old one
    store.evict(b"none")
    assert not SnapshotStore(0).put(b"a", Rows(4))
    with pytest.raises(ValueError, match="budget of -1 bytes"):
        SnapshotStore(-1)


# ------------------------------------------------------------------------------------- exactness


def test_an_exact_request_is_never_served_what_is_not():
    cache, ids = prefix_cache(), list(range(12))
    keys, pages = stored(cache, ids[:4])
    stored(cache, ids, exact=False)
    keep(cache, keys, Rows(4))
    keep(cache, cache.keys(ids), Rows(8, exact=False))
    keys = cache.keys(ids)
    hit = cache.lookup(keys, 12)
    assert (hit.pages, places(hit), hit.exact) == ((pages[0],), [4], True)
    hit = cache.lookup(keys, 12, exact=False)
    assert (hit.length, places(hit), hit.exact) == (12, [8, 4], False)
    assert cache.lookup(keys, 4, exact=False).exact


def test_an_inexact_snapshot_is_passed_over_for_an_exact_one_below_it():
    cache = prefix_cache()
    keys, _ = stored(cache, list(range(12)))
    keep(cache, keys, Rows(4))
    keep(cache, keys, Rows(8, exact=False))
    assert places(cache.lookup(keys, 12)) == [4]
    hit = cache.lookup(keys, 12, exact=False)
    assert [(s.position, s.exact) for s in hit.snapshots] == [(8, False), (4, True)] and hit.exact


def test_what_is_exact_replaces_what_is_not_and_is_never_replaced():
    cache, ids = prefix_cache(), list(range(4))
    keys, rough = stored(cache, ids, exact=False)
    keep(cache, keys, Rows(4, exact=False))
    _, fine = stored(cache, ids)
    keep(cache, keys, Rows(4))
    assert rough != fine and cache.lookup(keys, 4)[0] == tuple(fine)
    assert pages_of(cache).cached == 1  # the page that was replaced is free
    stored(cache, ids, exact=False)
    assert not keep(cache, keys, Rows(4, exact=False))
    hit = cache.lookup(keys, 4)
    assert (hit.pages, places(hit), hit.exact) == (tuple(fine), [4], True)
    assert hit.snapshots[0].exact
    check_prefix(cache)


def test_a_page_that_is_not_exact_does_not_become_so():
    cache = prefix_cache()
    keys, pages = stored(cache, list(range(4)), give=False, exact=False)
    assert cache.register(keys, pages) == 0
    assert cache.lookup(keys, 4) == PrefixMatch()


# --------------------------------------------------------------------------------------- eviction


def test_a_reused_page_has_lost_its_old_key():
    cache = prefix_cache(size=2)
    old, _ = stored(cache, list(range(8)))
    new, pages = stored(cache, list(range(50, 58)))
    assert cache.lookup(old, 8) == PrefixMatch() and cache.lookup(new, 8).pages == tuple(pages)
    check_prefix(cache)


def test_children_go_before_their_parents():
    cache = prefix_cache(size=4)
    keys, pages = stored(cache, list(range(16)))
    for left in (3, 2, 1, 0):
        pages_of(cache).take(1)
        assert cache.lookup(keys, 16).pages == tuple(pages[:left])


def test_a_page_whose_parent_went_first_is_out_of_reach_until_the_parent_is_back():
    """Two compute the same first page at once: the second holds a copy of its own, so nothing
    holds the registered one while its child is in use."""
    cache = prefix_cache(size=4)
    keys, first = stored(cache, list(range(4)), give=False)
    keys, second = stored(cache, list(range(8)), give=False)
    assert cache.lookup(keys, 8).pages == (first[0], second[1])
    pages_of(cache).give(first)
    pages_of(cache).take(2)  # one free, one reclaimed: the parent
    assert cache.lookup(keys, 8) == PrefixMatch() and cache.pages.get(keys[1])
    cache.register(keys, second)  # the second's copy takes its place
    assert cache.lookup(keys, 8).pages == tuple(second)
    check_prefix(cache)


def test_a_shared_page_is_listed_and_given_back_once_a_holder():
    cache, ids = prefix_cache(size=3), list(range(8))
    keys, pages = stored(cache, ids)
    for _ in range(3):
        pages_of(cache).pin(cache.lookup(keys, 8).pages)
    assert [pages_of(cache).holders(p) for p in pages] == [3, 3]
    for _ in range(3):
        pages_of(cache).give(pages)
    with pytest.raises(RuntimeError, match="given back"):
        pages_of(cache).give(pages)
    check_prefix(cache)


# ------------------------------------------------------------------------------------- wrong uses


def test_registering_what_cannot_be_is_refused():
    cache = prefix_cache()
    keys, pages = stored(cache, list(range(4)), give=False)
    other = cache.keys(list(range(9, 13)))
    with pytest.raises(RuntimeError, match=r"page 1 is registered as \w{8} but holds \w{8}"):
        cache.register(other, pages)
    with pytest.raises(RuntimeError, match="page 2 is kept but is free"):
        cache.register(other, [2])
    with pytest.raises(RuntimeError, match="page 0 is kept but is 0"):
        cache.register(other, [0])
    with pytest.raises(ValueError, match="already tells another store"):
        PageStore(pages_of(cache))
    check_prefix(cache)
    assert cache.register(keys, pages) == 0 and cache.lookup(keys, 4).pages == tuple(pages)


# ----------------------------------------------------------------------------------- another store


class HostSnapshots:
    """Snapshots in host memory behind the ones on the device: what another store takes."""

    def __init__(self, device: SnapshotStore) -> None:
        self.device, self.host = device, {}

    def peek(self, key):
        return self.device.peek(key) or self.host.get(key)

    def get(self, key):
        if (found := self.device.get(key)) is None and key in self.host:
            found = self.host[key].to("cuda")
            self.device.put(key, found)
        return found

    def put(self, key, value):
        self.host[key] = value.to("cpu")
        return self.device.put(key, value) or True

    def evict(self, key):
        self.host.pop(key, None)
        self.device.evict(key)


def test_a_store_of_ones_own_is_four_methods():
    moves = []

    class Moving(Rows):
        def to(self, device):
            moves.append((self.position, device))
            return self

    cache = PrefixIndex(PAGE, PageStore(PageManager(4)), HostSnapshots(SnapshotStore(10)))
    keys, _ = stored(cache, list(range(8)))
    for position in (4, 8):
        keep(cache, keys, Moving(position))
    assert places(cache.lookup(keys, 8)) == [8, 4]
    assert moves == [(4, "cpu"), (8, "cpu")]  # a lookup fetches nothing
    assert cache.snapshots.get(keys[0]).position == 4  # gone from the device, back from the host
    assert moves == [(4, "cpu"), (8, "cpu"), (4, "cuda")]


# ------------------------------------------------------------------------------ random operations


class Walk:
    """Sequences that come, hit, grow, fork and go, over a cache too small for them.

    content: what a used or cached page really holds, written when it is computed: (salt, ids up
    to its end, exact). Every lookup is held against it.
    """

    def __init__(self, seed: int, size: int, budget: int) -> None:
        self.chance = random.Random(seed)
        self.cache = prefix_cache(size, budget)
        self.pages = pages_of(self.cache)
        self.running: list[dict] = []
        self.texts = [self.chance.choices([1, 2], k=40) for _ in range(3)]
        self.content: dict[int, tuple] = {}
        kinds = ["hits", "snapshots", "later", "reclaimed", "replaced", "wrong"]
        self.seen = dict.fromkeys(kinds, 0)

    def keys(self, r) -> list[bytes]:
        r["keys"] = self.cache.keys(r["ids"], salt=r["salt"], known=r["keys"])
        return r["keys"]

    def look(self, keys, salt, ids, limit, exact) -> PrefixMatch:
        hit = self.cache.lookup(keys, limit, exact=exact)
        assert hit.length == len(hit.pages) * PAGE and hit.length <= max(limit, 0)
        assert places(hit) == sorted({p for p in places(hit) if 0 < p <= hit.length}, reverse=True)
        for i, page in enumerate(hit.pages):
            has_salt, has_ids, is_exact = self.content[page]
            assert (has_salt, has_ids) == (salt, tuple(ids[: (i + 1) * PAGE]))
            assert is_exact or not (exact or hit.exact)
        for snapshot in hit.snapshots:
            assert snapshot.of == (salt, tuple(ids[: snapshot.position]))
            assert snapshot.exact or not exact
        full = self.cache.lookup(keys, len(ids), exact=exact)
        assert len(hit.pages) == min(len(full.pages), max(limit, 0) // PAGE)
        return hit

    def compute(self, r, upto: int) -> None:
        """Rows run: pages that are not a hit get their content."""
        for i in range(r["adopted"] // PAGE, upto // PAGE):
            page, now = r["pages"][i], (r["salt"], tuple(r["ids"][: (i + 1) * PAGE]), r["exact"])
            assert self.pages.holders(page) == 1 or self.content.get(page) == now
            self.content[page] = now

    def add(self) -> None:
        n, exact = self.chance.randint(1, 18), self.chance.random() < 0.7
        text = self.chance.choice(self.texts)
        ids, salt = text[:n], self.chance.choice([None, None, None, "a"])
        keys = self.cache.keys(ids, salt=salt)
        hit = self.look(keys, salt, ids, n - self.chance.randint(1, 3), exact)
        new = -(-n // PAGE) - len(hit.pages)
        answer = self.pages.ask(new, hit.pages)
        if answer != "ok":
            self.seen["later"] += 1
            assert self.running or answer == "never"
            return
        self.seen["hits"] += bool(hit.pages)
        self.seen["snapshots"] += bool(hit.snapshots)
        self.pages.pin(hit.pages)
        before = self.pages.cached
        pages = [*hit.pages, *self.pages.take(new)]
        self.seen["reclaimed"] += before > self.pages.cached
        r = dict(ids=ids, salt=salt, keys=keys, pages=pages, adopted=hit.length, text=text)
        r["exact"] = exact and hit.exact
        self.compute(r, n)
        self.running.append(r)

    def grow(self, r) -> None:
        if len(r["ids"]) == len(r["text"]):
            return
        if len(r["ids"]) % PAGE == 0 and len(r["ids"]) // PAGE == len(r["pages"]):
            if self.pages.ask(1) != "ok":
                self.seen["later"] += 1
                return
            r["pages"] += self.pages.take(1)
        elif self.pages.holders(r["pages"][-1]) > 1:
            return  # a fork would have to copy its last page first
        usual = self.chance.random() < 0.9
        r["ids"].append(r["text"][len(r["ids"])] if usual else self.chance.choice([1, 2]))
        self.compute(r, len(r["ids"]))

    def register(self, r) -> None:
        keys = self.keys(r)
        full = self.pages.free
        self.cache.register(keys, r["pages"], exact=r["exact"])
        self.seen["replaced"] += self.pages.free > full
        for page, key in self.cache.pages._keys.items():
            held = self.cache.pages._held[key]
            assert self.content[page][2] or not held.exact

    def snapshot(self, r) -> None:
        keys = self.keys(r)
        if keys:
            at = self.chance.randint(1, len(keys)) * PAGE
            of = (r["salt"], tuple(r["ids"][:at]))
            keep(self.cache, keys, Rows(at, self.chance.randint(1, 12), r["exact"], of))

    def fork(self, r) -> None:
        self.pages.pin(r["pages"])
        self.running.append({**r, "ids": list(r["ids"]), "pages": list(r["pages"])})

    def give(self, r) -> None:
        self.running = [x for x in self.running if x is not r]  # finish, abort or preemption
        self.pages.give(r["pages"])

    def evict(self) -> None:
        store = self.chance.choice([self.cache.pages, self.cache.snapshots])
        if store._held:
            store.evict(self.chance.choice(list(store._held)))

    def wrong(self) -> None:
        """Uses that must raise and change nothing."""
        p, chance = self.pages, self.chance
        some = chance.randint(0, p.size + 1)
        uses = [lambda: p.take(p.available + 1), lambda: p.give([0]), lambda: p.pin([p.size + 1])]
        if not p.holders(some):
            uses += [lambda: p.give([some]), lambda: p.keep(some)]
            uses += [lambda: self.cache.register([bytes(32)], [some])]
        else:
            uses += [lambda: p.give([some, some]), lambda: p.pin([some, some])]
        if some in self.cache.pages._keys:
            uses += [lambda: self.cache.register([bytes(32)], [some])]
        else:
            uses += [lambda: p.forget(some)]
        if some in p._free:
            uses += [lambda: p.pin([some])]
        before = self.state()
        with pytest.raises(RuntimeError):
            chance.choice(uses)()
        assert self.state() == before
        self.seen["wrong"] += 1

    def state(self):
        p, c = self.pages, self.cache
        lists = list(p._free), list(p._cached), dict(p._holders), set(p._known)
        return *lists, dict(c.pages._held), dict(c.pages._keys), list(c.snapshots._held)

    def check(self) -> None:
        check_prefix(self.cache)
        holders: dict[int, int] = {}
        for r in self.running:
            assert len(set(r["pages"])) == len(r["pages"])
            for page in r["pages"]:
                holders[page] = holders.get(page, 0) + 1
        assert holders == self.pages._holders
        for r in self.running:  # nobody's pages were written under it
            for i in range(len(r["ids"]) // PAGE):
                now = (r["salt"], tuple(r["ids"][: (i + 1) * PAGE]))
                assert self.content[r["pages"][i]][:2] == now

    def run(self, operations: int) -> None:
        moves = ["add", "grow", "register", "snapshot", "fork", "give", "evict", "wrong"]
        for _ in range(operations):
            move = self.chance.choices(moves, [30, 25, 25, 10, 2, 32, 2, 10])[0]
            if move in ("add", "evict", "wrong"):
                getattr(self, move)()
            elif self.running:
                getattr(self, move)(self.chance.choice(self.running))
            self.check()
        while self.running:
            self.give(self.running[0])
            self.check()
        assert self.pages.used == 0 and self.pages.available == self.pages.size


def test_ten_thousand_random_operations():
    walk = Walk(seed=1, size=12, budget=40)
    walk.run(10_000)
    assert all(n > 20 for n in walk.seen.values()), walk.seen  # each of them really happened


@pytest.mark.parametrize("size, budget", [(1, 0), (3, 12), (40, 1000)])
def test_random_operations_of_other_sizes(size, budget):
    Walk(seed=size, size=size, budget=budget).run(1500)


def test_a_held_page_is_exact_unless_said():
    assert HeldPage(3) == HeldPage(3, True)


# -------------------------------------------------------------------------------------- interrupts


class At:
    """KeyboardInterrupt before the n-th line that runs in the cache."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("cache/pages.py", "cache/prefix_index.py")):
            return None
        self.left -= event == "line"
        if event == "line" and self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


def moves(cache, held: list[list[int]]) -> None:
    """Registers over an inexact page, evicts, takes what is cached, gives back."""
    pages = pages_of(cache)
    keys = cache.keys([1, 2, 3, 4, 5, 6, 7, 8])
    cache.register(keys, held[0])
    cache.pages.evict(keys[1])
    keep(cache, keys, Rows(8))
    keep(cache, keys, Rows(4, nbytes=95))
    held.append(pages.take(4))
    pages.give(held.pop())


def test_an_interrupt_at_any_line_leaves_tables_that_agree():
    for n in range(1, 400):
        cache = prefix_cache(size=6)
        pages, held = pages_of(cache), []
        stored(cache, [1, 2, 3, 4, 5, 6, 7, 8], exact=False)
        stored(cache, [9, 9, 9, 9])
        held.append(pages.take(2))
        before = sys.gettrace()
        sys.settrace(At(n))
        try:
            moves(cache, held)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        cache.pages.recover()
        cache.snapshots.recover()
        pages.recount(held)
        check_prefix(cache)
        assert pages.used == sum(map(len, held))
        pages.take(pages.available)
        check_prefix(cache)
    assert n > 60
