"""No text has a special token inside unless that is wanted, whatever the model makes of it."""

from collections.abc import Callable
from string import ascii_letters

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.encoder import (
    CHOICES,
    ERROR,
    PLAIN,
    SPECIAL,
    ByteEncoder,
    TokenEncoder,
    listed,
    text_of_bytes,
)
from tests.support.tokenizers import llama

LETTERS = [*ascii_letters, *" <>/é"]


def byte_level() -> Tokenizer:
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    """Its model finds a special token in text like any other piece, as that of T5 does."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in LETTERS)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def one(tokenizer: Tokenizer, text: str, choice: str) -> list[int]:
    end = tokenizer.token_to_id("</s>")
    (row,) = TokenEncoder(tokenizer, [end], choice).encode([text])
    return [int(i) for i in row]


@pytest.mark.parametrize("made", [byte_level, llama, unigram])
def test_plain_text_has_no_special_tokens_and_the_ids_of_its_characters(
    made: Callable[[], Tokenizer],
) -> None:
    text, end = "bye </s> mid <s>x", made().token_to_id("</s>")
    plain, special = one(made(), text, PLAIN), one(made(), text, SPECIAL)
    assert special.count(end) == 1 and special.count(made().token_to_id("<s>")) == 1
    assert end not in plain and made().token_to_id("<s>") not in plain
    pieces = [made().id_to_token(i) for i in plain]
    if made is llama:  # which has no token for them, but their bytes
        assert [f"<0x{ord(c):02X}>" for c in "</"] == pieces[pieces.index("<0x3C>") :][:2]
    else:
        assert "".join(pieces).replace("Ġ", " ") == text
    assert one(made(), "bye", PLAIN) == one(made(), "bye", SPECIAL)


def test_plain_is_what_the_library_calls_so() -> None:
    text = "bye </s> mid <s>x"
    library = byte_level()
    library.encode_special_tokens = True
    assert one(byte_level(), text, PLAIN) == library.encode(text).ids
    assert one(byte_level(), text, SPECIAL) == byte_level().encode(text).ids


def test_the_token_that_ends_documents_is_special_whatever_its_tokenizer_says() -> None:
    added = byte_level()
    added.add_tokens(["<think>", "<end>"])
    think, end = added.token_to_id("<think>"), added.token_to_id("<end>")
    encoder = TokenEncoder(added, [end], PLAIN)
    (row,) = encoder.encode(["a<think>b<end>"])
    assert think in row and end not in row
    assert encoder.spelled("a<think>b<end>") == [("<end>", 9)]
    words = Tokenizer(models.WordLevel({"stop": 0, "a": 1}, unk_token="a"))
    with pytest.raises(DataError, match="its special token 'stop' .*--special-text special"):
        list(TokenEncoder(words, [0], PLAIN).encode(["stop"]))


def test_unknown_characters_are_no_special_tokens_unless_they_end_documents() -> None:
    assert one(unigram(), "a字", PLAIN)[-1] == 0
    ends = TokenEncoder(unigram(), [0], PLAIN)
    with pytest.raises(DataError, match="its special token '<unk>' of text that has no other ids"):
        list(ends.encode(["a字"]))


def test_a_spelling_that_appears_when_text_is_normalized() -> None:
    """NFKC makes the wide letters narrow, and the model finds the token then."""
    wide, end = "a\uff1c/s\uff1e", 2
    (row,) = TokenEncoder(unigram(), [end], SPECIAL).encode([wide])
    assert end in row, "of the model itself"
    (row,) = TokenEncoder(unigram(), [end], PLAIN).encode([wide])
    assert [unigram().id_to_token(i) for i in row] == list("a</s>")
    lower = byte_level()
    lower.normalizer = normalizers.Lowercase()
    lower.add_special_tokens([AddedToken("<eot>", special=True, normalized=True)])
    encoder = TokenEncoder(lower, [1], PLAIN)
    assert encoder.spelled("é <EOT></S></s>") == [("<eot>", 2), ("</s>", 11)]


def test_spellings_are_counted_and_refused_by_place() -> None:
    for choice in CHOICES:
        encoder = TokenEncoder(byte_level(), [1], choice)
        assert encoder.spelled("é </s><s> </s") == [("</s>", 2), ("<s>", 6)]
        place = " at character 2 (--special-text plain encodes it as text)"
        fault = ("the special token '</s>' in the text", place)
        assert encoder.refused("é </s><s>") == (fault if choice == ERROR else None)
        assert encoder.refused("é") is None and encoder.spelled("é") == []
    assert listed({"<s>": 1, "</s>": 1200}) == "1,200 '</s>', 1 '<s>'"


def test_bytes_of_a_text_with_a_nul_do_not_end_a_document() -> None:
    text = "a\0é\0"
    plain, special = ByteEncoder(PLAIN), ByteEncoder(SPECIAL)
    (row,) = plain.encode([text])
    assert bytes(row.tolist()) == b"a\xc0\x80\xc3\xa9\xc0\x80"
    assert text_of_bytes(bytes(row.tolist())) == text
    (row,) = special.encode([text])
    assert bytes(row.tolist()) == text.encode()
    assert plain.spelled(text) == [("\0", 1), ("\0", 3)] and plain.refused(text) is None
    fault = ByteEncoder(ERROR).refused(text)
    assert fault and fault[0] == "the special token '\\x00' in the text"
    assert fault[1].startswith(" at character 1 (")
