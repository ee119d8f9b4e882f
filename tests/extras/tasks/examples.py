"""Rows of small tasks in the common formats."""

from typing import Any

LEARNED = "one two three four\n"
"""Text that the model has seen often enough to go on with it."""
ARC = [
    {
        "id": "1",
        "question": "What returns a value?",
        "choices": {"text": ["return x", "import names", "é", "self"], "label": list("ABCD")},
        "answerKey": "B",
    },
    {
        "id": "2",
        "question": "Which one is it?",
        "choices": {"text": ["1", "22", "three"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    {
        "id": "3",
        "question": "x is longer than the context of the model " * 4,
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "A",
    },
]
HELLASWAG = [
    {
        "activity_label": "Baking",
        "ctx_a": "[header] How to bake [title] A cake  now.",
        "ctx_b": "the man",
        "endings": [" does it. [step] Then", "stands [substeps] up.", "self is None", "ends"],
        "label": "2",
    },
    {
        "activity_label": "Code",
        "ctx_a": "def f():",
        "ctx_b": "",
        "endings": ["return", "raise an error", "self.a", "b"],
        "label": "0",
    },
]
MMLU = [
    {"question": " Is it ? ", "subject": "some_law", "choices": list("abcd"), "answer": 2},
    {"question": "And self?", "subject": "some_law", "choices": list("efgh"), "answer": 0},
    {"question": "And now?", "subject": "some_law", "choices": list("efgh"), "answer": 1},
]
MMLU_DEV = [
    {"question": f"Known {i}?", "subject": "some_law", "choices": list("pqrs"), "answer": i}
    for i in range(3)
]
# Blanks at the ends of contexts, and choices that bring their own.
CHOICES = [
    {"query": "import os \n", "choices": ["import", "def f", "return None"], "gold": 1},
    {"query": "x", "choices": ["  y", "z"], "gold": 0},
    {"query": "a = ", "choices": ["1", "[None]"], "gold": 1},
]
SCHEMA = [
    {
        "context_options": ["The self was there as the self", "The os was there as the os"],
        "continuation": "was large",
        "gold": 0,
    },
    {"context_options": ["a b", "c"], "continuation": "is it", "gold": 1},
]
CONTINUATION = [
    {"context": "one", "continuation": " two three"},
    {"context": "def ", "continuation": "__init__(self"},
    {"context": "", "continuation": "import os"},
]
TEXTS = [
    {"text": "import os\nimport sys\n\ndef f(x):\n    return x\n" * 4},
    {"text": "short é"},
]
ANSWERS = [
    {"question": "one two", "answer": "three four"},
    {"question": "def f", "answer": "x"},
    {"question": "self", "answer": 3},
]

TASKS: dict[str, list[Any]] = {
    "arc": ARC,
    "hellaswag": HELLASWAG,
    "mmlu": MMLU,
    "choices": [{"task": {"delimiter": "", "baseline": "choices"}}, *CHOICES],
    "schema": SCHEMA,
    "continuation": CONTINUATION,
    "texts": TEXTS,
    "answers": [{"task": {"max_tokens": 6, "until": ["\n", ":"]}}, *ANSWERS],
}
