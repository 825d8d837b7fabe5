"""Incremental text equals decoding everything at once, and never shows half a character."""

from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from anyrig.engine.detokenizer import Detokenizer
from anyrig.models import locate
from anyrig.models.tokenizer import Tokenizer

UNKNOWN = 10**6  # an id that no tokenizer here has
TEXTS = [
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "日本語のテキスト、漢字かな交じり。한국어 텍스트",
    "e\u0301 combining a\u0308\u0323 z\u0335\u0336",
    "naïve café — “quotes” … ½ \u200d\u200b\ufeff",
    "  leading and trailing  \n\n\ttabs\r\n",
    "a legitimate \ufffd replacement character \ufffd\ufffd, in the middle",
    "العربية עברית हिन्दी ไทย",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒀁 \U0010ffff",
    "<|im_end|> spelled out, 3.14159 and 2026",
]


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_dir(locate.resolve("smollm2-135m").path)


@cache
def llama_like() -> Tokenizer:
    """SentencePiece BPE as Llama 2 has it: U+2581 for spaces, byte fallback, the first space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters = ["▁", *map(chr, range(33, 127)), "é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "c")]
    words += [*letters, *("".join(m) for m in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in words[:3]])
    return Tokenizer(backend, {})


def whole(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """The output's text, from decoding prompt and output at once."""
    return tokenizer.decode(prompt + output, skip)[len(tokenizer.decode(prompt, skip)) :]


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True, step: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    shown = [detokenizer.push(output[i : i + step]) for i in range(0, len(output), step)]
    shown.append(detokenizer.flush())
    assert detokenizer.text == "".join(shown)
    return shown


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [smollm2, llama_like])
def test_pieces_add_up_to_the_text_and_hold_whole_characters(make: object, text: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    prompt, ids = tokenizer.encode("The prompt:"), tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, prompt, ids)
    assert "".join(shown) == whole(tokenizer, prompt, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_text_is_shown_with_the_token_that_completes_it() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode(" the answer is yes")
    shown = pieces(tokenizer, [], ids)
    assert shown == [*(tokenizer.token_text(i) for i in ids), ""]


def test_the_space_in_front_of_an_output_depends_on_the_prompt() -> None:
    tokenizer = llama_like()
    ids = tokenizer.encode("the cat")
    assert ids[0] == tokenizer.backend.token_to_id("▁the")
    assert "".join(pieces(tokenizer, tokenizer.encode("a"), ids)) == " the cat"
    assert "".join(pieces(tokenizer, [], ids)) == "the cat"
    assert "".join(pieces(tokenizer, [1], ids)) == "the cat"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = smollm2()
    end = tokenizer.backend.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("Hi"), end, *tokenizer.encode(" there")]
    assert "".join(pieces(tokenizer, [end], ids)) == "Hi there"
    assert "".join(pieces(tokenizer, [end], ids, skip=False)) == "Hi<|im_end|> there"


def test_ids_that_the_tokenizer_does_not_know_are_no_text() -> None:
    tokenizer = smollm2()
    assert "".join(pieces(tokenizer, [], [*tokenizer.encode("a"), UNKNOWN, *tokenizer.encode("b")])) == "ab"


def test_an_unfinished_character_appears_only_at_the_end() -> None:
    tokenizer = smollm2()
    ids = [byte_token(b) for b in "ab😀".encode()]
    shown = pieces(tokenizer, [], ids[:-1])
    assert shown[-1] == "\ufffd"
    assert "".join(shown[:-1]) == "ab"
    assert "".join(pieces(tokenizer, [], ids)) == "ab😀"


def test_byte_fallback_shows_characters_as_soon_as_they_are_whole() -> None:
    tokenizer = llama_like()
    ids = [3 + b for b in "€日".encode()]
    assert pieces(tokenizer, [], ids) == ["", "", "€", "", "", "日", ""]


def test_byte_fallback_keeps_what_was_shown_when_a_later_byte_spoils_the_run() -> None:
    tokenizer = llama_like()
    ids = [3 + b for b in [*"€".encode(), 0xF0]] + tokenizer.encode(" a")
    assert "".join(pieces(tokenizer, [], ids)) == "€\ufffd a"


def test_the_window_stays_short_whatever_comes() -> None:
    tokenizer = smollm2()
    long = tokenizer.encode("word " * 300) + [byte_token(0x80)] * 300 + [byte_token(0xE2), byte_token(0x82)] * 100
    detokenizer = Detokenizer(tokenizer, long)
    for i in long:
        detokenizer.push([i])
        assert len(detokenizer._window) <= 20


@pytest.mark.parametrize("broken", [b"\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xf4"])
def test_a_character_survives_behind_any_number_of_broken_bytes(broken: bytes) -> None:
    tokenizer = smollm2()
    for count in range(40):
        ids = [byte_token(b) for b in (broken * 40)[:count] + "😀€".encode()]
        assert "".join(pieces(tokenizer, [], ids)) == whole(tokenizer, [], ids)


def test_tokens_that_never_end_with_a_character_still_show_theirs() -> None:
    # Byte-level vocabularies hold such tokens: here, two halves of different characters each.
    start, *rest = (smollm2().backend.id_to_token(byte_token(b)) or "" for b in "😀".encode())
    end = "".join(rest)
    backend = tokenizers.Tokenizer(models.WordLevel({start: 0, end + start: 1, end: 2}, unk_token=start))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([0]) == ""
    for _ in range(100):
        assert detokenizer.push([1]) == "😀"
        assert len(detokenizer._window) <= 20
    assert detokenizer.push([2]) == "😀"


@cache
def byte_token(byte: int) -> int:
    """SmolLM2's token for one byte: GPT-2's alphabet maps bytes to printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = chr(byte) if byte in printable else chr(256 + others.index(byte))
    token = smollm2().backend.token_to_id(char)
    return UNKNOWN if token is None else token


unicode_text = st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)), max_size=6).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=unicode_text, step=st.integers(1, 4), skip=st.booleans())
def test_any_text_comes_out_as_decoded_at_once(text: str, step: int, skip: bool) -> None:
    for tokenizer in (smollm2(), llama_like()):
        prompt, ids = tokenizer.encode("Prompt."), tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces(tokenizer, prompt, ids, skip, step)) == whole(tokenizer, prompt, ids, skip)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=60), step=st.integers(1, 4), skip=st.booleans())
def test_any_ids_come_out_as_decoded_at_once(ids: list[int], step: int, skip: bool) -> None:
    tokenizer = smollm2()
    prompt = tokenizer.encode("Prompt.")
    assert "".join(pieces(tokenizer, prompt, ids, skip, step)) == whole(tokenizer, prompt, ids, skip)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=80), step=st.integers(1, 3))
def test_any_bytes_come_out_as_decoded_at_once(data: bytes, step: int) -> None:
    tokenizer = smollm2()
    ids = [byte_token(b) for b in data]
    assert "".join(pieces(tokenizer, [], ids, step=step)) == whole(tokenizer, [], ids)
