"""`anyrig chat`: a conversation with a model in the terminal."""

import dataclasses
import itertools
import sys
import typing
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyrig.cli import drive
from anyrig.cli.console import console, moving, printable
from anyrig.cli.conversation import Conversation
from anyrig.cli.editor import Editor
from anyrig.cli.interrupt import Interrupt
from anyrig.cli.options import Settings, configured
from anyrig.cli.values import parse
from anyrig.cli.wrap import Wrapper
from anyrig.core import env
from anyrig.core.config import EngineConfig
from anyrig.core.errors import AnyrigError, ModelError, UsageError
from anyrig.core.outputs import RequestOutput
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.engine.engine import Engine

DEFAULT_MODEL = "smollm2-135m"

# One answer at a time, as text: these would have no effect a person could see.
_SKIP = ("n", "logprobs", "prompt_logprobs", "logprobs_mode", "max_num_seqs", "max_batch_tokens")


# Where the model states none of its own: livelier than greedy, calmer than the full distribution of a small model.
_DEFAULTS = {"max_tokens": 1024, "temperature": 0.6, "top_p": 0.9}


@configured(EngineConfig, SamplingParams, defaults=_DEFAULTS, skip=_SKIP)
def chat(
    settings: Settings,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")
    ] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="system message")] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="go on with a saved conversation")] = None,
) -> int:
    """Talk with a model in the terminal; piped lines are one turn each.

    /help in the chat lists what else it can do.
    """
    config = settings.build(EngineConfig)
    settings.build(SamplingParams)  # a wrong flag is told before the model is loaded
    conversation = Conversation.load(load) if load else Conversation()
    if system is not None:
        conversation.system = system

    from anyrig.engine.engine import Engine

    console.status(f"loading {model}")
    engine = Engine(model, config, progress=console.status)
    console.clear()
    if not engine.tokenizer.has_chat_template:
        raise ModelError(f"`{model}` has no chat template", "use `anyrig generate` with this model, or take another")
    editor = Editor(env.home() / "chat_history")
    session = Session(engine, settings.build(SamplingParams, engine.info.generation), conversation, editor)
    if editor.interactive:
        console.note(engine.describe())
        console.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    try:
        return session.run()
    finally:
        editor.save_history()


