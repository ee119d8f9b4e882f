"""Rows of prompts and answers in programs besides training: import paths of their parts."""

SUPERVISED = ("messages", "pairs")
"""Values of --rows of scripts/prepare_data.py, besides text."""

READ_TEMPLATE = "phalanx.extras.chat.template:read_template"
"""`(file, tokenizer) -> (text, tokens)` of a chat template, or DataError."""
WRITE_SHARD = "phalanx.extras.chat.shards:write_shard"
"""As `moe.data.documents.write_shard`."""
JOIN = "phalanx.extras.chat.shards:join"
"""`(shards, recipe, described, folder) -> Output`: the tokens and the loss mask of all shards."""
MASKED_TEXT = "phalanx.extras.chat.masks:masked_text"
"""`(corpus, count, position_N) -> (counted_N, position_N)` of the first tokens of a pair."""
