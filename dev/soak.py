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
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from soak_round import HANG, KINDS, PAGE_SIZES, Round, Totals, Violation
from soak_sanitized import KernelsFrom, sanitized

GROWTH = 48 << 20  # bytes


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
