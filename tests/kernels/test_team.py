"""The threads of the kernels: teams larger than the machine, callers that share one, processes that fork."""

import os
import signal
import threading
import time

import numpy as np
import pytest

N, K = 130, 321


@pytest.fixture
def make(kernels):
    """A product on a team of so many threads; each call gives it anew, on the team that the process has."""
    w = np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)
    data = np.zeros(kernels.packed_size("float32", N, K), np.uint8)
    kernels.pack("float32", w, data, 0, N)
    return lambda threads: kernels.Linear(data, "float32", N, K, 0, False, threads)


@pytest.fixture
def x():
    return np.random.default_rng(4).standard_normal((9, K)).astype(np.float32)


def run(op, x):
    out = np.empty((len(x), N), np.float32)
    op.run(x, out)
    return out


@pytest.mark.parametrize("threads", [2, 3, 7, 16])
def test_a_team_larger_than_the_work_or_the_machine_computes_the_same(make, x, threads):
    want, op = run(make(1), x), make(threads)
    for _ in range(50):
        assert (run(op, x) == want).all()


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_a_team_of_no_size_is_refused(make, threads):
    with pytest.raises(ValueError, match=f"threads must be .*Given: {threads}"):
        make(threads)


def test_work_that_comes_after_a_pause_finds_the_threads_asleep_and_wakes_them(make, x):
    want, op = run(make(1), x), make(2)
    for pause in (0, 0.0002, 0.0004, 0.002, 0.02) * 4:
        time.sleep(pause)
        assert (run(op, x) == want).all()


def test_callers_in_several_threads_take_turns(make, x):
    want = run(make(1), x)
    wrong = []

    def work():
        op = make(2)  # of its own: only the team is shared
        for _ in range(100):
            if not (run(op, x) == want).all():
                wrong.append(1)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers), "a caller hangs"
    assert not wrong


def in_child(work, seconds=20):
    """Exit code of a child process that runs `work`, or "hangs"."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


@pytest.mark.native_only
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gets_threads_of_its_own(make, x):
    want, op = run(make(1), x), make(2)
    run(op, x)
    for _ in range(3):
        assert in_child(lambda: (run(op, x) == want).all() and (run(make(2), x) == want).all()) == 0
        assert (run(op, x) == want).all()


@pytest.mark.native_only
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_another_thread_computes_does_not_wait_for_it(make, x):
    """That thread does not exist in the child, and what it held there is held by nobody."""
    want, busy, op = run(make(1), x), make(2), make(2)
    many = np.tile(x, (200, 1))
    stop = threading.Event()

    def work():
        while not stop.is_set():
            run(busy, many)

    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(10):
            time.sleep(0.003)
            assert in_child(lambda: (run(op, x) == want).all()) == 0
            assert (run(op, x) == want).all()
    finally:
        stop.set()
        other.join()
