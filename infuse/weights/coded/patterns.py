"""Patterns of regular expressions in configs: refuse those whose matching could take forever."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LONGEST = 200
_MOST_REPEATS = 6  # each multiplies the steps by the length of a name
# An escape, a class, the opening of a group, or a quantifier.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[:=!#>]|\?<[=!]|\?P?)|\{\d*,?\d*\}|.", re.DOTALL)


def pattern_fault(pattern: str) -> str | None:
    """Why a pattern is not matched: its length, or repeats within repeats; None if it is."""
    if len(pattern) > _LONGEST:
        return f"has {len(pattern)} characters; possible: up to {_LONGEST}"
    tokens = _TOKEN.findall(pattern)
    if sum(map(_repeats, tokens)) > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} repeats"
    if any(_nested(tokens)):
        return "repeats a group that has repeats or alternatives"
    return None


def _repeats(token: str) -> bool:
    return token in ("*", "+") or (token[0] == "{" and len(token) > 1)


def _nested(tokens: list[str]) -> Iterator[bool]:
    """For each group: whether it is repeated, and has repeats, options or alternatives."""
    has = [False]  # of the groups that are open
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token[0] == "(":
            has.append(False)
        elif token == ")" and len(has) > 1:
            inner = has.pop()
            yield inner and following != "" and _repeats(following)
            has[-1] = has[-1] or inner
        elif token in ("?", "|") or _repeats(token):
            has[-1] = True
