"""Processes that fork, as web servers and data loaders do: parent and child both go on with the engine they have."""

import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
from anyrig import SamplingParams
from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine

PROMPT = list(range(1000, 1300))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)

def make():
    return Engine("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="256MiB", threads=2))

def run(engine):
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        engine.add_request(name, PROMPT, params)
    done = {}
    while engine.has_unfinished():
        done.update((out.request_id, out.outputs[0].token_ids) for out in engine.step())
    return done["greedy"], done["sampled"]

def fork(work, seconds=60):
    "What `work` returns in a child process; an error when it does not end in time."
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException as error:
            print("in the child:", repr(error), flush=True)
        finally:
            os._exit(99)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sys.exit("the child hangs")
"""

IDLE = """
engine = make()
expected = run(engine)
same = lambda: 0 if run(engine) == expected else 1
assert fork(same) == 0, "the child has other tokens"
assert run(engine) == expected, "the parent has other tokens after the fork"
assert fork(lambda: fork(same)) == 0, "the child's child has other tokens"
assert fork(same) == 0 and same() == 0
print("done")
"""

BUSY = """
engine, other = make(), make()
expected = run(engine)
assert run(other) == expected
inside, stop, wrong = False, False, []

def keep_stepping():
    global inside
    step = other.runner.run
    def watched(*args):
        global inside
        inside = True
        result = step(*args)
        inside = False
        return result
    other.runner.run = watched
    while not stop:
        if run(other) != expected:
            wrong.append(1)

thread = threading.Thread(target=keep_stepping)
thread.start()

def child():
    if not inside:
        return 3
    return 0 if run(engine) == expected else 1

try:
    forked = 0
    end = time.monotonic() + 120
    while forked < 5 and time.monotonic() < end:
        time.sleep(0.013)
        code = fork(child) if inside else 3
        assert code in (0, 3), f"the child ended with {code}"
        forked += code == 0
        assert run(engine) == expected, "the parent has other tokens after the fork"
    assert forked == 5, f"only {forked} forks were inside a step"
finally:
    stop = True
    thread.join()
assert not wrong, "the thread that was stepping has other tokens"
print("done")
"""


@pytest.mark.parametrize("way", [IDLE, BUSY], ids=["while the engine is idle", "while another thread is inside a step"])
def test_a_forked_child_and_its_parent_both_go_on(way):
    done = subprocess.run([sys.executable, "-c", START + way], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stdout + done.stderr
