"""Command-line options made from config dataclasses, and where each value came from.

    @configured(EngineConfig, SamplingParams, defaults={"max_tokens": 256})
    def generate(settings: Settings, model: Annotated[str, typer.Argument()]) -> None:
        engine = Engine(model, settings.build(EngineConfig))
        params = settings.build(SamplingParams, engine.info.generation)

Every field that has a `help` text becomes a flag of the same words (`max_num_seqs`: `--max-num-seqs`), an environment
variable (`ANYRIG_MAX_NUM_SEQS`) and a key of the `--config` file. Order of strength: flag, environment, file, the
model's generation_config (for sampling), default. A field that two classes share belongs to the first one.
"""

import dataclasses
import inspect
import json
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from anyrig.cli.console import console
from anyrig.cli.values import is_list, kinds_of, metavar, parse
from anyrig.core.errors import AnyrigError, ModelError, UsageError
from anyrig.core.params import SamplingParams, generation_defaults

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one config class, as the command line knows it.

    Attributes:
        owner: the class whose field it is.
        hint: its type.
        default: the command's default, or the field's own.
    """

    owner: type
    name: str
    hint: Any
    help: str
    default: Any
    metavar: str
    short: str | None = None

    def parse(self, raw: Any, where: str) -> Any:
        """What was written, as the field's type; `where` names it in messages."""
        # One choice alone would mean nothing, so that one flag may hold them all: --choices yes,no
        return parse(raw, self.hint, where, commas=self.name == "choices")

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "ANYRIG_" + self.name.upper()

    @property
    def panel(self) -> str:
        return re.sub(r"(Config|Params|Options)$", "", self.owner.__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command was told, by field, and by whom.

    Attributes:
        values: fields that somebody set: flag, environment or file.
        sources: who set each of them, such as ``flag --top-k``, ``environment ANYRIG_TOP_K`` or ``file run.yaml``.
    """

    options: Mapping[str, Option]
    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def given(self, owner: type) -> dict[str, Any]:
        """The fields of `owner` that somebody set."""
        return {name: value for name, value in self.values.items() if self.options[name].owner is owner}

    def resolved(self, owner: type, model: Mapping[str, Any] | None = None) -> dict[str, tuple[Any, str]]:
        """Value and source of every option of `owner`; `model` is the model's generation_config as it stands there."""
        out: dict[str, tuple[Any, str]] = {}
        own = generation_defaults(model or {}) if owner is SamplingParams else {}
        for name, opt in self.options.items():
            if opt.owner is not owner:
                continue
            if name in self.values:
                out[name] = (self.values[name], self.sources[name])
            elif name in own:
                out[name] = (own[name], "model")
            else:
                out[name] = (opt.default, "default")
        return out

    def build(self, owner: type[T], model: Mapping[str, Any] | None = None) -> T:
        """An `owner` from what was given, the model's values, and the defaults.

        Raises:
            UsageError: when the class refuses a value that somebody set; it says who set it.
        """
        try:
            return owner(**{name: value for name, (value, _) in self.resolved(owner, model).items()})
        except AnyrigError as e:
            named = dict.fromkeys(n for n in re.findall(r"`(\w+)`", e.message) if n in self.sources)
            if not named:
                raise
            # A flag is before the user's eyes; a variable or a file may be long forgotten.
            far = [f"`{n}` was set by {self.sources[n]}" for n in named if not self.sources[n].startswith("flag")]
            raise UsageError(e.message, "; ".join(filter(None, (e.hint, *far))) or None) from e

    def show(self, model: Mapping[str, Any] | None = None) -> str:
        """Every option with its value and source, as YAML that `--config` reads."""
        lines = []
        for owner in dict.fromkeys(opt.owner for opt in self.options.values()):
            lines.append(f"# {next(o.panel for o in self.options.values() if o.owner is owner)}")
            rows = [(f"{n}: {_yaml(v)}", source) for n, (v, source) in self.resolved(owner, model).items()]
            width = min(48, max(len(text) for text, _ in rows))
            lines += [f"{text:<{width}}  # {source}" for text, source in rows]
        return "\n".join(lines)


def configured(
    *owners: type, defaults: Mapping[str, Any] | None = None, skip: Collection[str] = ()
) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
    """Make a command of a function: its own parameters, plus an option for every field of the config classes.

    The function gets `settings: Settings` as its first argument. `--config FILE` and `--print-config` are added;
    the latter prints instead of calling the function, and reads the model named by its `model` parameter.

    Args:
        owners: config dataclasses; fields without `metadata["help"]` are no options.
        defaults: the command's own defaults, by field; the weakest of all sources.
        skip: fields that make no sense for this command.
    """
    options = _options(owners, defaults or {}, skip)

    def decorate(command: Callable[..., T]) -> Callable[..., T | None]:
        def run(**kwargs: Any) -> T | None:
            flags = {name: kwargs.pop(name) for name in options}
            file, show = kwargs.pop("config"), kwargs.pop("print_config")
            settings = resolve(options, flags, os.environ, file)
            if not show:
                return command(settings, **kwargs)
            for owner in owners:
                settings.build(owner)  # a wrong value is an error here as well
            print(settings.show(_generation_config(kwargs.get("model"))))
            return None

        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(signature.parameters.values())[1:]]
        parameters = own + [_parameter(opt) for opt in options.values()] + _CONFIG_PARAMETERS
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        return run

    return decorate


