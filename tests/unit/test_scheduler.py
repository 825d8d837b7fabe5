"""Plans as data: who computes what, in which order, with how many pages."""

import random

from anyrig.core.sequence import Sequence
from anyrig.kv.pool import PagePool
from anyrig.sched.scheduler import Scheduler


def scheduler(pages=1000, **options):
    defaults = {"page_size": 4, "max_num_seqs": 8, "max_batch_tokens": 64, "max_chunk_tokens": 16}
    return Scheduler(PagePool(pages + 1), **{**defaults, **options})


def add(s, seq_id, length, start=0, **fields):
    seq = Sequence(seq_id, list(range(start, start + length)), length, **fields)
    s.add(seq)
    return seq


def step(s, *seqs):
    """One step; every sequence whose last token was computed gets a new one. Returns (id, start, length, rows)."""
    by_id = {seq.seq_id: seq for seq in seqs}
    plan = s.plan()
    s.advance(plan)
    for chunk in plan.chunks:
        seq = by_id.get(chunk.seq_id)
        if seq is not None and seq.computed == len(seq.tokens):
            seq.tokens.append(99)
    return [(c.seq_id, c.start, c.length, c.rows) for c in plan.chunks]


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_one_wants_logits():
    s = scheduler()
    seq = add(s, 0, 35)
    assert step(s, seq) == [(0, 0, 16, 0)]
    assert step(s, seq) == [(0, 16, 16, 0)]
    assert step(s, seq) == [(0, 32, 3, 1)]
    assert step(s, seq) == [(0, 35, 1, 1)]


def test_running_sequences_decode_while_a_new_prompt_is_computed():
    s = scheduler()
    a = add(s, 0, 3)
    step(s, a)
    b = add(s, 1, 20, start=500)
    assert step(s, a, b) == [(0, 3, 1, 1), (1, 0, 16, 0)]
    assert step(s, a, b) == [(0, 4, 1, 1), (1, 16, 4, 1)]


def test_the_budget_bounds_the_tokens_of_a_step():
    s = scheduler(max_batch_tokens=20)
    seqs = [add(s, i, 16, start=100 * i) for i in range(3)]
    assert step(s, *seqs) == [(0, 0, 16, 1), (1, 0, 4, 0)]


def test_no_more_sequences_run_than_allowed():
    s = scheduler(max_num_seqs=2)
    seqs = [add(s, i, 4, start=100 * i) for i in range(3)]
    assert [c[0] for c in step(s, *seqs)] == [0, 1]
    s.finish(seqs[0])
    assert [c[0] for c in step(s, *seqs)] == [1, 2]


def test_a_shared_prefix_is_taken_from_the_cache_but_never_the_last_token():
    s = scheduler()
    a = add(s, 0, 8)
    step(s, a)
    b = add(s, 1, 8)
    assert step(s, a, b)[1] == (1, 4, 4, 1)
    assert b.cached == 4
    assert b.pages[0] == a.pages[0] and b.pages[1] != a.pages[1]


def test_sequences_with_another_salt_share_nothing():
    s = scheduler()
    step(s, add(s, 0, 9, salt="one"))
    assert step(s, add(s, 1, 9, salt="two"))[-1] == (1, 0, 9, 1)


def test_generated_tokens_are_shared_too():
    s = scheduler()
    a = add(s, 0, 3)
    for _ in range(6):
        step(s, a)
    b = Sequence(1, [*a.tokens[:8], 7], 9)
    s.add(b)
    assert (1, 8, 1, 1) in step(s, a, b)


def test_prompt_logprobs_want_every_row_and_read_nothing_from_the_cache():
    s = scheduler()
    a = add(s, 0, 20)
    step(s, a), step(s, a)
    s.finish(a)
    b = add(s, 1, 20, row_from=0)
    assert step(s)[-1] == (1, 0, 16, 16)
    b.row_from = 16
    assert step(s)[-1] == (1, 16, 4, 4)


def test_when_pages_run_out_the_youngest_is_preempted_and_computed_again():
    s = scheduler(pages=4, prefix_caching=False)
    a, b = add(s, 0, 8), add(s, 1, 8, start=100)
    step(s, a, b)
    plan = s.plan()
    assert plan.preempted == [1]
    assert [c.seq_id for c in plan.chunks] == [0]
    assert b.pages == [] and b.computed == 0 and s.preemptions == 1
    s.advance(plan)
    s.finish(a)
    assert step(s, b) == [(1, 0, 9, 1)]


