"""`make demo`: a small language model labels and names the functions of Python's standard library.

Three runs of `anyrig batch`, each printed as it is run: one measures which topics the model favours before it reads
anything (calibration), one labels every row with its topic, one makes up a name for every function. Both answers are
known, so the table at the end says how good they are, beside what guessing would give. See docs/demo.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_report import print_report
from demo_rows import TOPICS, Docstring, NoSources, split
from rich.console import Console
from rich.markup import escape

MODEL = "smollm2-135m"
DEVELOPMENT, ROWS = 34, 60  # docstrings of each topic
CALIBRATION = 10  # of the development part

LABEL_PROMPT = "Python documentation.\n\nPython function: {{ text }}\nKeyword: "
NAME_PROMPT = "import sys\n\n# {{ text }}\ndef"
# A choice may be spelled in several tokens, "date" + "s"; enough for every token that can begin one of the topics.
LOGPROBS = 64
NEVER = -100.0

Row = dict[str, Any]
console = Console(highlight=False)


class DemoError(Exception):
    """The demo can't go on; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description="label real text with a small model, and show how good that was")
    parser.add_argument("--out", type=Path, default=Path("demo-results"), help="folder for the results (%(default)s)")
    parser.add_argument("--model", default=MODEL, help="another model (%(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of each topic, at most (%(default)s)")
    args = parser.parse_args()
    if args.rows < 1:
        parser.error(f"--rows must be at least 1. Given: {args.rows}")
    try:
        demo(args.model, args.out, args.rows)
    except (DemoError, NoSources) as e:
        console.print(f"demo: {e}", style="red", markup=False)
        return 1
    except OSError as e:
        console.print(f"demo: can't write {e.filename}: {e.strerror}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def demo(model: str, out: Path, count: int) -> None:
    """All steps, from the rows to the table."""
    data = split(DEVELOPMENT, count)
    out.mkdir(parents=True, exist_ok=True)
    calibration = write_rows(
        out / "calibration.jsonl", [d for i, d in enumerate(data.development) if i % DEVELOPMENT < CALIBRATION]
    )
    rows = write_rows(out / "rows.jsonl", data.rows)
    scores, bias = out / "calibration-scores.jsonl", out / "bias.json"
    labels, results = out / "labels.jsonl", out / "results.jsonl"
    console.print(
        f"The rows: {len(data.rows)} sentences, taken just now from the docstrings of Python "
        f"{sys.version.split()[0]}'s standard library.\n"
        f"The jobs: say which of {len(TOPICS)} topics each is about, and make up a name for the function it describes."
    )

    choices = ["--choices", ",".join(TOPICS)]
    step(f"1. Calibrate: which topics does the model favour, whatever it reads? ({CALIBRATION} other rows of each)")
    batch(model, calibration, scores, LABEL_PROMPT, *choices, "--logprobs", LOGPROBS, "--logprobs-mode", "processed")
    bias.write_text(json.dumps(balancing_bias(read_rows(scores)), indent=1), encoding="utf-8")

    step("2. Label every row, with that preference taken off again")
    label_run = batch(
        model, rows, labels, LABEL_PROMPT, *choices, "--logit-bias", f"@{bias}", "--output-prefix", "label_"
    )

    step("3. Name the function that each sentence describes")
    options = ["--max-tokens", 12, "--stop", "(", "--stop", "\n", "--temperature", 0, "--output-prefix", "name_"]
    name_run = batch(model, labels, results, NAME_PROMPT, *options)

    print_report(console, model, read_rows(results), label_run, name_run)
    print_next_steps(model, rows, results)


def balancing_bias(scores: Sequence[Row]) -> dict[int, float]:
    """What to add to the logit of each topic's token so that over these rows no topic is favoured.

    The rows' answers are not looked at (batch calibration: Zhou et al. 2023, arXiv 2309.17249). Tokens that only
    begin a topic's name are ruled out: a topic is chosen whole.

    Args:
        scores: rows with the column `logprobs` of `anyrig batch`, over the tokens that `--choices` allows.

    Returns:
        bias by token id.

    Raises:
        DemoError: when a topic is more than one token to this model.
    """
    total: dict[str, float] = defaultdict(float)
    ids: dict[str, int] = {}
    done = [row for row in scores if row["error"] is None]
    for row in done:
        for entry in row["logprobs"][0]["top"]:
            if entry["logprob"] is not None:
                ids[entry["token"]] = entry["token_id"]
                total[entry["token"]] += entry["logprob"] / len(done)
    if not done:
        raise DemoError(f"every row of the calibration failed: {scores[0]['error']}")
    missing = [topic for topic in TOPICS if topic not in ids]
    if missing:
        raise DemoError(f"this model has no single token for {', '.join(missing)}: take one with SmolLM2's vocabulary")
    mean = sum(total[topic] for topic in TOPICS) / len(TOPICS)
    return {i: round(mean - total[token], 3) if token in TOPICS else NEVER for token, i in ids.items()}


def batch(model: str, rows: Path, out: Path, prompt: str, *options: object) -> Row:
    """Run `anyrig batch`, show its command, and return its summary.

    Raises:
        DemoError: when it fails.
    """
    files = ["-i", rows, "-o", out, "--prompt", prompt, "--raw"]
    arguments = ["anyrig", "batch", model, *map(str, files), *map(str, options), "--overwrite", "--fresh", "--json"]
    console.print(f"$ {shown_python()} -m {shlex.join(arguments)}", style="cyan", markup=False, soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode not in (0, 3):
        raise DemoError(f"`anyrig batch` ended with exit code {done.returncode}; its message stands above")
    summary: Row = json.loads(done.stdout)
    return summary


def print_next_steps(model: str, rows: Path, results: Path) -> None:
    console.print(f"\nEvery row with its answers: [bold]{escape(str(results))}[/]\nTry next:")
    anyrig = f"{shown_python()} -m anyrig"
    for command in (
        f"{anyrig} chat",
        f"{anyrig} batch {model} -i {shlex.quote(str(rows))} -o explained.csv --limit 20 "
        "--prompt 'Explain simply: {{ text }}'",
        f"{anyrig} doctor",
    ):
        console.print(f"  {command}", style="cyan", markup=False, soft_wrap=True)


def shown_python() -> str:
    """This Python as one would type it here."""
    path = Path(sys.executable)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def write_rows(path: Path, docs: Sequence[Docstring]) -> Path:
    path.write_text("".join(json.dumps(asdict(d)) + "\n" for d in docs), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def step(text: str) -> None:
    console.print(f"\n[bold]{escape(text)}[/]")


if __name__ == "__main__":
    sys.exit(main())
