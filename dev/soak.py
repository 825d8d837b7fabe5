"""Random soak of the engine: mixed requests, aborts, bursts and pauses, with the promises checked all the while.

    python dev/soak.py --minutes 10 --seed 1
    python dev/soak.py --minutes 10 --sanitize address,undefined    # what `make soak` runs; also: --sanitize thread
    python dev/soak.py --seed 1 --round 7                           # one round again, of the run that failed in it

A run is made of rounds. Each has an engine of its own with few pages, for one kind of weights and one page size, and is
a function of the seed and its number: time only decides how far it goes. In a round, waves of requests are fed,
finished (or aborted), and then, with the engine idle,

- some of the requests run again alone: tokens, text, log-probabilities must be the same (aborted ones: the beginning);
- every page must be free or evictable, and nothing may be left of any request;
- the anonymous memory is sampled. The median of the last quarter of the run may exceed that of the second quarter by
  GROWTH; a quarter goes through all kinds and page sizes once. (Sanitizers have memory of their own: it is not judged
  under them, and the whole run goes through the kinds and sizes once.)

Any violation, error of a request, standstill or hang ends the run with exit code 1 and says how to run the round again.
"""

import argparse
import faulthandler
import gc
import importlib.abc
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyrig import SamplingParams
    from anyrig.core.outputs import RequestOutput

ROOT = Path(__file__).parent.parent
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "float32": {"dtype": "float32"},
}
PAGE_SIZES = (16, 32, 64)
QUARTER = len(KINDS) * len(PAGE_SIZES)  # rounds
LONGEST_PROMPT, MOST_TOKENS = 600, 80
GROWTH = 48 << 20  # bytes
HANG = 300  # seconds in one step or start
TEXT = """the of a to and in that is was for on with he she it they small large river house engine letter winter said
found before after under between seven twelve because however nobody market glass quickly, slowly. Then: 'yes' (no)"""
STOPS = (" the", ".", "\n", " and", "e", "1", "  ")
CHOICES = ("yes", "no", "perhaps", "the first of them", "the second of them")
REGEX = r"[a-z]{3,12} [0-9]{2,6}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "good": {"type": "boolean"},
    },
    "required": ["name", "good"],
}


class Violation(Exception):
    """A promise that was not kept."""


@dataclass
class Totals:
    rounds: int = 0
    requests: int = 0
    tokens: int = 0
    aborts: int = 0
    preemptions: int = 0
    cached: int = 0
    compared: int = 0
    memory: list[tuple[int, int]] = field(default_factory=list)  # round, bytes


@dataclass
class Case:
    """A request, and what became of it."""

    prompt: str | list[int]
    params: "SamplingParams"
    salt: str
    output: "RequestOutput | None" = None
    aborted: bool = False


