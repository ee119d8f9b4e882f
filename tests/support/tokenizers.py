"""Small tokenizers like those of published models."""

from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, normalizers

_BYTES = [f"<0x{number:02X}>" for number in range(256)]


def llama() -> Tokenizer:
    """A SentencePiece tokenizer like those of Llama and Mixtral: a space belongs to the following
    word, a text starts with one that decoding strips, and other bytes have tokens.

    Each letter has a token, and another one with a leading space.
    """
    special, letters = ["<unk>", "<s>", "</s>"], ascii_lowercase
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
