"""One round of the soak (soak.py): an engine of its own, what is asked of it, and what must be true of the answers."""

import argparse
import faulthandler
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyrig import SamplingParams
    from anyrig.core.outputs import RequestOutput

KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "float32": {"dtype": "float32"},
}
PAGE_SIZES = (16, 32, 64)
LONGEST_PROMPT, MOST_TOKENS = 600, 80
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
