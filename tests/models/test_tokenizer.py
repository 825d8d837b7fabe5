"""Our tokenizer against llama.cpp's ids (kept as data) and against Transformers' own tokenizer and chat rendering."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from anyrig.core.errors import InvalidRequest, ModelError
from anyrig.models import chat_template
from anyrig.models.locate import resolve
from anyrig.models.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
ROWS = {name: json.loads((DATA / f"{name}_llamacpp_ids.json").read_text())["rows"] for name in ("smollm2", "gemma3")}
# Gemma's vocabulary holds runs of up to 31 blanks that llama.cpp takes whole, where merges (Transformers' own Gemma
# tokenizer works by them) give 16 + 24; and `</s>`, which llama.cpp joins with the blank before it.
GEMMA_DIFFERS = {" " * 40 + "x", "<|not_a_token|> <s> </s> [INST]"}
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Count: 1, 2, 3? <b>&'\" 😀"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "  and then?\n"},
]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve("smollm2-135m").path


@pytest.fixture(scope="module")
def ours(path: Path) -> Tokenizer:
    return Tokenizer.from_dir(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def test_the_data_is_varied_enough() -> None:
    assert all(len({row["text"] for row in rows}) >= 86 for rows in ROWS.values())


@pytest.mark.parametrize("row", ROWS["smollm2"], ids=lambda row: repr(row["text"][:20]))
def test_ids_equal_llamacpps(ours: Tokenizer, row: dict[str, Any]) -> None:
    assert ours.encode(row["text"]) == row["ids"]
    assert ours.decode(row["ids"]) == row["text"]


def test_gemmas_ids_equal_llamacpps() -> None:
    try:
        tokenizer = Tokenizer.from_dir(resolve("gemma3-270m", offline=True).path)
    except ModelError:
        pytest.skip("gemma3-270m is not cached (`anyrig pull gemma3-270m`, 240 MB)")
    wrong = {
        row["text"] for row in ROWS["gemma3"] if tokenizer.encode(row["text"], add_special_tokens=False) != row["ids"]
    }
    assert wrong == GEMMA_DIFFERS
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id == 2
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(CONVERSATION)


def test_encoding_and_decoding_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    for row in ROWS["smollm2"]:
        for text in (row["text"], f"<|im_start|>{row['text']}<|im_end|>"):
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (len(theirs), 1, 2)
    assert ours.special_ids == set(range(17))


@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_transformers(ours: Tokenizer, theirs: Any, prompt: bool) -> None:
    for messages in (CONVERSATION, CONVERSATION[1:], CONVERSATION[:2]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(messages, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ours.encode_chat(messages, add_generation_prompt=prompt) == ids


# What published templates use: loop controls, namespaces, tojson, macros, dates, generation marks, tools.
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.content }}]"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
    "{{ ns.n }}",
    "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}\n{{ {'ü': '<'} | tojson }}",
    "{% macro turn(m) %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endmacro %}\n"
    "{% for m in messages %}\n    {{ turn(m) }}\n{% endfor %}\n",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{{ strftime_now('%Y') }}{% if tools %}{{ tools[0].function.name }}{% endif %}{{ eos_token }}{{ extra }}",
]


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_templates_render_as_in_transformers(ours: Tokenizer, theirs: Any, template: str) -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}]
    kwargs: dict[str, Any] = {"tools": tools, "extra": "é", "add_generation_prompt": True}
    truth = theirs.apply_chat_template(CONVERSATION, chat_template=template, tokenize=False, **kwargs)
    changed = Tokenizer(ours.backend, ours.special_tokens, template)
    assert changed.render_chat(CONVERSATION, **kwargs) == truth


def test_a_template_refuses_in_its_own_words() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user must begin') }}{% endif %}"
    with pytest.raises(InvalidRequest, match="user must begin"):
        chat_template.render(template, CONVERSATION)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "broken at line 1"),
        ("{{ messages[9].content }}", "refuses this conversation"),
        ("{{ 1 // 0 }}", "fails on this conversation"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable|immutable|refuses"),
    ],
)
def test_bad_templates_are_the_requests_error(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chat_template.render(template, CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], "Message 0 is not an object with a `role`"),
        (["hello"], "Message 0 is not an object with a `role`"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "part of type 'image_url'"),
    ],
)
def test_bad_messages_are_named(ours: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ours.render_chat(messages)


def test_text_parts_become_text(ours: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours.render_chat([{"role": "user", "content": parts}]) == ours.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_token_text_keeps_the_blank_and_names_special_tokens(ours: Tokenizer) -> None:
    assert [ours.token_text(i) for i in ours.encode("Hello world 12")] == ["Hello", " world", " ", "1", "2"]
    assert ours.token_text(2) == "<|im_end|>"
    assert ours.token_text(10**6) == ""


def test_a_limit_or_padding_in_the_file_does_not_cut_prompts(path: Path, tmp_path: Path, ours: Tokenizer) -> None:
    copy = shutil.copytree(path, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    data = json.loads((copy / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (copy / "tokenizer.json").write_text(json.dumps(data))
    text = "one two three four five six"
    assert Tokenizer.from_dir(copy).encode(text) == ours.encode(text)


def test_flags_for_begin_and_end_tokens_mean_what_they_mean_in_transformers(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    for flags in ({"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"add_eos_token": False}):
        (copy / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
        theirs = AutoTokenizer.from_pretrained(copy)
        for special in (True, False):
            ids = theirs("one 2", add_special_tokens=special)["input_ids"]
            assert Tokenizer.from_dir(copy).encode("one 2", add_special_tokens=special) == ids


def test_without_tokenizer_json_transformers_converts(path: Path, tmp_path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
    assert tokenizer.eos_token_id == 2
    assert not tokenizer.has_chat_template


def test_a_directory_without_tokenizer_and_a_broken_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {')
    with pytest.raises(ModelError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
