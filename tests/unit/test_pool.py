"""Pages are in exactly one place, and the prefix cache gives out only what is still there."""

import random

import pytest

from anyrig.core.errors import OutOfMemory
from anyrig.kv.pool import TRASH, PagePool
from anyrig.kv.prefix import extend, page_hash, root_hash


def test_the_trash_page_is_never_handed_out():
    pool = PagePool(5)
    assert TRASH not in pool.allocate(4)
    assert pool.allocate(1) is None


def test_too_many_pages_take_nothing():
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.available == 3


def test_a_pool_without_a_usable_page_is_refused():
    with pytest.raises(OutOfMemory, match="1 pages"):
        PagePool(1)


def test_a_shared_page_is_free_only_when_everybody_gave_it_back():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.publish(page, b"x")
    assert pool.match([b"x"]) == [page]
    pool.release([page])
    assert pool.available == 1
    pool.release([page])
    assert pool.available == 2


def test_released_pages_with_a_name_are_found_again_until_they_are_evicted():
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page, name in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.publish(page, name)
    pool.release(pages)
    # The end of a sequence goes first: its beginning is what others share.
    assert pool.allocate(1) == [pages[2]]
    assert pool.match([b"a", b"b", b"c"]) == pages[:2]


def test_the_longest_known_prefix_ends_at_the_first_unknown_page():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"c")
    assert pool.match([b"a", b"b", b"c"]) == [first]


def test_two_pages_of_one_content_keep_one_name():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.release([second])
    assert pool.match([b"a"]) == [first]


def test_a_forgotten_page_is_no_longer_shared():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.publish(pages[0], b"a")
    pool.forget(pages)
    assert pool.match([b"a"]) == []
    pool.release(pages)
    assert pool.available == 2


def test_page_hashes_depend_on_all_that_comes_before_on_the_model_and_on_the_salt():
    root = root_hash("model")
    hashes: list[bytes] = []
    extend(hashes, root, [1, 2, 3, 4, 5], 2, 5)
    assert len(hashes) == 2
    assert hashes[1] == page_hash(page_hash(root, [1, 2]), [3, 4])
    other: list[bytes] = []
    extend(other, root, [9, 2, 3, 4], 2, 4)
    assert other[1] != hashes[1]
    assert root_hash("model", "tenant") != root != root_hash("other")


def test_random_use_never_loses_or_doubles_a_page():
    rng = random.Random(0)
    pool = PagePool(33)
    held: list[list[int]] = []
    for step in range(5000):
        if rng.random() < 0.5:
            names = [bytes([rng.randrange(20)]) for _ in range(rng.randrange(4))]
            shared = pool.match(names)
            fresh = pool.allocate(rng.randrange(6))
            if fresh is None:
                pool.release(shared)
            else:
                held.append(shared + fresh)
        elif held:
            pages = held.pop(rng.randrange(len(held)))
            for page in pages:
                if rng.random() < 0.3:
                    pool.publish(page, bytes([rng.randrange(20)]))
            pool.release(pages)
        in_use = {page for pages in held for page in pages}
        assert len(in_use) + pool.available == 32, step
    for pages in held:
        pool.release(pages)
    assert pool.available == 32
    assert sorted(pool.allocate(32)) == list(range(1, 33))
