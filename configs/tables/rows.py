"""Rows of prompts and answers in scripts/prepare_data.py: import paths of their parts."""

SUPERVISED = ("messages", "pairs")
"""Values of --rows besides text."""

READ_TEMPLATE = "phalanx.extras.chat.template:read_template"
"""`(file, tokenizer) -> (text, tokens)` of a chat template, or DataError."""
WRITE_SHARD = "phalanx.extras.chat.shards:write_shard"
"""As `moe.data.documents.write_shard`."""
JOIN = "phalanx.extras.chat.shards:join"
"""`(shards, recipe, described, folder) -> Output`: the tokens and the loss mask of all shards."""