class Session:
    """A chat as it goes: what the user types, what the model answers.

    Attributes:
        failed: whether a turn could not be answered.
    """

    def __init__(self, engine: "Engine", params: SamplingParams, conversation: Conversation, editor: Editor) -> None:
        self.engine = engine
        self.params = params
        self.conversation = conversation
        self.failed = False
        self._editor = editor
        self._numbers = itertools.count()
        self._commands: dict[str, tuple[Callable[[str], bool | None], str, str]] = {
            "/help": (self._help, "", "this list"),
            "/reset": (self._reset, "", "forget the conversation, keep the system message"),
            "/system": (self._system, "[TEXT]", "set the system message and start anew; without TEXT: show it"),
            "/retry": (self._retry, "", "answer the last message again"),
            "/set": (self._set, "NAME VALUE", "change a sampling parameter, such as /set temperature 0.7"),
            "/params": (self._params, "", "show the sampling parameters"),
            "/save": (self._save, "FILE", "write the conversation as JSON"),
            "/load": (self._load, "FILE", "go on with a saved conversation"),
            "/exit": (lambda _: True, "", "leave (also Ctrl-D)"),
        }

    def run(self) -> int:
        """Take turns until the input ends; returns the exit code."""
        interrupted = False
        while True:
            try:
                for turn in self._editor.turns():
                    interrupted = False
                    if self.take(turn):
                        return 0
                if self._editor.interactive:
                    print(file=sys.stderr)  # Ctrl-D leaves the cursor behind the prompt
                return 1 if self.failed and not self._editor.interactive else 0
            except KeyboardInterrupt:
                if interrupted or not self._editor.interactive:
                    return 130
                interrupted = True
                print(file=sys.stderr)
                console.note("Ctrl-C again or Ctrl-D leaves")

    def take(self, turn: str) -> bool:
        """Do what one turn says; whether it was the last one."""
        try:
            if turn.startswith("/"):
                return self._command(turn)
            self.conversation.say("user", turn)
            self.answer()
        except AnyrigError as e:
            self.failed = True
            console.error(e.message, e.hint)
        return False

    def answer(self) -> None:
        """Answer the last message; what was said stays in the conversation even when Ctrl-C stops it."""
        limit = self.engine.max_model_len
        room = limit - min(self.params.max_tokens or limit, limit // 4)
        try:
            ids, dropped = self.conversation.encode(self.engine.tokenizer, room)
            run = drive.start(self.engine, [ids], self.params, f"chat-{next(self._numbers)}")
        except AnyrigError:
            self.conversation.messages.pop()  # a message that can't be sent must not spoil the next ones
            raise
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            console.note(f"the context is full: the oldest {turns} left out")
        text = ""
        wrapper = Wrapper() if moving(sys.stdout) else None

        def show(out: RequestOutput) -> None:
            nonlocal text
            new = printable(out.outputs[0].text[len(text) :], sys.stdout)
            text = out.outputs[0].text
            print(wrapper.feed(new) if wrapper else new, end="", flush=True)

        with self._editor.hidden(), Interrupt() as interrupt:
            try:
                finished = run.until_done(show, lambda: interrupt.asked)
            finally:
                print(flush=True)
                self.conversation.say("assistant", text)
        self._comment(run, finished, len(ids))

    def _comment(self, run: drive.Run, finished: bool, prompt_tokens: int) -> None:
        timing = run.timing
        [out] = run.outputs.values()
        reason = out.outputs[0].finish_reason if out.outputs else None
        if reason == "error":
            raise AnyrigError(out.outputs[0].error or "the engine failed")
        parts = [f"{timing.output_tokens} tokens", f"{timing.rate:.1f} tokens/s"]
        if timing.first is not None:
            parts.append(f"first after {timing.first:.2f} s")
        parts.append(f"context {prompt_tokens + timing.output_tokens}/{self.engine.max_model_len}")
        if not finished:
            parts.append("stopped")
        elif reason == "length":
            parts.append("cut at its longest (/set max_tokens N)")
        console.note(" · ".join(parts) + ("\n" if self._editor.interactive else ""))

    def _command(self, turn: str) -> bool:
        name, _, rest = turn.strip().partition(" ")
        name = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "/clear": "/reset"}.get(name, name)
        if name not in self._commands:
            near = get_close_matches(name, self._commands, 1)
            raise UsageError(
                f"no command `{name}`",
                f"did you mean `{near[0]}`?" if near else "/help lists them; a leading space sends it as a message",
            )
        return bool(self._commands[name][0](rest.strip()))

    def _help(self, rest: str) -> None:
        for name, (_, args, text) in self._commands.items():
            print(f"  {name + ' ' + args:<18} {text}", file=sys.stderr)
        print('  a line that ends in \\ goes on in the next; """ begins and ends a block of lines', file=sys.stderr)

    def _reset(self, rest: str) -> None:
        self.conversation.clear()
        console.note("a new conversation")

    def _system(self, rest: str) -> None:
        if rest:
            self.conversation = Conversation(rest)
            console.note("a new conversation with this system message")
        else:
            console.note(
                self.conversation.system or "no system message of yours (the model's template may add its own)"
            )

    def _retry(self, rest: str) -> None:
        if not self.conversation.take_back_answer():
            raise UsageError("there is nothing to answer again")
        self.answer()

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        hints = {n: h for n, h in typing.get_type_hints(SamplingParams).items() if n not in _SKIP}
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            raise UsageError(f"no parameter `{name}`", f"did you mean `{near[0]}`?" if near else "/params lists them")
        if not value.strip():
            raise UsageError(f"`{name}` needs a value", f"now it is {getattr(self.params, name)}")
        new: Any = parse(value.strip(), hints[name], name, commas=name == "choices")
        self.params = self.params.replace(**{name: new})
        console.note(f"{name} = {new}")

    def _params(self, rest: str) -> None:
        for f in dataclasses.fields(self.params):
            value = getattr(self.params, f.name)
            if f.name not in _SKIP:
                mark = " " if value == f.default else "*"
                print(f"{mark} {f.name:<27} {value}", file=sys.stderr)
        console.note("* differs from the default")

    def _save(self, rest: str) -> None:
        if not rest:
            raise UsageError("/save needs a file name")
        self.conversation.save(Path(rest).expanduser())
        console.note(f"saved {len(self.conversation.messages)} messages to {rest}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise UsageError("/load needs a file name")
        self.conversation = Conversation.load(Path(rest).expanduser())
        console.note(f"loaded {len(self.conversation.messages)} messages from {rest}")
