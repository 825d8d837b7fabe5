"""Prompts that don't fit: what is cut is the row's longest column, and nothing else."""

import pytest

from anyrig.batch.config import BatchConfig
from anyrig.batch.prompt import Encoder, Prompt, RowProblem, RowSkipped
from anyrig.models import locate
from anyrig.models.tokenizer import Tokenizer

TEMPLATE = "Question: {{ q }}\nText: {{ text }}\nAnswer in one word."
LONG = " ".join(f"w{i}" for i in range(500))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(locate.resolve("smollm2-135m").path)


def encoder(tokenizer: Tokenizer, limit: int, **options) -> Encoder:
    config = BatchConfig(**{"prompt": TEMPLATE, **options})
    encoder = Encoder(Prompt(config), config, tokenizer, "m")
    encoder.limit = limit
    return encoder


@pytest.mark.parametrize(
    ("policy", "kept", "lost"), [("truncate-right", "w0 w1", "w499"), ("truncate-left", "w499", "w0 ")]
)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("limit", [60, 61, 62, 63, 100, 777])
def test_only_the_longest_column_is_cut_and_only_as_much_as_needed(tokenizer, policy, kept, lost, raw, limit):
    ids = encoder(tokenizer, limit, on_long=policy, raw=raw).encode({"q": "What?", "text": LONG, "other": LONG * 2})
    assert limit - 3 <= len(ids) <= limit
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "Question: What?\nText: " in text
    assert "\nAnswer in one word." in text
    assert kept in text and lost not in text
    assert text.endswith("Answer in one word." if raw else "<|im_end|>\n<|im_start|>assistant\n")


def test_characters_of_several_tokens_are_dropped_whole(tokenizer):
    for limit in range(60, 72):
        ids = encoder(tokenizer, limit, on_long="truncate-right").encode({"q": "?", "text": "🦜ჭ漢" * 300})
        assert "\ufffd" not in tokenizer.decode(ids)


def test_a_second_column_is_cut_when_the_first_is_used_up(tokenizer):
    ids = encoder(tokenizer, 60, on_long="truncate-right").encode({"q": LONG, "text": LONG})
    assert len(ids) <= 60


def test_of_a_conversation_the_last_user_message_is_cut(tokenizer):
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": LONG},
    ]
    cut = encoder(tokenizer, 100, on_long="truncate-right", prompt=None, messages_column="m")
    text = tokenizer.decode(cut.encode({"m": messages}), skip_special_tokens=False)
    assert "first" in text and "yes" in text and "w0 w1" in text and "w499" not in text
    assert messages[2]["content"] == LONG


def test_a_template_that_is_too_long_by_itself_is_the_rows_error(tokenizer):
    with pytest.raises(RowProblem, match=r"can't be cut to 60 tokens: .* are left without its columns"):
        encoder(tokenizer, 60, on_long="truncate-left", prompt=LONG + "{{ q }}").encode({"q": "x" * 500})


def test_the_other_policies_say_so(tokenizer):
    with pytest.raises(RowProblem, match=r"the prompt has 1,\d\d\d tokens, 100 fit beside the output.*truncate-right"):
        encoder(tokenizer, 100).encode({"q": "What?", "text": LONG})
    with pytest.raises(RowSkipped):
        encoder(tokenizer, 100, on_long="skip").encode({"q": "What?", "text": LONG})
    assert len(encoder(tokenizer, 100).encode({"q": "What?", "text": "short"})) < 100


def test_half_a_surrogate_pair_is_the_rows_error(tokenizer):
    with pytest.raises(RowProblem, match="surrogate"):
        encoder(tokenizer, 100).encode({"q": "\ud83d", "text": ""})