class Round:
    """One engine and what is done to it.

    Args:
        number: of the round.
        kind: of the weights.
        totals: what is added to.
    """

    def __init__(self, args: argparse.Namespace, number: int, kind: str, page_size: int, totals: Totals) -> None:
        from anyrig.core.config import EngineConfig
        from anyrig.engine.engine import Engine

        self.random = random.Random(f"{args.seed}-{number}")
        self.number, self.totals, self.plain = number, totals, args.plain
        self.scale: float = args.scale
        longest = self.scaled(LONGEST_PROMPT + MOST_TOKENS) + 20
        tokens = longest + 2 * page_size + self.scaled(self.random.randrange(2000))
        config = EngineConfig(
            **KINDS[kind],
            runner="fused",
            page_size=page_size,
            max_model_len=longest,
            kv_cache_memory=tokens * bytes_per_token(args.model, kind),
            max_num_seqs=self.random.choice((3, 24, 24)),
            max_batch_tokens=self.random.choice((None, 64, 300)),
            max_chunk_tokens=self.random.choice((16, 100, 512)),
            threads=args.threads,
            seed=args.seed,
        )
        self.engine = Engine(args.model, config, progress=lambda _: None)
        self.vocab = self.engine.info.vocab_size
        self.prefixes = [self.some_ids(self.scaled(self.random.randrange(20, 300))) for _ in range(3)]
        self.live: dict[str, Case] = {}
        self.ended: list[Case] = []
        self.fed = self.stalls = 0

    def run(self, until: float, end: float) -> None:
        """Waves until `until`; what runs then may take until `end`."""
        while time.monotonic() < until:
            self.wave(until, end)
            self.engine_is_empty()
        self.totals.preemptions += self.engine.stats.preemptions
        self.totals.cached += self.engine.stats.cached_tokens

    def wave(self, until: float, end: float) -> None:
        """Feed some requests, see them through, run some of them again."""
        r = self.random
        left = r.randrange(6, 40)
        while left and time.monotonic() < until:
            way = r.choices(("burst", "steady", "trickle", "pause"), (2, 3, 3, 1))[0]
            if way == "pause":
                self.drain(until)
                time.sleep(r.choice((0, 0.001, 0.02)))  # the threads fall asleep, or are about to
                continue
            for i in range(r.randrange(1, 12)):
                burst = r.randrange(4, 20) if way == "burst" and i == 0 else 0
                count = min(left, burst or int(way == "steady" or r.random() < 0.2))
                for _ in range(count):
                    self.feed()
                left -= count
                self.abort_some(0.03)
                self.step()
                if time.monotonic() > until:
                    break
        if r.random() < 0.85:
            self.drain(end)
        self.abort_some(1.0)
        ended, self.ended = self.ended, []
        for case in r.sample(ended, min(len(ended), r.randrange(2, 6))):
            self.again(case)
            if time.monotonic() > end:
                break

    def drain(self, until: float) -> None:
        while self.live and time.monotonic() < until:
            self.step()

    def feed(self) -> None:
        r = self.random
        case = Case(self.some_prompt(), self.some_params(), r.choice(("", "", "", "a")))
        self.fed += 1
        name = f"{self.number}-{self.fed}"
        self.engine.add_request(
            name,
            case.prompt,
            case.params,
            priority=r.choice((0, 0, 0, 0, -1, 1)),
            stream=r.random() < 0.2,
            cache_salt=case.salt,
        )
        self.live[name] = case
        self.totals.requests += 1

    def step(self) -> None:
        faulthandler.dump_traceback_later(HANG, exit=True)
        steps = self.engine.stats.steps
        for output in self.engine.step():
            if output.finished:
                self.end(self.live.pop(output.request_id), output)
        self.stalls = self.stalls + 1 if self.engine.stats.steps == steps and self.live else 0
        if self.stalls > 3:
            raise Violation(f"{len(self.live)} requests, and nothing is computed")

    def abort_some(self, share: float) -> None:
        for name in [n for n in self.live if self.random.random() < share]:
            case = self.live.pop(name)
            output = self.engine.abort(name)
            if output is None or not output.finished:
                raise Violation(f"request {name} could not be aborted")
            case.aborted = True
            self.totals.aborts += 1
            self.end(case, output)

    def end(self, case: Case, output: "RequestOutput") -> None:
        """Keep what ended, if it can be run again, and look at its form."""
        case.output = output
        self.totals.tokens += sum(len(o.token_ids) for o in output.outputs)
        for o in output.outputs:
            if o.finish_reason == "error":
                raise Violation(f"{describe(case)} failed: {o.error}")
            if not case.aborted and (o.finish_reason not in ("stop", "length") or not o.token_ids):
                raise Violation(f"{describe(case)} ended with {o.finish_reason!r} and {len(o.token_ids)} tokens")
            if o.logprobs is not None and len(o.logprobs) != len(o.token_ids):
                raise Violation(f"{describe(case)}: {len(o.logprobs)} log-probabilities of {len(o.token_ids)} tokens")
            finished = o.finish_reason == "stop" and not case.params.stop
            if case.params.choices and finished and o.text not in case.params.choices:
                raise Violation(f"{describe(case)}: {o.text!r} is none of the choices")
        rows = output.prompt_logprobs
        if rows is not None and not case.aborted and len(rows) != len(output.prompt_token_ids):
            raise Violation(f"{describe(case)}: {len(rows)} rows of prompt log-probabilities")
        self.ended.append(case)

    def again(self, case: Case) -> None:
        """The same request, alone."""
        first = case.output
        assert first is not None and not self.live
        alone = Case(case.prompt, case.params, case.salt)
        self.engine.add_request("again", case.prompt, case.params, cache_salt=case.salt)
        self.live["again"] = alone
        while self.live:
            self.step()
        self.ended.clear()
        assert alone.output is not None
        for a, b in zip(first.outputs, alone.output.outputs, strict=True):
            n = len(a.token_ids) if case.aborted else None
            if a.token_ids != b.token_ids[:n]:
                raise Violation(f"{describe(case)}\n  in company {a.token_ids}\n  alone      {b.token_ids}")
            if a.logprobs is not None and b.logprobs is not None and a.logprobs != b.logprobs[:n]:
                raise Violation(f"{describe(case)}: other log-probabilities alone than in company")
            if n is None and (a.text, a.finish_reason, a.stop_reason) != (b.text, b.finish_reason, b.stop_reason):
                raise Violation(
                    f"{describe(case)}: {a.text!r} ({a.finish_reason}), alone {b.text!r} ({b.finish_reason})"
                )
        if not case.aborted and first.prompt_logprobs != alone.output.prompt_logprobs:
            raise Violation(f"{describe(case)}: other log-probabilities of the prompt alone than in company")
        self.totals.compared += 1

    def engine_is_empty(self) -> None:
        engine, pool = self.engine, self.engine.scheduler.pool
        left = {
            "requests": len(engine._requests),
            "completions": len(engine._running),
            "running sequences": len(engine.scheduler.running),
            "waiting sequences": engine.scheduler.waiting,
            "pages in use": pool.num_pages - 1 - pool.available,
            "references to pages": sum(pool._refs),
            "pages in two places or none": len({*pool._free, *pool._evictable} ^ set(range(1, pool.num_pages))),
            "names without a page": len(pool._page_of) - len(pool._evictable),
        }
        if found := [f"{n} {what}" for what, n in left.items() if n]:
            raise Violation(f"the idle engine still has {', '.join(found)}")

    def scaled(self, length: int) -> int:
        return max(2, int(length * self.scale))

    def some_ids(self, count: int) -> list[int]:
        return [self.random.randrange(20, self.vocab) for _ in range(count)]

    def some_prompt(self) -> str | list[int]:
        r = self.random
        length = r.randint(1, r.choice((8, *map(self.scaled, (60, 200, LONGEST_PROMPT)))))
        if r.random() < 0.25:
            return " ".join(r.choices(TEXT.split(), k=-(-length // 3)))
        if r.random() < 0.4:
            prefix = r.choice(self.prefixes)
            return prefix[: r.choice((len(prefix), r.randrange(1, len(prefix))))] + self.some_ids(
                min(length, self.scaled(200))
            )
        return self.some_ids(length)

    def some_params(self) -> "SamplingParams":
        from anyrig import SamplingParams

        r = self.random
        p: dict[str, Any] = {
            "max_tokens": r.randint(1, self.scaled(MOST_TOKENS)),
            "seed": r.randrange(1 << 31),
            "temperature": 0.0,
        }
        if r.random() < 0.45:
            p["temperature"] = r.uniform(0.2, 1.5)
            p.update(
                r.choice(
                    ({}, {"top_p": r.uniform(0.05, 1)}, {"top_k": r.randint(1, 200)}, {"min_p": r.uniform(0, 0.3)})
                )
            )
            if r.random() < 0.2:
                p.update(top_p=0.9, top_k=40, min_p=0.02)

        def chance(share: float, **given: Any) -> None:
            if r.random() < share:
                p.update(given)

        chance(0.4, ignore_eos=True)
        chance(0.12, n=r.choice((2, 2, 3)))
        chance(0.15, stop=r.sample(STOPS, r.randint(1, 3)), include_stop_str_in_output=r.random() < 0.5)
        chance(0.05, stop_token_ids=self.some_ids(200))
        chance(0.1, min_tokens=r.randint(0, p["max_tokens"]))
        if self.plain:
            p.pop("min_tokens", None)
            return SamplingParams(**p)
        chance(0.08, repetition_penalty=r.uniform(0.8, 1.5))
        chance(0.06, presence_penalty=r.uniform(-1, 2), frequency_penalty=r.uniform(-1, 2))
        chance(0.12, logprobs=r.choice((0, 1, 5, 20)))
        chance(0.06, prompt_logprobs=r.choice((0, 1, 5)))
        if r.random() < 0.12:
            p.pop("min_tokens", None)
            p.update(
                r.choice(({"choices": r.sample(CHOICES, 3)}, {"regex": REGEX}, {"json_schema": json.dumps(SCHEMA)}))
            )
        else:
            chance(0.04, logit_bias={t: r.uniform(-5, 5) for t in self.some_ids(5)})
            chance(0.04, banned_token_ids=self.some_ids(50))
            chance(0.04, allowed_token_ids=self.some_ids(300))
        return SamplingParams(**p)


_bytes_per_token: dict[tuple[str, str], int] = {}


def bytes_per_token(model: str, kind: str) -> int:
    """Of keys and values; asked of an engine, which prepares the model if it isn't yet."""
    from anyrig.core.config import EngineConfig
    from anyrig.engine.engine import Engine

    if (model, kind) not in _bytes_per_token:
        config = EngineConfig(**KINDS[kind], runner="fused", max_model_len=512, kv_cache_memory="256MiB")
        runner: Any = Engine(model, config, progress=lambda _: None).runner
        _bytes_per_token[model, kind] = runner.kv_bytes // runner.num_pages // config.page_size
    return _bytes_per_token[model, kind]


def describe(case: Case) -> str:
    prompt = f"{len(case.prompt)} {'characters' if isinstance(case.prompt, str) else 'tokens'}"
    return f"the {'aborted ' if case.aborted else ''}request of {prompt} with {case.params}"


def anonymous_memory() -> int:
    gc.collect()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def memory_is_flat(memory: Sequence[tuple[int, int]]) -> None:
    second, last = (statistics.median(part) for part in quarters(memory))
    if last - second > GROWTH:
        raise Violation(f"memory grew by {(last - second) / 2**20:.0f} MiB from {second / 2**20:.0f} MiB")


def quarters(memory: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Samples of the second and of the last quarter."""
    values = [value for _, value in memory]
    n = max(1, len(values) // 4)
    return values[n : 2 * n] or values[-n:], values[-n:]


def soak(args: argparse.Namespace) -> int:
    from anyrig.ops.cpu import native

    module = native.module()
    if module is None:
        print(f"soak: no CPU kernels ({native.why_not()})")
        return 1
    kinds = [k for k, options in KINDS.items() if options.get("quantize", "none") in args.quantize]
    totals, start = Totals(), time.monotonic()
    end = start + args.minutes * 60
    slot = max(2.0, args.minutes * 60 / (1 if args.kernels else 4) / (len(kinds) * len(PAGE_SIZES)))
    number, failed = args.round or 0, ""
    while time.monotonic() < end:
        kind, page_size = kinds[number % len(kinds)], PAGE_SIZES[number % len(PAGE_SIZES)]
        faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            current = Round(args, number, kind, page_size, totals)
            begun = time.monotonic()
            each = slot if args.round is None else end - begun
            current.run(begun + 0.6 * each, begun + each)
            del current
            totals.memory.append((number, anonymous_memory()))
        except Exception as error:
            if not isinstance(error, Violation):
                traceback.print_exc()
            failed = f"round {number} ({kind}, pages of {page_size}): {type(error).__name__}: {error}"
            failed += f"\nsoak: again with --seed {args.seed} --round {number} --scale {args.scale}"
            break
        totals.rounds += 1
        if args.verbose:
            print(
                f"soak: round {number} {kind} {page_size}: {totals.memory[-1][1] >> 20} MiB, {totals.requests} requests"
            )
        if args.round is not None:
            break
        number += 1
    faulthandler.cancel_dump_traceback_later()
    if not failed and totals.memory and args.round is None and not args.kernels:
        try:
            memory_is_flat(totals.memory)
        except Violation as error:
            failed = str(error)
    second, last = quarters(totals.memory) if totals.memory else ([0], [0])
    print(
        f"soak: {'FAILED' if failed else 'ok'}, seed {args.seed}, {Path(str(module.__file__)).name.split('.')[0]}, "
        f"{time.monotonic() - start:.0f} s, {totals.rounds} rounds: {totals.requests} requests, "
        f"{totals.tokens} tokens, {totals.aborts} aborts, {totals.preemptions} preemptions, "
        f"{totals.cached} tokens from the prefix cache, {totals.compared} compared with runs alone, "
        f"memory {statistics.median(second) / 2**20:.0f} MiB then {statistics.median(last) / 2**20:.0f} MiB"
    )
    if failed:
        print(f"soak: {failed}")
    return int(bool(failed))


class KernelsFrom(importlib.abc.MetaPathFinder):
    """Finds the kernel modules that are in `folder` there rather than where they are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        file = self.folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if package != "anyrig.ops.cpu" or not file.exists():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


def sanitized(args: argparse.Namespace) -> int:
    """Compile this CPU's best module with sanitizers, in a folder of its own, and soak that one."""
    from anyrig.ops.cpu import native

    module = native.module()
    if module is None:
        print(f"soak: no CPU kernels ({native.why_not()})")
        return 1
    folder = ROOT / "build" / f"soak-{args.sanitize.replace(',', '-')}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), f"-DANYRIG_SANITIZE={args.sanitize}"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"]
    print(
        f"soak: compiling _{module.isa} with -fsanitize={args.sanitize} (a minute or two when it changed)", flush=True
    )
    for command in (configure, ["cmake", "--build", str(folder), "--target", f"_{module.isa}"]):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr)
            return 1
    for kind in KINDS:
        bytes_per_token(args.model, kind)  # prepared here: packing needs torch, and is slow under sanitizers
    compiler = os.environ.get("CXX", "g++")
    runtime = "tsan" if "thread" in args.sanitize else "asan"
    preload = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in (runtime, "stdc++")  # the sanitizer looks for the C++ library's exceptions when it starts
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16:malloc_context_size=8:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1",
    }
    command = [sys.executable, *sys.argv, "--kernels", str(folder), "--scale", str(args.scale / 4)]
    if "thread" in args.sanitize:
        command += ["--plain"]  # torch's own threads are not instrumented
        if setarch := shutil.which("setarch"):
            command = [setarch, "-R", *command]  # ThreadSanitizer wants its addresses
    i = command.index(next(c for c in command if c.startswith("--sanitize")))
    del command[i : i + (1 if "=" in command[i] else 2)]
    return subprocess.run(command, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Random soak of the engine.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--quantize", nargs="+", choices=("none", "int8", "int4"), default=["none", "int8", "int4"])
    parser.add_argument("--round", type=int, help="this round only, for the whole time")
    parser.add_argument(
        "--scale", type=float, default=1, help="of all lengths; sanitized runs, being slow, have a quarter"
    )
    parser.add_argument("--plain", action="store_true", help="only requests that need no torch")
    parser.add_argument("--sanitize", metavar="NAMES", help="compile the kernels with -fsanitize=NAMES and soak those")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="kernel modules from there")
    parser.add_argument("--verbose", action="store_true", help="a line per round")
    args = parser.parse_args()
    if args.sanitize not in (None, "none"):
        return sanitized(args)
    if args.kernels:
        sys.meta_path.insert(0, KernelsFrom(args.kernels.resolve()))
        from anyrig.ops.cpu import native

        module = native.module()
        if module is None or Path(str(module.__file__)).parent != args.kernels.resolve():
            print(f"soak: the kernels in {args.kernels} are not those in use")
            return 1
    return soak(args)


if __name__ == "__main__":
    sys.exit(main())
