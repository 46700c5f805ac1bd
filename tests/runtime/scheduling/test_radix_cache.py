"""The tree of cached prefixes, against a plain model of it."""

from __future__ import annotations

from array import array

import pytest

from runtime.errors import InvariantError
from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.radix_cache import PrefixMatch, RadixCache
from runtime.scheduling.radix_tree import Place
from tests.values import present


class Tree:
    """A cache with its allocator, spoken to in tokens."""

    def __init__(self, pages: int = 400, page_size: int = 1, policy: str = "lru") -> None:
        self.allocator = PageAllocator((pages + 1) * page_size, page_size)
        self.cache = RadixCache(self.allocator, policy, node_tokens=2048)
        self.size = page_size

    def insert(self, tokens: list[int], namespace: str = "") -> PrefixMatch:
        """Caches the whole pages of `tokens`; gives duplicates back."""
        whole = len(tokens) // self.size
        pages = self.allocator.allocate_pages(whole)
        key = array("i", tokens[: whole * self.size]).tobytes()
        known, node = self.cache.insert(namespace, key, pages)
        self.allocator.free(pages[: known // self.size])
        return PrefixMatch(whole * self.size, node)

    def pages(self, match: PrefixMatch) -> list[int]:
        return list(self.cache.pages(match.node, 0, match.tokens))

    def match(self, tokens: list[int], namespace: str = "") -> PrefixMatch:
        return self.cache.match(namespace, array("i", tokens).tobytes(), len(tokens))

    def admit(self, tokens: list[int], namespace: str = "") -> PrefixMatch:
        """A request starts from what is cached of `tokens`, and ends."""
        match = self.match(tokens, namespace)
        self.cache.lock(match.node)
        self.cache.count_use(match.node)
        self.cache.unlock(match.node)
        return match

    def match_length(self, tokens: list[int]) -> int:
        """Tokens that `match` would find. Changes nothing."""
        place = Place()
        self.cache.tree.seek(place, "", array("i", tokens).tobytes(), len(tokens))
        return place.tokens

    def check(self) -> None:
        """Counts of pages and locks, from scratch."""
        pages = [page for node in self.cache.tree.nodes() for page in node.pages]
        free = [page for part in self.allocator.free_slices(64) for page in part]
        assert len(set(pages)) == len(pages), "a page in two nodes"
        assert sorted([*pages, *free]) == list(range(1, self.allocator.num_pages))
        unlocked = sum(len(node.pages) for node in self.cache.tree.nodes() if not node.locks)
        assert self.cache.evictable_tokens == unlocked * self.size
        assert self.cache.protected_tokens == (len(pages) - unlocked) * self.size
        for node in self.cache.tree.nodes():
            assert node.locks >= sum(child.locks > 0 for child in node.children.values())


def numbers(count: int, base: int = 0) -> list[int]:
    return [base + i for i in range(count)]


def test_a_lock_holds_the_matched_node_and_all_above_it() -> None:
    tree = Tree()
    tree.insert(numbers(32))
    tree.insert(numbers(64))
    match = tree.match(numbers(64))
    assert match.tokens == 64
    tree.cache.lock(match.node)
    assert tree.cache.evict(1000) == 0
    tree.check()
    tree.cache.unlock(match.node)
    assert tree.cache.evict(1000) == 64
    tree.check()


def test_an_unlock_too_many_is_found() -> None:
    tree = Tree()
    match = tree.insert(numbers(4))
    with pytest.raises(InvariantError, match="holds no lock"):
        tree.cache.unlock(match.node)


def test_keys_that_part_inside_a_page_share_no_page() -> None:
    tree = Tree(page_size=32)
    tree.insert([*numbers(36), *numbers(4, 1000)])
    tree.insert([*numbers(36), *numbers(28, 2000)])
    tree.check()
    assert tree.cache.evictable_tokens == 64, "one page of each holds tokens of the other"
    assert tree.match([*numbers(36), *numbers(28, 2000)]).tokens == 64


def test_a_match_that_ends_inside_a_node_is_locked_by_itself() -> None:
    tree = Tree()
    tree.insert(numbers(100))
    match = tree.match(numbers(40))
    tree.cache.lock(match.node)
    tree.insert([*numbers(70), *numbers(20, 1000)])
    tree.check()
    assert tree.cache.protected_tokens == 40
    tree.cache.unlock(match.node)
    tree.check()
    assert tree.cache.protected_tokens == 0
    assert tree.cache.evict(1000) == 120


def test_a_split_keeps_the_locks_on_both_parts() -> None:
    tree = Tree()
    match = tree.insert(numbers(100))
    tree.cache.lock(match.node)
    tree.insert([*numbers(30), 7777])
    tree.check()
    assert tree.cache.protected_tokens == 100
    tree.cache.unlock(match.node)
    tree.check()
    assert tree.cache.protected_tokens == 0


def test_insertion_tells_which_pages_are_duplicates() -> None:
    tree = Tree(page_size=4)
    first = tree.pages(tree.insert(numbers(16)))
    pages = tree.allocator.allocate_pages(6)
    key = array("i", numbers(24)).tobytes()
    known, node = tree.cache.insert("", key, pages)
    assert known == 16
    assert list(tree.cache.pages(node, 0, 24)) == [*first, *pages[4:]]
    assert tree.cache.pages(node, 12, 20) == array("i", [first[3], pages[4]])


def test_only_whole_pages_match_and_never_beyond_the_limit() -> None:
    tree = Tree(page_size=16)
    tree.insert(numbers(64))
    key = array("i", numbers(64)).tobytes()
    assert tree.cache.match("", key, 63).tokens == 48
    assert tree.cache.match("", key, 15).tokens == 0
    assert tree.cache.match("", key, -1).node is None
    assert tree.match([*numbers(33), *numbers(31, 500)]).tokens == 32


def test_looking_up_a_length_changes_nothing() -> None:
    tree = Tree()
    tree.insert(numbers(100))
    before = [(node.key, node.last_used) for node in tree.cache.tree.nodes()]
    assert tree.match_length(numbers(40)) == 40
    assert [(node.key, node.last_used) for node in tree.cache.tree.nodes()] == before


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    tree = Tree()
    tree.insert(numbers(10), "alice")
    assert tree.match(numbers(10), "bob").tokens == 0
    assert tree.match(numbers(10), "").tokens == 0
    assert tree.match(numbers(10), "alice").tokens == 10
    tree.cache.evict(1000)
    assert not tree.cache.tree.roots
    tree.check()


@pytest.mark.parametrize(
    ("policy", "survivor"), [("lru", "a"), ("lfu", "b"), ("fifo", "c")], ids=["lru", "lfu", "fifo"]
)
def test_eviction_order(policy: str, survivor: str) -> None:
    tree = Tree(policy=policy)
    prompts = {name: numbers(10, 100 * index) for index, name in enumerate("abc")}
    for name in "abc":
        tree.insert(prompts[name])
    for name in "bbbca":
        tree.admit(prompts[name])
    tree.cache.evict(20)
    assert [name for name in "abc" if tree.match(prompts[name]).tokens] == [survivor]


def test_eviction_takes_no_more_than_is_missing() -> None:
    tree = Tree()
    tree.insert(numbers(100))
    assert tree.cache.evict(3) == 3
    assert tree.match(numbers(100)).tokens == 97
    tree.check()


def test_a_changed_eviction_policy_rules_what_is_cached() -> None:
    tree = Tree()
    tree.insert(numbers(10))
    tree.insert(numbers(10, 100))
    tree.match(numbers(10))
    tree.cache.set_eviction_policy("fifo")
    tree.cache.evict(10)
    assert tree.match(numbers(10)).tokens == 0
    assert tree.match(numbers(10, 100)).tokens == 10


def test_what_is_dropped_goes_with_all_below_it_when_its_last_reader_does() -> None:
    tree = Tree()
    tree.insert(numbers(10))
    reader = tree.insert([*numbers(20), *numbers(10, 500)])
    other = tree.insert(numbers(30))
    tree.cache.lock(reader.node)
    tree.cache.lock(other.node)
    tree.cache.drop(present(other.node), 10)
    assert tree.match(numbers(30)).tokens == 10
    assert present(reader.node).dead, "it hangs below what was dropped"
    assert present(other.node).dead
    free = tree.allocator.free_tokens
    tree.cache.unlock(reader.node)
    assert tree.allocator.free_tokens == free + 10, "the last reader gives the dead pages back"
    tree.cache.unlock(other.node)
    assert tree.allocator.free_tokens == free + 30
    tree.check()


@pytest.mark.parametrize("alone", [True, False], ids=["appended in place", "below"])
@pytest.mark.parametrize("known", [0, 4])
def test_an_insertion_that_is_taken_back_leaves_its_pages_to_whom_they_belong(
    alone: bool, known: int
) -> None:
    """Taken back behind 12 + known tokens, where the caller's own prefix ended behind 12."""
    tree = Tree()
    held = tree.insert(numbers(12))
    tree.cache.lock(held.node)
    tree.cache.count_use(held.node)
    if not alone:
        tree.insert([*numbers(12), *numbers(5, 900)])
    tree.insert(numbers(12 + known))
    pages = tree.allocator.allocate_pages(18)
    key = array("i", numbers(18, 12)).tobytes()
    found, mine = tree.cache.insert("", key, pages, held.node)
    assert found == known
    tree.cache.move_lock(held.node, mine)
    tree.match(numbers(20))  # splits what was inserted
    tree.insert([*numbers(25), *numbers(5, 500)])  # hangs below it
    free = tree.allocator.free_tokens
    above = tree.cache.above(mine, 12)
    assert above is not None
    assert above.end == 12
    tree.cache.move_lock(mine, above)
    tree.cache.take_back(mine, 12 + known)
    assert tree.allocator.free_tokens == free + 5, "but for what was put below"
    assert tree.match(numbers(30)).tokens == 12 + known
    tree.allocator.free(pages)
    tree.cache.unlock(above)
    tree.check()
    assert tree.cache.protected_tokens == 0


def test_what_ends_before_the_last_tokens_of_a_path() -> None:
    tree = Tree()
    upper = tree.insert(numbers(10))
    tree.insert(numbers(5, 100))
    lower = tree.insert([*numbers(10), *numbers(20, 500)])
    assert tree.cache.above(lower.node, 10) is tree.match(numbers(10)).node
    assert tree.cache.above(lower.node, 30) is lower.node
    assert tree.cache.above(lower.node, 0) is None
    split = tree.cache.above(lower.node, 22)
    assert split is not None
    assert (split.start, split.end) == (10, 22)
    assert split is present(lower.node).parent
    assert upper.tokens == 10
    tree.check()


def test_flush_refuses_locked_prefixes() -> None:
    tree = Tree()
    match = tree.insert(numbers(10))
    tree.cache.lock(match.node)
    with pytest.raises(InvariantError, match="10 locked tokens"):
        tree.cache.flush()
    tree.cache.unlock(match.node)
    tree.cache.flush()
    tree.check()
    assert tree.cache.evictable_tokens == 0


def test_what_is_dropped_may_begin_in_the_middle_of_a_node() -> None:
    tree = Tree()
    first = tree.insert(numbers(10))
    last = tree.insert(numbers(30))
    assert last.node is first.node, "one node holds what was inserted in pieces"
    tree.cache.drop(present(last.node), 20)
    assert tree.match(numbers(30)).tokens == 20
    tree.check()


class TestShape:
    def test_a_prompt_in_small_pieces_is_few_nodes(self) -> None:
        tree = Tree(pages=10_000)
        for end in range(10, 5000, 10):
            tree.insert(numbers(end))
        assert [len(node.pages) for node in tree.cache.tree.nodes()] == [2048, 2048, 894]
        tree.check()

    def test_a_leaf_where_another_prefix_ends_does_not_grow(self) -> None:
        tree = Tree()
        reader = tree.insert(numbers(10))
        tree.cache.lock(reader.node)
        tree.insert(numbers(20))
        assert tree.cache.protected_tokens == 10, "the reader's prefix, and no more"
        tree.check()

    def test_a_readers_own_continuation_stays_under_its_lock(self) -> None:
        tree = Tree()
        reader = tree.insert(numbers(10))
        tree.cache.lock(reader.node)
        key = array("i", range(10, 20)).tobytes()
        pages = tree.allocator.allocate_pages(10)
        known, node = tree.cache.insert("", key, pages, below=reader.node)
        assert (known, node) == (0, reader.node)
        assert tree.cache.protected_tokens == 20
        tree.check()

    def test_under_lfu_a_leaf_that_others_used_does_not_grow(self) -> None:
        tree = Tree(policy="lfu")
        for _ in range(3):
            tree.admit(numbers(10)) if tree.match(numbers(10)).tokens else tree.insert(numbers(10))
        tree.insert(numbers(20))
        tree.insert(numbers(5, 100))
        tree.admit(numbers(5, 100))
        tree.cache.evict(10)
        assert tree.match(numbers(20)).tokens == 10, "used twice, what follows never"

    def test_a_branch_that_goes_leaves_one_node_behind(self) -> None:
        tree = Tree()
        tree.insert([*numbers(10), *numbers(5, 100)])
        tree.insert([*numbers(10), *numbers(5, 200)])
        assert len(list(tree.cache.tree.nodes())) == 3
        tree.cache.evict(5)
        assert [len(node.pages) for node in tree.cache.tree.nodes()] == [15]
        assert tree.match([*numbers(10), *numbers(5, 200)]).tokens == 15
        tree.check()

    def test_a_beginning_used_later_than_its_only_branch_outlives_it(self) -> None:
        tree = Tree()
        old, other = [*numbers(10), *numbers(5, 100)], [*numbers(10), *numbers(5, 200)]
        tree.insert(old)
        tree.insert(other)
        tree.insert(numbers(5, 300))
        tree.match(numbers(10))
        tree.cache.evict(5)
        tree.cache.evict(5)
        assert tree.match(other).tokens == 10
        assert tree.match(numbers(5, 300)).tokens == 5

    def test_a_beginning_used_more_often_than_its_only_branch_outlives_it(self) -> None:
        tree = Tree(policy="lfu")
        old, other = [*numbers(10), *numbers(5, 100)], [*numbers(10), *numbers(5, 200)]
        tree.insert(old)
        tree.insert(other)
        tree.insert(numbers(5, 300))
        for _ in range(3):
            tree.admit(numbers(10))
        for prompt in (old, other, numbers(5, 300), numbers(5, 300)):
            tree.admit(prompt)
        tree.cache.evict(5)
        tree.cache.evict(5)
        assert tree.match(other).tokens == 10
        assert tree.match(numbers(5, 300)).tokens == 5

    def test_under_lfu_what_has_begun_others_is_worth_their_uses_when_they_have_gone(self) -> None:
        tree = Tree(policy="lfu")
        often, twice = [*numbers(10), *numbers(5, 100)], [*numbers(10), *numbers(5, 200)]
        for prompt, uses in ((often, 5), (twice, 2)):
            tree.insert(prompt)
            for _ in range(uses):
                tree.admit(prompt)
        tree.cache.evict(5)
        tree.cache.evict(5)
        tree.insert(numbers(5, 300))
        for _ in range(6):
            tree.admit(numbers(5, 300))
        tree.cache.evict(5)
        assert tree.match(numbers(10)).tokens == 10
        assert tree.match(numbers(5, 300)).tokens == 0


class TestPlace:
    """What is remembered of a prompt stays true whatever happens to the tree."""

    def seek(self, tree: Tree, place: Place, tokens: list[int]) -> int:
        tree.cache.tree.seek(place, "", array("i", tokens).tobytes(), len(tokens))
        return place.tokens

    def test_a_second_look_enters_no_node(self) -> None:
        tree = Tree(pages=20_000)
        tree.insert(numbers(9000))
        place = Place()
        assert self.seek(tree, place, numbers(9000)) == 9000
        before = tree.cache.tree.visits
        tree.insert(numbers(8000))
        assert self.seek(tree, place, numbers(9000)) == 9000
        assert tree.cache.tree.visits == before + 4, "the four of the insertion"

    def test_a_walk_cut_short_goes_on(self) -> None:
        tree = Tree(pages=9000)
        tree.insert(numbers(9000))
        place, key = Place(), array("i", numbers(9000)).tobytes()
        found = []
        for _ in range(4):
            tree.cache.tree.seek(place, "", key, 9000, 2)
            found.append(place.tokens)
        assert found == [4096, 8192, 9000, 9000]

    def test_what_is_new_is_found_and_what_is_gone_is_not(self) -> None:
        tree = Tree()
        place = Place()
        for count, expected in ((10, 10), (30, 30)):
            tree.insert(numbers(count))
            assert self.seek(tree, place, numbers(50)) == expected
        tree.cache.evict(7)
        assert self.seek(tree, place, numbers(50)) == 23
        tree.cache.evict(23)
        assert self.seek(tree, place, numbers(50)) == 0
        tree.insert(numbers(4))
        assert self.seek(tree, place, numbers(50)) == 4

    def test_an_end_that_was_cut_and_grew_again_otherwise_is_noticed(self) -> None:
        tree = Tree()
        place = Place()
        tree.insert(numbers(20))
        assert self.seek(tree, place, numbers(15)) == 15
        tree.cache.evict(10)
        tree.insert([*numbers(10), *numbers(10, 500)])
        tree.match(
            [*numbers(10), *numbers(8, 500)]
        )  # splits, so that the place is in the upper part
        assert self.seek(tree, place, numbers(15)) == 10

    def test_a_node_that_was_cut_is_noticed_after_it_has_become_one_with_another(self) -> None:
        tree = Tree()
        place = Place()
        tree.insert(numbers(10))
        assert self.seek(tree, place, numbers(8)) == 8
        tree.cache.evict(4)
        new = [*numbers(6), *numbers(4, 500)]
        tree.insert(new)
        tree.insert([*new, *numbers(5, 600)])
        tree.insert([*new, *numbers(5, 700)])
        tree.cache.evict(5)
        assert [len(node.pages) for node in tree.cache.tree.nodes()] == [15]
        assert self.seek(tree, place, numbers(8)) == 6

    def test_a_flush_is_noticed(self) -> None:
        tree = Tree()
        place = Place()
        tree.insert(numbers(10))
        assert self.seek(tree, place, numbers(10)) == 10
        tree.cache.flush()
        assert self.seek(tree, place, numbers(10)) == 0