def resolve(
    options: Mapping[str, Option], flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> Settings:
    """Parse what each source says, the strongest one winning.

    Raises:
        UsageError: on an unknown key of the file, or a value that is not of the option's type.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(opt: Option, raw: Any, where: str, source: str) -> None:
        values[opt.name], sources[opt.name] = opt.parse(raw, where), source

    for key, raw in (_read(file) if file else {}).items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = get_close_matches(name, options, 1)
            raise UsageError(
                f"unknown key `{key}` in {file}", f"did you mean `{near[0]}`?" if near else "see --print-config"
            )
        put(options[name], raw, f"{key} in {file}", f"file {file}")
    for opt in options.values():
        if opt.env in environ:
            put(opt, environ[opt.env], opt.env, f"environment {opt.env}")
    for name, raw in flags.items():
        if raw is not None:
            put(options[name], raw, options[name].flag, f"flag {options[name].flag}")
    return Settings(options, values, sources)


def _options(owners: Sequence[type], defaults: Mapping[str, Any], skip: Collection[str]) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for owner in owners:
        hints = typing.get_type_hints(owner)
        for f in dataclasses.fields(owner):
            if "help" not in f.metadata or f.name in skip or f.name in options:
                continue
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            options[f.name] = Option(
                owner=owner,
                name=f.name,
                hint=hints[f.name],
                help=f.metadata["help"],
                default=defaults.get(f.name, default),
                metavar=f.metadata.get("metavar") or metavar(hints[f.name]),
                short=f.metadata.get("short"),
            )
    return options


def _parameter(opt: Option) -> inspect.Parameter:
    # Typer sees text (or a switch) and no default: that tells what was given, and `parse` serves all three sources.
    kinds, _ = kinds_of(opt.hint)
    decls = [opt.flag] if kinds != [bool] else [f"{opt.flag}/--no-{opt.flag[2:]}"]
    annotation: Any = bool | None if kinds == [bool] else list[str] | None if is_list(opt.hint) else str | None
    help = opt.help
    if opt.default not in (None, (), ""):
        shown = opt.default if isinstance(opt.default, str) else _yaml(opt.default)
        help += f" [{shown}]"
    info = typer.Option(
        *decls,
        *([opt.short] if opt.short else []),
        help=help,
        metavar=None if kinds == [bool] else opt.metavar,
        show_default=False,
        rich_help_panel=opt.panel,
    )
    return inspect.Parameter(
        opt.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, info]
    )


_CONFIG_PARAMETERS = [
    inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option("--config", metavar="FILE", help="YAML file with any of these options", show_default=False),
        ],
    ),
    inspect.Parameter(
        "print_config",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("--print-config", help="show every option, its value and its source, and leave")
        ],
    ),
]


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.expanduser().read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"--config file cannot be read: {file} ({e.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"--config file is not YAML: {file} ({str(e).splitlines()[-1].strip()})") from None
    if not isinstance(content or {}, Mapping):
        raise UsageError(f"--config file must hold keys and values: {file}")
    return content or {}


def _yaml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=str)


def _generation_config(model: str | None) -> Mapping[str, Any] | None:
    """That of a model that is here already: showing options must not fetch one."""
    if model is None:
        return None
    from anyrig.models import checkpoint, locate

    try:
        return checkpoint.read_info(locate.resolve(model, offline=True).path).generation
    except ModelError as e:
        console.note(f"the model's own sampling values are unknown: {e.message}")
        return None
