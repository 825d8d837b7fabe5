"""A conversation keeps its system message, drops its oldest turns when the context is full, and survives on disk."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from anyrig.cli.conversation import Conversation
from anyrig.core.errors import DataError, InvalidRequest
from anyrig.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per word; a message costs one token for its role besides."""
    words = ["?", "user:", "assistant:", "system:", "be", "kind", *(f"w{i}" for i in range(50))]
    backend = Backend(WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    return Tokenizer(backend, {}, template)


def conversation(turns: int, system: str | None = None) -> Conversation:
    """Turns of 2 + 2 tokens each; the last question is still open."""
    out = Conversation(system)
    for i in range(turns):
        out.say("user", f"w{2 * i}")
        if i < turns - 1:
            out.say("assistant", f"w{2 * i + 1}")
    return out


def test_everything_is_sent_while_it_fits(tokenizer: Tokenizer) -> None:
    ids, dropped = conversation(3).encode(tokenizer, 11)
    assert dropped == 0
    assert tokenizer.decode(ids) == "user: w0 assistant: w1 user: w2 assistant: w3 user: w4 assistant:"


def test_the_oldest_turns_are_left_out_when_it_does_not_fit(tokenizer: Tokenizer) -> None:
    ids, dropped = conversation(3).encode(tokenizer, 10)
    assert dropped == 1
    assert tokenizer.decode(ids).split()[:2] == ["user:", "w2"]


def test_what_is_left_out_leaves_room_so_that_the_next_turns_begin_alike(tokenizer: Tokenizer) -> None:
    talk = conversation(6)
    ids, dropped = talk.encode(tokenizer, 20)
    assert dropped == 2 and len(ids) == 15, "one turn less would have left 19 of 20"
    talk.say("assistant", "w40")
    talk.say("user", "w41")
    more, dropped = talk.encode(tokenizer, 20)
    assert dropped == 0
    assert more[: len(ids)] == ids


def test_the_system_message_is_never_left_out(tokenizer: Tokenizer) -> None:
    ids, dropped = conversation(3, "be kind").encode(tokenizer, 6)
    assert dropped == 2
    assert tokenizer.decode(ids) == "system: be kind user: w4 assistant:"


def test_the_conversation_itself_is_kept_whole(tokenizer: Tokenizer) -> None:
    talk = conversation(3)
    talk.encode(tokenizer, 6)
    assert len(talk.messages) == 5


def test_a_message_that_does_not_fit_alone_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="takes 3 tokens, and the context has room for 2"):
        conversation(1).encode(tokenizer, 2)


def test_taking_an_answer_back_opens_the_question_again() -> None:
    talk = Conversation()
    assert talk.take_back_answer() is False
    talk.say("user", "a")
    talk.say("assistant", "b")
    assert talk.take_back_answer() is True
    assert talk.messages == [{"role": "user", "content": "a"}]
    assert talk.take_back_answer() is True, "a question whose answer is gone already stays open"


@pytest.mark.parametrize("name", ["talk.json", "talk.jsonl"])
def test_a_saved_conversation_can_be_loaded(name: str, tmp_path: Path) -> None:
    talk = conversation(2, "be kind")
    talk.save(tmp_path / name)
    assert Conversation.load(tmp_path / name) == talk
    assert set(json.loads((tmp_path / name).read_text())) == {"messages"}


def test_a_jsonl_file_is_a_row_for_batch(tmp_path: Path) -> None:
    conversation(2).save(tmp_path / "talk.jsonl")
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 1


def test_a_bare_list_of_messages_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"role": "user", "content": "hi", "extra": 1}]')
    assert Conversation.load(tmp_path / "x.json").messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("content", ["{", "3", "{}", '{"messages": [{"role": 1}]}', '{"messages": "hello"}'])
def test_a_file_that_holds_something_else_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        Conversation.load(tmp_path / "x.json")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        Conversation.load(tmp_path / "missing.json")
    with pytest.raises(DataError, match="Is a directory"):
        conversation(1).save(tmp_path)
