"""Tokenizer files of an exported folder, which `AutoTokenizer.from_pretrained` opens.

They are those of a folder that a person names, or else the tokenizer of the run's data: the copy
that prepare_data keeps, or one of bytes. Ids of a text are those of prepare_data, which adds no
special tokens: neither does the tokenizer of the data, whatever its file says.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.sidecars import (
    check_of_data,
    check_of_model,
    sidecars,
    tokenizer_of_data,
    tokenizers_of,
)
from phalanx.moe.data.token_files import BYTES
from phalanx.moe.data.tokenizer.files import byte_tokenizer, load_tokenizer
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.source import read_json
from phalanx.moe.hf.tokens import Ids

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
FILES = (
    TOKENIZER,
    SETTINGS,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that are copied from a folder, if they exist."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer of an exported folder."""

    note: str
    """Line on where it is from, or why there is none."""
    copied: tuple[Path, ...] = ()
    """Files that are taken as they are."""
    tokenizer: Tokenizer | None = None
    """The tokenizer, which is written where none is copied; None if a tokenizer_config.json is."""
    pad: str | None = None
    """Token that its file pads with."""

    def write(self, folder: Path, ids: Ids, context: int) -> None:
        """Write the files, with a tokenizer_config.json where there is none.

        Args:
            folder: the exported one.
            ids: special tokens of the model; without a padding token the end of a text pads, as
                such tokens are masked.
            context: tokens of a text.
        """
        for file in self.copied:
            shutil.copyfile(file, folder / file.name)
        if self.tokenizer is None:
            return
        if not self.copied:
            (folder / TOKENIZER).write_text(self.tokenizer.to_str(pretty=True) + "\n")
        named = {}
        for name, several in ids.items():
            first = several[0] if isinstance(several, list) else several
            if (token := self.tokenizer.id_to_token(first)) is not None:
                named[name.removesuffix("_id")] = token
        if pad := named.get("pad_token") or self.pad or named.get("eos_token"):
            named["pad_token"] = pad
        settings = {
            # Classes of families build their own tokenizer beside the file's.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        }
        (folder / SETTINGS).write_text(json.dumps(settings | named, indent=2) + "\n")


def files_of_folder(folder: Path) -> TokenizerFiles:
    """The files of a folder that a person names.

    Raises:
        ConversionError: it does not exist, or has none, or one that cannot be read.
    """
    if not folder.is_dir():
        raise ConversionError(
            f"there is no folder {folder}: --tokenizer takes a local folder, not a hub's name"
        )
    files = tuple(folder / name for name in FILES if (folder / name).is_file())
    if not files:
        raise ConversionError(f"{folder} has no tokenizer files ({', '.join(FILES[:3])}, ...)")
    note = f"tokenizer: of {folder}"
    if folder / TOKENIZER not in files or folder / SETTINGS in files:
        return TokenizerFiles(note, files)
    try:
        known = load_tokenizer(str(folder / TOKENIZER))
    except DataError as error:
        raise ConversionError(str(error)) from None
    return TokenizerFiles(note, files, known, _padding(folder / TOKENIZER))


def files_of_data(data: dict[str, Any], vocab_size: int) -> TokenizerFiles:
    """The tokenizer of a run's data, if its files are here.

    Args:
        data: the data section of the run's configuration.
        vocab_size: of the model.
    """
    advice = "give --tokenizer FOLDER to export one"
    try:
        known = tokenizer_of_data(data)
        if known is None:
            names = tokenizers_of(sidecars(data))
            reason = (
                f"that of the data, {names}, is not kept next to it"
                if names
                else ("the data names none, or is not here")
            )
            return TokenizerFiles(f"no tokenizer: {reason}; {advice}")
        if known == BYTES:
            made, pad, name = byte_tokenizer(), None, "bytes of UTF-8"
        else:
            path = Path(known)
            check_of_data(path, data)
            made, pad, name = load_tokenizer(str(path)), _padding(path), str(path)
            if made.num_special_tokens_to_add(False):
                made.post_processor = None
        check_of_model(Path(name), made.get_vocab(with_added_tokens=True), vocab_size)
    except DataError as error:
        return TokenizerFiles(f"no tokenizer: {error}; {advice}")
    return TokenizerFiles(f"tokenizer: that of the data, {name}", tokenizer=made, pad=pad)


def _padding(path: Path) -> str | None:
    padding = read_json(path).get("padding")
    return padding.get("pad_token") if isinstance(padding, dict) else None
