"""A model directory -> Transformers' own module with its weights in place, in a fraction of a second.

Weights are mapped from the safetensors files rather than read: parameters are built on the meta device and the mapped
tensors are put in their place, so pages come in when the first forward touches them. Buffers are built for real, by
the model's own constructor, because those that are not in the file (rotary frequencies) must hold true values.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyrig.core.errors import ModelError
from anyrig.models import checkpoint


def load(path: Path, *, dtype: torch.dtype, device: str = "cpu", attn_implementation: str | None = None) -> nn.Module:
    """The causal language model in directory `path`, in eval mode, without gradients.

    Where a checkpoint's tensors do not bear the module's own names (fused experts, renamed parts), Transformers'
    slower `from_pretrained` does the same job.

    Raises:
        ModelError: a directory that is not whole, an architecture that Transformers does not have.
    """
    config = checkpoint.read_config(path)
    files = checkpoint.weight_files(path)
    cls, configuration = _model_class(config, path)
    if attn_implementation is not None:
        configuration._attn_implementation = attn_implementation
    with _parameters_on_meta(), _default_dtype(dtype), _no_initialisation():
        model = cls._from_config(configuration, dtype=dtype)
    headers = {name: entry for file in files for name, entry in checkpoint.read_header(file).items()}
    if _fits(model, headers):
        _assign(model, files, dtype, device)
        _generation_defaults(model, path)
    else:
        model = _by_transformers(cls, path, configuration, dtype, device)
    return _frozen(model)


def load_random(
    config: Path | Mapping[str, Any], *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> nn.Module:
    """A model of the given configuration (file, directory or mapping) with random weights: for tests and benchmarks.

    Raises:
        ModelError: an architecture that Transformers does not have.
    """
    if isinstance(config, Path):
        config = checkpoint.read_config(config if config.is_dir() else config.parent)
    cls, configuration = _model_class(dict(config), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls._from_config(configuration, dtype=dtype)
    return _frozen(model.to(device))


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def _model_class(config: dict[str, Any], path: Path | None) -> tuple[Any, Any]:
    """Transformers' class and configuration object for a `config.json`; only this model's code is imported."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config["model_type"]
    where = f"{path}: " if path else ""
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{where}Transformers {transformers.__version__} does not know the architecture {model_type!r}",
            "a newer Transformers may: `pip install -U transformers`"
            + (" (models that bring their own code are not run)" if "auto_map" in config else ""),
        )
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if isinstance(name, (list, tuple)):
        name = name[0]
    if name is None:
        raise ModelError(
            f"{where}{model_type!r} is not a causal language model", "anyrig runs decoders that continue text"
        )
    try:
        configuration = CONFIG_MAPPING[model_type].from_dict(config)
        return getattr(transformers, name), configuration
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{where}config.json does not fit {model_type!r}: {error}") from error


def _fits(model: Any, headers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the files' tensors are the model's own parameters and buffers, name by name and shape by shape."""
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return False
    state = model.state_dict()
    if any(name not in state or list(state[name].shape) != entry["shape"] for name, entry in headers.items()):
        return False
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return all(name in headers or name in tied for name in state)


def _assign(model: Any, files: list[Path], dtype: torch.dtype, device: str) -> None:
    from safetensors.torch import load_file

    for file in files:
        try:
            tensors = load_file(file, device=device)
        except Exception as error:  # safetensors' own error type derives from Exception directly
            raise ModelError(f"Cannot read {file}: {error}", "fetch or save the file again") from error
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        model.load_state_dict(cast, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if bare := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelError(f"The weight files hold no {', '.join(bare[:5])}", "fetch or save the model again")


def _by_transformers(cls: Any, path: Path, configuration: Any, dtype: torch.dtype, device: str) -> Any:
    from transformers.utils import logging

    shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, report = cls.from_pretrained(
            path, config=configuration, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"Transformers cannot load {path}: {error}") from error
    finally:
        logging.set_verbosity(shown)
        if bars:
            logging.enable_progress_bar()
    # Transformers would fill them with random numbers.
    if missing := sorted(report["missing_keys"]):
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(f"The weight files in {path} hold no {names}", "fetch or save the model again")
    return model.to(device)


def _generation_defaults(model: Any, path: Path) -> None:
    """`generate()` of the fallback tier and of the tests reads its end tokens here."""
    if (path / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built here have their parameters on the meta device (no memory, no initialisation) but real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _no_initialisation() -> AbstractContextManager[Any]:
    """Drawing random numbers for meta tensors yields nothing, but would take half the time of a load."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # no promise of Transformers'; without it a load is only slower
        return nullcontext()
    context: AbstractContextManager[Any] = no_init_weights()
    return context


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
