"""The pool of pages: reference counts, the free list, and the prefix cache's least-recently-used order.

page 0      1 .. num_pages-1
[trash]     in use (refs > 0)  --release-->  named by a hash: evictable, oldest first
                                             nameless:        free
"""

from collections import OrderedDict
from collections.abc import Sequence

from anyrig.core.errors import OutOfMemory

TRASH = 0  # Padding rows of a step write here; it is never handed out.


class PagePool:
    """Pages `1 .. num_pages - 1`. A page is in exactly one place: in use, evictable, or free.

    Args:
        num_pages: pages in all, the trash page included.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise OutOfMemory(f"a KV cache of {num_pages} pages holds nothing", "give it more `kv_cache_memory`")
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: low pages first, so that little memory is touched
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the pages that running sequences hold, 0 to 1."""
        return 1.0 - self.available / (self.num_pages - 1)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing taken) when there are too few."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._refs[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference of each. The last pages of a sequence become the first to be evicted."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._hash_of:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, name: bytes) -> None:
        """Name a full, computed page, so that others can share it. The first page of a name keeps it."""
        if name not in self._page_of and page not in self._hash_of:
            self._page_of[name] = page
            self._hash_of[page] = name

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known prefix, each with one more reference."""
        pages = []
        for name in hashes:
            page = self._page_of.get(name)
            if page is None:
                break
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1
            pages.append(page)
        return pages

    def exclusive(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages that nobody else holds."""
        return [page for page in pages if self._refs[page] == 1]

    def forget(self, pages: Sequence[int]) -> None:
        """Take the names of these pages away: what they hold must not be shared (it is not finite, say)."""
        for page in pages:
            name = self._hash_of.pop(page, None)
            if name is not None:
                del self._page_of[name]
                if page in self._evictable:
                    del self._evictable[page]
                    self._free.append(page)
