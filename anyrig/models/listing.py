"""Which models there are by name: the catalogue, anyrig's own cache, the model hub's cache, and prepared files."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from anyrig.core.errors import ModelError
from anyrig.models import cache, prepared
from anyrig.models.catalog import catalog


@dataclass(frozen=True)
class Listed:
    """One line of `anyrig models`. `path` and `bytes` are None for a known name that is not cached.

    `kept_by` is "prepared" for a file of packed weights (`prepared.py`); `kind` says how they are packed.
    """

    name: str
    path: Path | None
    bytes: int | None
    about: str
    kept_by: Literal["anyrig", "hub", "prepared"]
    kind: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": None if self.path is None else str(self.path)}


def list_models() -> list[Listed]:
    """Known names first, then other cached models, the language models of the hub's cache, and prepared files."""
    cached = {model.name: model for model in cache.cached_models()}
    rows = []
    for name, entry in catalog().items():
        model = cached.pop(name, None)
        about = f"{entry.about} ({entry.license})"
        path, size = (model.path, model.bytes) if model else (None, None)
        rows.append(Listed(name, path, size, about, "anyrig"))
    rows += [Listed(model.name, model.path, model.bytes, model.source, "anyrig") for model in cached.values()]
    return rows + _hub_models() + _prepared()


def find_cached(name: str, *, only_prepared: bool = False) -> list[Listed]:
    """What is kept under this name: the model itself (unless `only_prepared`) and its prepared files.

    Raises:
        ModelError: when there is nothing.
    """
    rows = [row for row in (_prepared() if only_prepared else list_models()) if row.name == name and row.path]
    if not rows:
        what = "prepared file is of a model" if only_prepared else "model in the cache is"
        raise ModelError(f"No {what} called {name!r}", "`anyrig models` lists them")
    return rows


def remove(model: Listed) -> None:
    """Delete a model from the cache that keeps it, or a prepared file.

    Raises:
        ModelError: when it has gone meanwhile or may not be deleted.
    """
    if model.kept_by == "anyrig":
        cache.remove(model.name)
        return
    if model.kept_by == "prepared" and model.path is not None:
        prepared.remove(model.path)
        return
    from huggingface_hub import scan_cache_dir

    if model.path is None:
        raise ModelError(f"{model.name} is not in the cache")
    info = scan_cache_dir()
    commits = [r.commit_hash for repo in info.repos if repo.repo_path == model.path for r in repo.revisions]
    with cache.writable(model.path):
        info.delete_revisions(*commits).execute()


def _hub_models() -> list[Listed]:
    from huggingface_hub import constants

    # The scan imports a lot; most machines of ours have no such cache.
    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    from huggingface_hub import scan_cache_dir

    return [
        Listed(repo.repo_id, repo.repo_path, repo.size_on_disk, "from the model hub", "hub")
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model"
        and any(file.file_name.endswith(".safetensors") for revision in repo.revisions for file in revision.files)
    ]


def _prepared() -> list[Listed]:
    return [
        Listed(
            file.model,
            file.path,
            file.bytes,
            f"prepared, {file.kind}" if file.kind else "a prepared file that cannot be read",
            "prepared",
            file.kind,
        )
        for file in prepared.prepared_files()
    ]
