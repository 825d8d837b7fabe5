"""`anyrig VERB`: verbs are imported when they are used, errors become one line and an exit code."""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from typer.main import get_command

from anyrig import __version__
from anyrig.cli.console import console
from anyrig.cli.help import Command, Group
from anyrig.core import env
from anyrig.core.errors import AnyrigError, UsageError

# verb: where it is, and its line in `anyrig --help`. Nothing of it is imported before it is asked for.
VERBS = {
    "doctor": ("anyrig.cli.doctor:doctor", "what this machine has, what works, and what to do about the rest"),
    "pull": ("anyrig.cli.pull:pull", "fetch a model into the cache"),
    "models": ("anyrig.cli.models:app", "list models: the known names and what is cached"),
    "generate": ("anyrig.cli.generate:generate", "complete one prompt or several"),
    "chat": ("anyrig.cli.chat:chat", "talk with a model in the terminal"),
    "batch": ("anyrig.cli.batch:batch", "run a prompt over every row of a file"),
    "bench": ("anyrig.cli.bench:bench", "measure throughput and latency"),
    "eval": ("anyrig.cli.eval:evaluate", "measure perplexity, of quantised weights too"),
}

EXAMPLES = """\b
Examples:
  anyrig chat
  anyrig generate smollm2-135m "Why is the sky blue?"
  anyrig batch smollm2-135m -i rows.csv -o out.jsonl --prompt "Summarize: {{ text }}"

MODEL is a known name (see `anyrig models`), a model hub's id, a directory or a .gguf file. Every option is also a key
of --config FILE.yaml and an environment variable: --max-num-seqs is max_num_seqs and ANYRIG_MAX_NUM_SEQS."""

# Typer carries its own copy of click since 0.2x: this names the right ClickException in both worlds.
_ClickException: Any = typer.BadParameter.__mro__[2]


class Verbs(Group):
    """The group of all verbs; each is imported by `get_command` only."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        target, line = VERBS[cmd_name]
        if self._listing:
            return Command(cmd_name, help=line)
        module, _, attribute = target.partition(":")
        command = _command(getattr(importlib.import_module(module), attribute))
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS:
            near = get_close_matches(args[0], VERBS, 1)
            raise UsageError(
                f"no such command `{args[0]}`",
                f"did you mean `anyrig {near[0]}`?" if near else f"commands are {', '.join(VERBS)}",
            )
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self._listing = True  # one line of help per verb needs none of their modules
        super().format_options(ctx, formatter)


def _command(target: Any) -> Any:
    """A verb's function or sub-application as a command, with `-v`, `-q` and `--debug` added."""
    app = target
    if isinstance(app, typer.Typer):
        app.info.cls = Group
        for info in app.registered_commands:
            info.cls = Command
    else:
        app = typer.Typer(add_completion=False)
        app.command(cls=Command)(target)
    command = get_command(app)
    command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
    for leaf in (command, *getattr(command, "commands", {}).values()):
        taken = {opt for p in leaf.params for opt in p.opts}
        leaf.params += [p for p in _common_options() if not taken.intersection(p.opts)]
    return command


def _common_options() -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(_common)
    return list(get_command(app).params)


def _more(value: int) -> None:
    if value:
        console.set(value)


def _less(value: bool) -> None:
    if value:
        console.set(-1)


def _debug(value: bool) -> None:
    console.debug = console.debug or value


def _common(
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, callback=_more, expose_value=False, help="say more", show_default=False
        ),
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", callback=_less, expose_value=False, help="say nothing but errors")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, expose_value=False, help="show tracebacks (ANYRIG_DEBUG=1)")
    ] = False,
) -> None:
    """Options of every verb; they may stand before it or after it."""


def _version(value: bool) -> None:
    if value:
        print(f"anyrig {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and leave")
    ] = False,
) -> None:
    """LLM work on any rig: the same commands on AMD, NVIDIA or plain CPUs."""


def build() -> Any:
    """The whole command line, for `main` and for tests."""
    app = typer.Typer(add_completion=False)
    app.callback(
        cls=Verbs,
        no_args_is_help=True,
        epilog=EXAMPLES,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": lambda token: token.replace("_", "-"),  # --max_num_seqs is --max-num-seqs
        },
    )(_root)
    group = get_command(app)
    group.params += _common_options()
    return group


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; a verb may return an exit code of its own."""
    console.debug = env.debug()
    console.set(0)
    try:
        code = build().main(list(args), prog_name="anyrig", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        console.clear()
        return 130
    except BrokenPipeError:  # the reader has gone (`| head`); the interpreter must not flush into it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except AnyrigError as e:
        return _fail(e, e.message, e.hint, e.exit_code)
    except _ClickException as e:
        return _fail(e, *_usage(e), e.exit_code)
    except Exception as e:
        what = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
        return _fail(e, what, "this was not foreseen; --debug shows where it happened", 1)


def _fail(error: BaseException, message: str, hint: str | None, code: int) -> int:
    if console.debug:
        traceback.print_exception(error)
    console.error(message, hint)
    return code


def _usage(error: Any) -> tuple[str, str]:
    """Message and hint of a wrong command line, in our words."""
    path = error.ctx.command_path if error.ctx else "anyrig"
    near = getattr(error, "possibilities", None)
    message = (error.message if near else error.format_message()).rstrip(".")
    return message[:1].lower() + message[1:], f"did you mean {near[0]}?" if near else f"see {path} --help"


def main() -> NoReturn:
    """Entry point of the `anyrig` command."""
    # Importing torch and Transformers makes a million objects that stay: looking through them again and again for
    # garbage took an eighth of the start-up time.
    gc.set_threshold(100_000, 50, 100)
    sys.exit(run(sys.argv[1:]))
