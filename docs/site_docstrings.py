"""Reads this package's docstrings for the reference: a griffe extension.

Habits of the code that are not Google's: a list of what a call refuses, fields of a dataclass that
are explained in a comment behind them, and an `Example` in the singular.
"""

import re
from typing import Any

import griffe

_LIST = re.compile(
    r"^(?P<title>Refused\b[^\n]*?|Not taken):(?P<rest>[^\n]*)\n(?P<body>(?:  .*\n?)+)"
)
_ITEM = re.compile(r"^  (?P<name>\S[^:\n]*): ")


class HouseStyle(griffe.Extension):
    """Makes of them what Markdown and griffe understand."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ANN401
        """Called for each object once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:  # noqa: ANN401
        """Lists its fields, and leaves out what the language defines, such as `__repr__`."""
        for name in [name for name in cls.members if re.fullmatch(r"__\w+__", name)]:
            if name != "__init__":
                cls.del_member(name)
        if cls.docstring is None:
            return
        text = cls.docstring.value
        comments = {name: comment_of(field) for name, field in cls.attributes.items()}
        known = [f"  {name}: {comment}" for name, comment in comments.items() if comment]
        if known and not re.search(r"(?m)^(Args|Attributes):$", text):
            cls.docstring.value = "\n".join([text, "", "Attributes:", *known])


def readable(text: str) -> str:
    """A docstring as griffe reads it: what is refused as a list, examples by their other name."""
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    blocks = re.split(r"(?<=\n\n)", text)
    return "".join(_LIST.sub(_as_list, _without_types(block)) for block in blocks)


def _without_types(block: str) -> str:
    """Colons under "Returns" are the sentence's: griffe would take what is before for a type."""
    if not block.startswith("Returns:\n"):
        return block
    code = re.split(r"(`[^`]*`)", block.removeprefix("Returns:\n"))
    return "Returns:\n" + "".join(p if p[:1] == "`" else p.replace(":", "&#58;") for p in code)


def _as_list(match: re.Match[str]) -> str:
    head = f"**{match['title']}:**{match['rest']}"
    items: list[str] = []
    for line in match["body"].rstrip("\n").split("\n"):
        named = _ITEM.match(line)
        if named and not line.startswith("   "):
            items.append(f"- *{named['name']}*: {line[named.end() :]}")
        elif items and line.startswith("    "):
            items.append(f"  {line.strip()}")
        else:  # a sentence that goes on
            items.append(line.strip())
    lead = [] if items and items[0].startswith("- ") else [items.pop(0)]
    ending = "\n" if match["body"].endswith("\n") else ""
    return "\n".join([" ".join([head, *lead]), "", *items]) + ending


def comment_of(field: griffe.Attribute) -> str:
    """The comment behind a public field that says nothing else; empty if there is none."""
    if field.docstring is not None or not field.lineno or field.name.startswith("_"):
        return ""
    try:
        line = field.lines_collection[field.filepath][field.lineno - 1]
    except KeyError:
        return ""
    return line.partition("  # ")[2].strip()
