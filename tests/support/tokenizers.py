"""Small tokenizers of the kinds that published models have."""

from tokenizers import Tokenizer, decoders, models, normalizers

_BYTES = [f"<0x{number:02X}>" for number in range(256)]


def llama(letters: str = "abcdefghijklmnopqrstuvwxyz", *more: str) -> Tokenizer:
    """SentencePiece's kind, as the tokenizer.json of Llama and Mixtral has it: a space belongs to
    the word behind it, a text begins with one that decoding strips, other bytes have tokens.

    Args:
        letters: each has a token, and another one behind a space.
        more: special tokens, besides `<unk>`, `<s>` and `</s>`, which are 0, 1 and 2.
    """
    special = ["<unk>", "<s>", "</s>", *more]
    words = [*special, *_BYTES, "▁", *letters, *(f"▁{letter}" for letter in letters)]
    made = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("▁", letter) for letter in letters],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(special)
    return made
