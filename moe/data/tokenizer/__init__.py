"""Tokenizers of data: their files, and text to ids. Imports neither torch nor Megatron-Core."""
