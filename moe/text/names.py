"""Short names of paths, for tables, curves and tags."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of each path that make it unique; a repeated path gets a number.

    >>> short_names(["data/a/text", "data/b/text", "code"])
    ['a/text', 'b/text', 'code']
    """
    parts = [PurePath(path).parts or (path,) for path in paths]
    most = max(map(len, parts), default=1)
    names = ["/".join(part[-1:]) for part in parts]
    for length in range(2, most + 1):
        often = Counter(names)
        names = [
            "/".join(part[-length:]) if often[name] > 1 else name
            for part, name in zip(parts, names, strict=True)
        ]
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name} ({seen[name]})"
    return names
