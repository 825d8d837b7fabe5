"""`make bench`: our engine and Transformers' `generate`, in turn, each in a process of its own.

    python -m anyrig.bench.against_transformers [--model M] [--n 32] [--prompt 128] [--gen 128] [--rounds 2]

Only the ratio means something: the same machine moves by tens of percent from hour to hour.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any


def run(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "anyrig", "-q", "bench", "throughput", args.model, "--engine", engine, "--json"]
    command += ["--n", str(args.n), "--prompt", str(args.prompt), "--gen", str(args.gen)]
    command += ["--dtype", args.dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{engine} failed (exit {done.returncode}): {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Our engine against Transformers' static-batch generate, in turn.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="each is run this often; medians are compared")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(f"{args.model}, {args.n} requests of {args.prompt} + {args.gen} tokens, greedy", flush=True)
    speeds: dict[str, list[float]] = {"anyrig": [], "transformers": []}
    for _ in range(args.rounds):
        for engine, measured in speeds.items():
            result = run(engine, args)
            measured.append(result["tokens_per_s"])
            print(
                f"  {engine:13} {result['tokens_per_s']:8.1f} tokens/s  {result['peak_rss_mb']:6} MB"
                f"  {result['version']:8} {result['variant']}",
                flush=True,
            )
    ours, theirs = (statistics.median(speeds[name]) for name in ("anyrig", "transformers"))
    print(f"ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
