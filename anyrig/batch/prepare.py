"""Everything that a job needs before the model's weights are loaded; each check stands before what costs more."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyrig.batch import preflight
from anyrig.batch.assemble import Layout, layout_of
from anyrig.batch.config import BatchConfig
from anyrig.batch.inputs import open_inputs
from anyrig.batch.ledger import Ledger
from anyrig.batch.prompt import Encoder, Prompt
from anyrig.batch.result import Columns
from anyrig.batch.source import Source
from anyrig.batch.target import Target, target_of
from anyrig.core.config import EngineConfig
from anyrig.core.errors import UsageError
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.models.checkpoint import ModelInfo
    from anyrig.models.tokenizer import Tokenizer

# Engine options that change what comes out; the others only change how fast.
_ENGINE_FIELDS = ("dtype", "quantize", "max_model_len", "logprobs_mode", "seed")
_BATCH_FIELDS = ("raw", "on_long", "limit", "format", "encoding", "delimiter", "output_format", "output_prefix")


@dataclass(frozen=True, slots=True)
class Data:
    """The files of a job.

    Attributes:
        ledger: None when the output is stdout.
    """

    sources: list[Source]
    prompt: Prompt
    target: Target
    layout: Layout
    columns: Columns
    ledger: Ledger | None


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model without its weights."""

    name: str
    info: "ModelInfo"
    tokenizer: "Tokenizer"


@contextlib.contextmanager
def prepared(config: BatchConfig, engine: EngineConfig, params: SamplingParams) -> Iterator[Data]:
    """The files of a job, opened and locked; let go of at the end.

    Args:
        params: as far as they are known without the model.

    Raises:
        UsageError, DataError: see `target_of`, `open_inputs`, `Ledger`, `preflight.check`.
    """
    target = target_of(config)
    prompt = Prompt(config)
    columns = Columns(params, config.output_prefix)
    with contextlib.ExitStack() as stack:
        ledger = None
        if target.path is not None:
            ledger = Ledger(target.path, fresh=config.fresh)
            stack.callback(ledger.close)
            spool = ledger.directory
        else:
            spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyrig-")))
        sources = open_inputs(config, target.path, spool)
        preflight.check(sources, prompt, columns.names)
        layout = layout_of(target, sources, columns.names, columns.types())
        if ledger is not None:
            ledger.begin(
                {
                    "inputs": [s.identity() for s in sources],
                    "prompt": prompt.identity(),
                    "options": {
                        **{name: getattr(config, name) for name in _BATCH_FIELDS},
                        **{name: getattr(engine, name) for name in _ENGINE_FIELDS},
                    },
                }
            )
        yield Data(sources, prompt, target, layout, columns, ledger)


def find_model(model: str, progress: Callable[[str], None]) -> Model:
    """Raises: ModelError."""
    from anyrig.models import checkpoint, locate
    from anyrig.models.tokenizer import Tokenizer

    files = locate.resolve(model, progress=progress)
    return Model(files.name, checkpoint.read_info(files.path), Tokenizer.from_dir(files.path))


def check_model(data: Data, model: Model, config: BatchConfig, params: SamplingParams) -> Encoder:
    """Check prompt, parameters and ledger against the model.

    Raises:
        UsageError: no chat template where one is needed; the output was begun with another model or parameters.
        InvalidRequest: a grammar that can't be compiled, token ids that the model doesn't have.
    """
    from anyrig.engine.adjust import check_token_ids
    from anyrig.engine.structured import GrammarCompiler

    encoder = Encoder(data.prompt, config, model.tokenizer, model.name)
    check_token_ids(params, model.info.vocab_size)
    GrammarCompiler(model.tokenizer, model.info.vocab_size, model.info.eos_token_ids).compile(params)
    if data.ledger is not None:
        data.ledger.begin(
            {"model": f"{model.name} {model.info.version}", "parameters": _given(dataclasses.asdict(params))}
        )
    return encoder


def schema_of(value: str) -> Mapping[str, Any]:
    """The JSON schema that `--schema` gives: its text, or the name of a file.

    Raises:
        UsageError: it is neither.
    """
    text, where = value, "--schema"
    if not value.lstrip().startswith("{"):
        path = Path(value.removeprefix("@")).expanduser()
        where = f"--schema {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
            raise UsageError(f"--schema names a file that can't be read: {path} ({reason})") from None
    try:
        schema = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{where} is not JSON ({e})") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{where} must be a JSON object. Given: {text.strip()[:60]}")
    return schema


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v not in (None, (), [])}
