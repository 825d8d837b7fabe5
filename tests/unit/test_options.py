"""Options made from config dataclasses: which source wins, what is refused, what `--print-config` says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml

from anyrig.cli.options import Settings, configured
from anyrig.core.config import EngineConfig, option
from anyrig.core.errors import InvalidRequest, UsageError
from anyrig.core.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    output: str | None = option("where results go", short="-o")
    limit: int = option("most rows", 10)
    internal: int = 3


def resolve(*args: str, **kwargs: Any) -> Settings:
    """The settings that a command with these arguments gets."""
    seen: list[Settings] = []

    @configured(EngineConfig, SamplingParams, JobConfig, defaults={"max_tokens": 256}, **kwargs)
    def command(settings: Settings, model: Annotated[str, typer.Argument()]) -> None:
        seen.append(settings)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    typer.main.get_command(app).main(["some-model", *args], standalone_mode=False)
    return seen[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("top_k: 5\ntemperature: 0.5\nmax-num-seqs: 7\nstop: [a, b]\n")
    return path


def test_nothing_given_means_the_defaults() -> None:
    settings = resolve()
    assert settings.given(SamplingParams) == {} == settings.given(EngineConfig)
    assert settings.build(EngineConfig) == EngineConfig()
    assert settings.build(SamplingParams) == SamplingParams(max_tokens=256)


def test_a_flag_beats_the_environment_which_beats_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_TOP_K", "6")
    monkeypatch.setenv("ANYRIG_TEMPERATURE", "0.6")
    settings = resolve("--config", str(file), "--temperature", "0.7")
    assert settings.given(SamplingParams) == {"temperature": 0.7, "top_k": 6, "stop": ("a", "b")}
    assert settings.given(EngineConfig) == {"max_num_seqs": 7}
    assert settings.sources == {
        "temperature": "flag --temperature",
        "top_k": "environment ANYRIG_TOP_K",
        "stop": f"file {file}",
        "max_num_seqs": f"file {file}",
    }


def test_the_models_own_values_beat_only_the_defaults() -> None:
    settings = resolve("--top-k", "3")
    params = settings.build(SamplingParams, {"top_k": 50, "temperature": 0.2, "max_tokens": 99, "eos_token_id": 2})
    assert (params.top_k, params.temperature, params.max_tokens) == (3, 0.2, 99)


def test_a_model_that_says_not_to_sample_is_greedy() -> None:
    greedy = {"do_sample": False, "temperature": 0.6}
    assert resolve().build(SamplingParams, greedy).greedy
    assert resolve("--temperature", "0.5").build(SamplingParams, greedy).temperature == 0.5


def test_every_kind_of_flag_reaches_its_field() -> None:
    settings = resolve(
        "--no-enable-prefix-caching", "--stop", "a", "--stop", "b", "--logit-bias", '{"7": 2}', "--max-tokens", "none",
        "--kv-cache-memory", "1GiB", "--choices", "yes,no", "-o", "x",
    )  # fmt: skip
    assert settings.build(EngineConfig).enable_prefix_caching is False
    assert settings.build(EngineConfig).kv_cache_memory == "1GiB"
    params = settings.build(SamplingParams)
    assert (params.stop, params.logit_bias, params.max_tokens) == (("a", "b"), {7: 2.0}, None)
    assert params.choices == ("yes", "no")
    assert settings.build(JobConfig) == JobConfig(output="x")


def test_a_field_without_help_is_no_option() -> None:
    assert "internal" not in resolve().options
    assert resolve().build(JobConfig).internal == 3


def test_a_skipped_field_is_no_option_either() -> None:
    assert "n" not in resolve(skip=("n",)).options


def test_a_name_that_two_classes_share_belongs_to_the_first() -> None:
    settings = resolve("--seed", "4")
    assert settings.build(EngineConfig).seed == 4
    assert settings.build(SamplingParams).seed is None


def test_an_unknown_key_in_the_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("max_sequences: 3\n")
    with pytest.raises(UsageError, match=r"unknown key `max_sequences` in .*run.yaml: did you mean `max_num_seqs`"):
        resolve("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not YAML"),
        ("- a\n- b\n", "must hold keys and values"),
        ("top_k: many\n", "`top_k in .*` must be a whole number. Given: 'many'"),
        ("max_num_seqs: null\n", "must have a value"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(UsageError, match=message):
        resolve("--config", str(tmp_path / "run.yaml"))


def test_a_missing_file_is_explained() -> None:
    with pytest.raises(UsageError, match=r"cannot be read: /nowhere.yaml \(No such file or directory\)"):
        resolve("--config", "/nowhere.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert resolve("--config", str(tmp_path / "run.yaml")).values == {}


def test_a_value_out_of_range_is_wrong_usage_and_says_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        resolve("--temperature", "-1").build(SamplingParams)
    assert caught.value.message == "`temperature` must be at least 0. Given: -1.0"
    monkeypatch.setenv("ANYRIG_PAGE_SIZE", "15")
    with pytest.raises(UsageError) as caught:
        resolve().build(EngineConfig)
    assert caught.value.hint == "`page_size` was set by environment ANYRIG_PAGE_SIZE"


def test_a_wrong_value_of_the_model_itself_is_not_called_wrong_usage() -> None:
    with pytest.raises(InvalidRequest):
        resolve().build(SamplingParams, {"top_p": 7.0})


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_TOP_P", "much")
    with pytest.raises(UsageError, match=r"`ANYRIG_TOP_P` must be a number. Given: 'much'"):
        resolve()


def test_print_config_says_who_set_what(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_THREADS", "1")
    shown = resolve("--config", str(file), "--dtype", "float32").show({"top_p": 0.9})
    lines = {line.split(":")[0]: line.split("  # ")[1] for line in shown.splitlines() if not line.startswith("#")}
    assert lines["dtype"] == "flag --dtype"
    assert lines["threads"] == "environment ANYRIG_THREADS"
    assert lines["top_k"] == f"file {file}"
    assert lines["top_p"] == "model"
    assert lines["max_tokens"] == "default"


def test_what_print_config_shows_can_be_used_as_a_config_file(tmp_path: Path) -> None:
    before = resolve("--stop", 'quote " and\nline', "--json-schema", '{"a": 1}', "--max-tokens", "none")
    (tmp_path / "shown.yaml").write_text(before.show())
    after = resolve("--config", str(tmp_path / "shown.yaml"))
    for owner in (EngineConfig, SamplingParams, JobConfig):
        assert after.build(owner) == before.build(owner)
    assert yaml.safe_load(before.show())["stop"] == ['quote " and\nline']