def test_a_more_urgent_request_starts_first_and_pushes_out_a_less_urgent_one():
    s = scheduler(pages=4, prefix_caching=False)
    low = add(s, 0, 12, priority=5)
    step(s, low)
    high = add(s, 1, 8, start=100, priority=-1)
    plan = s.plan()
    assert plan.preempted == [0]
    assert [c.seq_id for c in plan.chunks] == [high.seq_id]


def test_equal_priorities_never_push_each_other_out():
    s = scheduler(pages=2, prefix_caching=False)
    a = add(s, 0, 6)
    step(s, a)
    b = add(s, 1, 4, start=100)
    assert [c[0] for c in step(s, a, b)] == [0]


def test_a_follower_waits_until_its_leader_has_computed_the_prompt():
    s = scheduler(max_chunk_tokens=4)
    a = add(s, 0, 9)
    b = add(s, 1, 9, leader=a)
    assert [c[0] for c in step(s, a, b)] == [0]
    assert [c[0] for c in step(s, a, b)] == [0]
    assert [c[0] for c in step(s, a, b)] == [0]
    assert step(s, a, b) == [(0, 9, 1, 1), (1, 8, 1, 1)]


def test_a_follower_of_an_aborted_leader_starts_by_itself():
    s = scheduler()
    a = add(s, 0, 9)
    b = add(s, 1, 9, leader=a)
    s.finish(a)
    assert step(s, a, b) == [(1, 0, 9, 1)]


def test_waiting_counts_those_that_wait():
    s = scheduler(max_num_seqs=1)
    a, b = add(s, 0, 3), add(s, 1, 3, start=50)
    step(s, a)
    assert s.waiting == 1
    s.finish(b)
    assert s.waiting == 0
    s.finish(a)
    assert not s.running and s.waiting == 0


def test_random_traffic_on_a_small_pool_computes_every_token_and_gives_all_pages_back():
    rng = random.Random(1)
    for prefix_caching in (True, False):
        s = scheduler(pages=20, max_num_seqs=5, prefix_caching=prefix_caching)
        alive, wanted = {}, {}
        for number in range(300):
            if rng.random() < 0.4:
                length = rng.randrange(1, 40)
                seq = add(s, number, length, start=rng.choice((0, 0, 1000)), priority=rng.randrange(3))
                alive[number], wanted[number] = seq, length + rng.randrange(1, 20)
            plan = s.plan()
            assert plan.num_tokens <= 64
            for chunk in plan.chunks:
                seq = alive[chunk.seq_id]
                assert chunk.start == seq.computed
                assert chunk.tokens == seq.tokens[chunk.start : chunk.start + chunk.length]
                assert len(chunk.block_table) * 4 >= chunk.start + chunk.length
            used = [p for seq in alive.values() for p in seq.pages]
            if not prefix_caching:
                assert len(used) == len(set(used))
            s.advance(plan)
            for chunk in plan.chunks:
                seq = alive[chunk.seq_id]
                if seq.computed == len(seq.tokens):
                    seq.tokens.append(rng.randrange(100))
                    if len(seq.tokens) >= wanted[chunk.seq_id] or rng.random() < 0.05:
                        s.finish(alive.pop(chunk.seq_id))
        for _ in range(2000):
            if not s.running and not s.waiting:
                break
            plan = s.plan()
            s.advance(plan)
            for chunk in plan.chunks:
                seq = alive[chunk.seq_id]
                if seq.computed == len(seq.tokens):
                    seq.tokens.append(1)
                    if len(seq.tokens) >= wanted[chunk.seq_id]:
                        s.finish(alive.pop(chunk.seq_id))
        assert not alive and s.pool.available == 20


def test_sequences_that_must_be_computed_whole_are_never_cut():
    s = scheduler(whole=True, prefix_caching=False, max_batch_tokens=64, max_chunk_tokens=16)
    seqs = [add(s, i, length, start=1000 * i) for i, length in enumerate((40, 40, 100, 10))]
    assert step(s, *seqs) == [(0, 0, 40, 1)]  # the next one would not fit in the rest of the step
    assert step(s, *seqs) == [(0, 40, 1, 1), (1, 0, 40, 1)]
    s.finish(seqs[0])
    s.finish(seqs[1])
    assert step(s, *seqs) == [(2, 0, 100, 1)]  # longer than the budget: a step of its own
    assert step(s, *seqs) == [(2, 100, 1, 1), (3, 0, 10, 1)]
