"""Finding the final answer in a response. The named ways take linear time on any input; a regex need not.

`whole` the response; `last_line` its last line that is not blank; `boxed` the content of the last \\boxed{…};
`tag` what stands between the last <answer> and </answer>; `after:MARK` what follows the last MARK on its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Extractor = Callable[[str], str | None]


def extractor(how: str = "whole", pattern: str | None = None) -> Extractor:
    """The function that extracts (None: no answer found). Raises ValueError on an unknown way or a broken regex."""
    if pattern is not None:
        return _by_regex(pattern)
    if how.startswith("after:") and how != "after:":
        return _after(how.removeprefix("after:"))
    if how not in _WAYS:
        raise ValueError(f"reward.options.extract: {how!r} is unknown; one of {', '.join(_WAYS)}, after:MARK")
    return _WAYS[how]


def _by_regex(pattern: str) -> Extractor:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"reward.options.pattern: {pattern!r} is not a regular expression ({error})") from error

    def find(text: str) -> str | None:
        last = None
        for last in compiled.finditer(text):  # noqa: B007 - only the last match counts
            pass
        if last is None:
            return None
        return last.group(1) if compiled.groups else last.group(0)

    return find


def _after(mark: str) -> Extractor:
    def find(text: str) -> str | None:
        _, found, rest = text.rpartition(mark)
        return rest.split("\n", 1)[0] if found else None

    return find


def _last_line(text: str) -> str | None:
    lines = text.rstrip().rsplit("\n", 1)
    return lines[-1] or None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def _tag(text: str) -> str | None:
    before, found, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer if found and opened else None


_WAYS: dict[str, Extractor] = {"whole": lambda text: text, "last_line": _last_line, "boxed": _boxed, "tag": _tag}
