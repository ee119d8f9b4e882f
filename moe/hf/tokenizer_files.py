"""Tokenizer files of an exported folder, which `AutoTokenizer.from_pretrained` opens.

They are those of a folder that a person names, or else the tokenizer of the run's data: the copy
that prepare_data keeps, or one of bytes. Neither adds special tokens. Checks of special tokens are
those of `moe.data.tokenizer.special_tokens`, with a ConversionError.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import BYTES
from phalanx.moe.data.tokenizer import special_tokens as checks
from phalanx.moe.data.tokenizer.chat_template import template_of_data
from phalanx.moe.data.tokenizer.encoder import byte_tokenizer, load_tokenizer
from phalanx.moe.data.tokenizer.special_tokens import (
    GENERATION,
    Chosen,
    Ids,
    check_of_data,
    check_of_model,
    json_object,
    sidecars,
    tokenizer_of_data,
    tokenizers_of,
)
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.config import besides
from phalanx.moe.hf.source import read_json


@contextmanager
def _conversion() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise ConversionError(str(error)) from None


check_ids = _conversion()(checks.check_ids)
special_tokens = _conversion()(checks.special_tokens)


@_conversion()
def imported_tokens(
    folder: Path, config: dict[str, Any], vocab_size: int, chosen: Chosen | None = None
) -> dict[str, Any]:
    """Facts of a folder without a knob: special tokens, published context, generation_config.json.

    The `chosen` ids, which `config` has too, replace the folder's. Raises ConversionError if an id
    or the folder's tokenizer is outside the vocabulary.
    """
    chosen = chosen or {}
    extra = besides(config)
    check_ids("config.json", extra, vocab_size)
    fields = json_object(folder / GENERATION).items()
    generation = {n: chosen.get(n, v) for n, v in fields if chosen.get(n, v) is not None}
    check_ids(GENERATION, generation, vocab_size)
    remedy = "move its files elsewhere to import the weights alone"
    checks.check_vocabulary(folder, vocab_size, remedy)
    return extra | ({"generation_config": generation} if generation else {})


@_conversion()
def check_tokenizer(folder: Path, data: dict[str, Any], vocab_size: int) -> None:
    """Check that a folder's tokenizer is that of a run's data and model; else a ConversionError."""
    remedy = "leave --tokenizer out to export that of the data"
    if (file := folder / "tokenizer.json").is_file():
        check_of_data(file, data, remedy)
    checks.check_vocabulary(folder, vocab_size, remedy)


TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (
    TOKENIZER,
    SETTINGS,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer of an exported folder."""

    note: str  # on where it is from, or why there is none
    copied: tuple[Path, ...] = ()  # taken as they are
    tokenizer: Tokenizer | None = None
    """The tokenizer, which is written where none is copied; None if a tokenizer_config.json is."""
    pad: str | None = None  # token that its file pads with
    template: Path | None = None  # chat template of the data

    def write(self, folder: Path, ids: Ids, context: int) -> None:
        """Write the files, with a tokenizer_config.json where there is none.

        Without a padding token in `ids` the end of a text pads, as such tokens are masked. The
        `context` is in tokens.
        """
        for file in self.copied:
            shutil.copyfile(file, folder / file.name)
        if self.template is not None:
            shutil.copyfile(self.template, folder / TEMPLATE)
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
    """The files of a folder that a person names; a ConversionError if there are none to read."""
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
    """The tokenizer of a run's data, if its files are here."""
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
    template = template_of_data(data)
    note = f"tokenizer: that of the data, {name}" + ", with its chat template" * bool(template)
    return TokenizerFiles(note, tokenizer=made, pad=pad, template=template)


def _padding(path: Path) -> str | None:
    padding = read_json(path).get("padding")
    return padding.get("pad_token") if isinstance(padding, dict) else None
