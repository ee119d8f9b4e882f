"""The files of `run.tasks`, read and encoded, without torch."""

from dataclasses import asdict

from phalanx.configs import programs
from phalanx.configs.schema import Config
from phalanx.extras.tasks.formats import read_tasks
from phalanx.extras.tasks.requests import Requests, requests_of
from phalanx.moe.data.tokenizer.codec import Codec, codec_of


def prepared(cfg: Config) -> tuple[list[Requests], Codec]:
    """Requests of `run.tasks`, and the tokenizer; a DataError if they cannot be scored."""
    data = {"config": {"data": asdict(cfg.data)}}
    remedy = programs.here(
        "run.tasks needs <prefix>.tokenizer.json next to each prefix of data.blend, where "
        "prepare_data.py writes it; copy it there, or leave out run.tasks"
    )
    end = "correct that file, or leave out run.tasks"
    tasks, vocabulary = read_tasks(cfg.run.tasks), cfg.model.vocab_size
    codec = codec_of(data, vocabulary, None, remedy=remedy, end=end)
    return [requests_of(task, codec, cfg.data.sequence_length) for task in tasks], codec
