"""Small tokenizers like those of published models."""

from tokenizers import Tokenizer, decoders, models, normalizers

_BYTES = [f"<0x{number:02X}>" for number in range(256)]


def llama(letters: str = "abcdefghijklmnopqrstuvwxyz", *more: str) -> Tokenizer:
    """A SentencePiece tokenizer like those of Llama and Mixtral: a space belongs to the following
    word, a text starts with one that decoding strips, and other bytes have tokens.

    Args:
        letters: each has a token, and another one with a leading space.
        more: special tokens, besides `<unk>`, `<s>` and `</s>`, which are 0, 1 and 2.
    """
    special = ["<unk>", "<s>", "</s>", *more]
    words = [*special, *_BYTES, "▁", *letters, *(f"▁{letter}" for letter in letters)]
    tokenizer = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("▁", letter) for letter in letters],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer
