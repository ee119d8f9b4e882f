"""Text as its tokens come: whole characters, spaces behind a prompt, stop strings."""

import pytest

from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.text import TextStream
from tests.support.tokenizers import llama


def pieces(codec: Codec, ids: list[int], before: list[int], *stops: str) -> list[str]:
    stream = TextStream(codec, before, stops)
    return [*(stream.add(i) for i in ids if not stream.stopped), stream.end()]


def test_characters_come_whole() -> None:
    given = list("aé€".encode() + b"\xe2")
    assert pieces(Codec(None, ()), given, []) == ["a", "", "é", "", "", "€", "", "\ufffd"]


def test_a_space_behind_the_prompt_is_kept() -> None:
    """Though the decoder strips one that a text begins with."""
    codec = Codec(llama(), ())
    for prompt, text, shown in (("a b", " c d", " c d"), ("a b", "c", "c"), ("", "c é", "c é")):
        before = codec.encode(prompt)
        new = codec.encode(prompt + text)[len(before) :] if text != "c" else [262]
        assert codec.decode([262]) == "c" and "".join(pieces(codec, new, before)) == shown


def test_pieces_are_the_text_of_all_tokens_together() -> None:
    codec = Codec(llama(), ())
    text = "the cat  sat é€ on the mat, " * 8
    ids = codec.encode(text)
    for first in (0, 1, 7, 40):
        shown = "".join(pieces(codec, ids[first:], ids[:first]))
        assert shown == codec.continuation(ids[:first], ids[first:])


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("aab", ["ab"], "a"),
        ("aaab", ["aab", "b"], "a"),
        ("abc\n", ["\n\n"], "abc\n"),
        ("abcd", ["d", "bc"], "a"),
        ("stop", ["stop"], ""),
    ],
)
def test_a_text_ends_before_a_stop_string(text: str, stops: list[str], shown: str) -> None:
    found = pieces(Codec(None, ()), list(text.encode()), [], *stops)
    assert "".join(found) == shown


def test_what_may_be_a_stop_string_is_held_back() -> None:
    assert pieces(Codec(None, ()), list(b"a##b"), [], "###") == ["a", "", "", "##b", ""]
