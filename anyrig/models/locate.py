"""MODEL, as a user types it -> a Transformers directory: known name, hub id, directory or .gguf file."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyrig.core.env import hub_offline
from anyrig.core.errors import ModelError
from anyrig.models import cache, checkpoint
from anyrig.models.catalog import catalog, nearest

Progress = Callable[[str], None]

WHAT_IT_CAN_BE = "MODEL is a known name ({names}), a hub id (org/name), a directory or a .gguf file"
# Weights, configuration, tokenizer; never pickles, other frameworks' weights or images.
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_HUB_IGNORE = ("onnx/*", "openvino/*", "original/*", "coreml/*", "gguf/*", "runs/*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: `path` is a directory as Transformers saves them."""

    name: str
    path: Path


def resolve(model: str, *, offline: bool = False, progress: Progress | None = None) -> ModelFiles:
    """Find `model`; fetch it and convert it first when needed.

    Args:
        model: a name that `anyrig models` lists, a hub id (`org/name`, `org/name@revision`), a directory,
            or a GGUF file. A bare name of the catalogue means that model; `./name` means the directory.
        offline: take only what is on this machine (so does HF_HUB_OFFLINE, for hub ids).
        progress: told in one sentence what is being done when it takes time.

    Raises:
        ModelError: with what is wrong and what to do.
    """
    if not model.strip():
        raise ModelError("No model was given", _what_it_can_be())
    if (entry := catalog().get(model)) is not None:
        done = cache.find(entry.name)
        if done is None and offline:
            raise ModelError(f"{model} is not in the cache", f"`anyrig pull {model}` fetches it, with a network")
        if done is None:
            from anyrig.models.pull import pull

            done = pull(entry, progress)
        return ModelFiles(model, done)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, _check_directory(path))
    if path.is_file():
        return _from_gguf(path, progress)
    if "/" not in model and (done := cache.find(model)) is not None:
        return ModelFiles(model, done)
    if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"No such file or directory: {model}", _what_it_can_be())
    if _HUB_ID.fullmatch(model):
        return ModelFiles(model, _from_hub(model, offline=offline or hub_offline(), progress=progress))
    close = nearest(model, tuple(entry.name for entry in cache.cached_models()))
    did_you_mean = f"did you mean {close}? " if close else ""
    raise ModelError(f"Unknown model: {model!r}", did_you_mean + _what_it_can_be())


def _what_it_can_be() -> str:
    return WHAT_IT_CAN_BE.format(names=", ".join(catalog()))


def _check_directory(path: Path) -> Path:
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not (path / "config.json").is_file():
        raise ModelError(f"{path} holds GGUF files, not a Transformers model", f"give the file itself: {ggufs[0]}")
    checkpoint.read_config(path)
    checkpoint.weight_files(path)
    tokenizer = (
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "spiece.model",
        "vocab.txt",
        "tokenizer_config.json",
    )
    if not any((path / name).is_file() for name in tokenizer):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json)",
            "save it into the same directory: `AutoTokenizer.from_pretrained(...).save_pretrained(DIRECTORY)`",
        )
    return path


def _from_gguf(file: Path, progress: Progress | None) -> ModelFiles:
    from anyrig.models.gguf import convert
    from anyrig.models.gguf_header import read_gguf_header

    if file.suffix != ".gguf":
        raise ModelError(f"{file} is a file, but not a .gguf", _what_it_can_be())
    stat = file.stat()
    identity = f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    name = f"{file.stem.lower()}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    if (done := cache.find(name)) is None:
        read_gguf_header(file)
        if progress:
            progress(f"converting {file.name} (once)")
        done = cache.install(name, lambda to: convert(file, to), source=str(file.resolve()), progress=progress)
    return ModelFiles(name, done)


def _from_hub(model: str, *, offline: bool, progress: Progress | None) -> Path:
    """The snapshot of `org/name[@revision]` in huggingface_hub's own cache (HF_HOME), fetched when it is not there."""
    import huggingface_hub
    from huggingface_hub import errors

    repo, _, revision = model.partition("@")
    wanted: dict[str, Any] = {
        "allow_patterns": list(_HUB_PATTERNS),
        "ignore_patterns": list(_HUB_IGNORE),
        "revision": revision or None,
    }
    try:
        path = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **wanted))
        return _check_directory(path)
    except (errors.LocalEntryNotFoundError, ModelError):
        # Not cached, or only a part of it (a configuration that another program asked for).
        if offline:
            raise ModelError(
                f"{model} is not whole in the hub cache, and fetching is off (offline, HF_HUB_OFFLINE)",
                "fetch it once with a network, or give a directory",
            ) from None
    if progress:
        progress(f"fetching {model} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}")
    try:
        path = Path(huggingface_hub.snapshot_download(repo, **wanted))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated", "accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"The hub knows no model {repo} (or HF_TOKEN may not see it)", _what_it_can_be()) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        if getattr(error, "errno", None) == 28:
            raise cache.no_space(Path(huggingface_hub.constants.HF_HUB_CACHE), "HF_HOME") from error
        raise ModelError(
            f"Cannot fetch {repo} from the hub: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            f"check the network, or use what is on this machine. {_what_it_can_be()}",
        ) from error
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{repo} has no safetensors",
            "weights as Python pickles can run code and are not fetched; of a GGUF repository, fetch one file "
            "(`hf download`) and give its path",
        )
    return _check_directory(path)
