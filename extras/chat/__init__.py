"""Supervised rows: chats by a template, prompts with answers, and the loss mask of both."""
