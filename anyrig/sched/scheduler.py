"""Plans each step: running sequences first, then waiting ones, under one budget of tokens.

There is no prefill phase and no decode phase: every sequence has tokens whose keys and values are not computed yet,
one for a sequence that generates, many for a new prompt, and a step computes some of them (vLLM v1 plans this way).
"""

import heapq
from bisect import insort

from anyrig.core.sequence import Sequence
from anyrig.core.spec import Chunk, StepPlan
from anyrig.kv.pool import PagePool
from anyrig.kv.prefix import extend, root_hash


class Scheduler:
    """Pure bookkeeping: `add`, then `plan` and `advance` in turn, `finish` when a sequence has ended.

    Args:
        pool: pages to hand out; one sequence of the greatest length must fit in it alone.
        page_size: tokens per page.
        max_num_seqs: most sequences that hold pages at once.
        max_batch_tokens: most tokens of one step.
        max_chunk_tokens: most tokens of one sequence in one step.
        prefix_caching: share pages between sequences that start alike.
        model_version: part of every page's hash.
        whole: compute all of a sequence's tokens in one step or none of them (models with a recurrent state); a
            sequence longer than the budget gets a step of its own.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_chunk_tokens: int,
        prefix_caching: bool = True,
        model_version: str = "",
        whole: bool = False,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.max_chunk_tokens = max_chunk_tokens
        self.prefix_caching = prefix_caching
        self.model_version = model_version
        self.whole = whole
        self.running: list[Sequence] = []  # always sorted by `order`: the last one is preempted first
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._planned: list[Sequence] = []
        self.waiting = 0
        self.preemptions = 0

    def add(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.order, seq))
        self.waiting += 1

    def plan(self) -> StepPlan:
        """The next step. Its chunks' pages are already allocated; call `advance` once they are computed."""
        plan = StepPlan()
        self._planned = []
        self._make_room(plan)
        made_room = len(plan.preempted)
        budget = self._plan_running(plan, self.max_batch_tokens)
        if len(plan.preempted) == made_room:  # when pages are short, nobody new comes in
            self._plan_waiting(plan, budget)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The plan was computed: its tokens' keys and values are in the pages, full pages can be shared."""
        for seq, chunk in zip(self._planned, plan.chunks, strict=True):
            seq.computed += chunk.length
            if not self.prefix_caching:
                continue
            extend(seq.hashes, root_hash(self.model_version, seq.salt), seq.tokens, self.page_size, seq.computed)
            for i in range((seq.computed - chunk.length) // self.page_size, seq.computed // self.page_size):
                self.pool.publish(seq.pages[i], seq.hashes[i])

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended or was aborted, wherever it is."""
        if seq.running:
            self.running.remove(seq)
            seq.running = False
        elif not seq.finished:
            self.waiting -= 1  # its entry in the heap is dropped when it comes up
        seq.finished = True
        self.pool.release(seq.pages)
        seq.pages = []

    def _make_room(self, plan: StepPlan) -> None:
        """Preempt running sequences of lower priority while the first waiting one lacks a place or pages."""
        while self._waiting and self.running:
            _, seq = self._waiting[0]
            if seq.finished:
                heapq.heappop(self._waiting)
                continue
            full = len(self.running) >= self.max_num_seqs or self._pages(len(seq.tokens)) > self.pool.available
            if not full or seq.priority >= self.running[-1].priority:
                return
            self._preempt(self.running[-1], plan)

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            length = self._length(seq, budget)
            if length == 0:
                break
            if not self._grow(seq, length, plan):
                break  # it was the last one and gave its own pages up
            budget -= self._schedule(seq, length, plan)
            i += 1
        return budget

    def _grow(self, seq: Sequence, length: int, plan: StepPlan) -> bool:
        """Pages for `length` more tokens, taken from the last of the running ones if need be."""
        need = self._pages(seq.computed + length) - len(seq.pages)
        while (pages := self.pool.allocate(max(0, need))) is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
        seq.pages.extend(pages)
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self.running.remove(seq)
        seq.running = False
        self.pool.release(seq.pages)
        seq.pages = []
        seq.computed = 0
        self.preemptions += 1
        plan.preempted.append(seq.seq_id)
        self.add(seq)

    def _plan_waiting(self, plan: StepPlan, budget: int) -> None:
        held_back = []
        while self._waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            _, seq = self._waiting[0]
            if seq.finished:
                heapq.heappop(self._waiting)
                continue
            if seq.leader is not None and not seq.leader.prompt_computed:
                held_back.append(heapq.heappop(self._waiting))
                continue
            if self._length(seq, budget) == 0 or not self._start(seq):
                break
            heapq.heappop(self._waiting)
            self.waiting -= 1
            length = self._length(seq, budget)
            budget -= self._schedule(seq, length, plan)
        for item in held_back:
            heapq.heappush(self._waiting, item)

    def _start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its pages: shared ones first, then room for all the tokens it has so far.

        Room for all of them, not just for the first chunk: otherwise two long prompts could start together,
        and each take the pages that the other one needs to get done.
        """
        shared: list[int] = []
        if self.prefix_caching and seq.row_from is None:
            # The last token is always computed: its logits are wanted.
            limit = len(seq.tokens) - 1
            extend(seq.hashes, root_hash(self.model_version, seq.salt), seq.tokens, self.page_size, limit)
            shared = self.pool.match(seq.hashes[: limit // self.page_size])
        pages = self.pool.allocate(self._pages(len(seq.tokens)) - len(shared))
        if pages is None:
            self.pool.release(shared)
            return False
        seq.pages = shared + pages
        seq.computed = len(shared) * self.page_size
        if seq.cached is None:
            seq.cached = min(seq.computed, seq.num_prompt)
        seq.running = True
        insort(self.running, seq, key=lambda s: s.order)
        return True

    def _length(self, seq: Sequence, budget: int) -> int:
        """How many of its tokens fit into what is left of the step."""
        left = len(seq.tokens) - seq.computed
        if not self.whole:
            return min(left, self.max_chunk_tokens, budget)
        return left if left <= budget or budget == self.max_batch_tokens else 0

    def _schedule(self, seq: Sequence, length: int, plan: StepPlan) -> int:
        end = seq.computed + length
        last = end == len(seq.tokens)
        rows = 1 if last else 0
        if seq.row_from is not None and seq.row_from < end:
            rows = end - max(seq.computed, seq.row_from)
        chunk = Chunk(
            seq_id=seq.seq_id,
            tokens=seq.tokens[seq.computed : end],
            start=seq.computed,
            block_table=seq.pages,
            rows=rows,
        )
        plan.chunks.append(chunk)
        self._planned.append(seq)
        return length

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
