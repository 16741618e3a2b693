"""Parts of Lark grammars for llguidance.

A model may have a marker such as <tool_call> as a single token, or write it as plain text.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.gateway.structure.structured_outputs import lark_literal

ANY_TEXT = "/(?s:.*)/"
"""Any text without special tokens."""

SpellMarker = Callable[[str], str]
"""Spells a marker in a grammar: as a literal, or as a token of the model."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Part of a Lark grammar: an expression, and the rules that the expression names."""

    expression: str
    rules: tuple[str, ...] = ()


def is_token(spelling: str) -> bool:
    """Return whether a marker, as spelled in a grammar, is a token rather than a literal."""
    return not spelling.startswith('"')


class Speller:
    """Spells texts in which some markers are tokens of the model."""

    def __init__(self, markers: Collection[str], spell: SpellMarker) -> None:
        self._tokens = {
            marker: spelling for marker in markers if is_token(spelling := spell(marker))
        }
        self._split = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")

    def text(self, text: str) -> str:
        """An expression that matches `text`, which is not empty."""
        parts, position = list[str](), 0
        for match in self._split.finditer(text):
            if between := text[position : match.start()]:
                parts.append(lark_literal(between))
            parts.append(self._tokens[match.group()])
            position = match.end()
        if rest := text[position:]:
            parts.append(lark_literal(rest))
        return " ".join(parts)

    def text_until(self, end: str, name: str) -> Rules:
        """Any text up to the first `end`, and `end` itself; `name` is that of the rule."""
        match = self._split.search(end)
        if match is None:
            # `ANY_TEXT` would match `end` as well, so this needs a rule that ends at the first.
            return Rules(name, (f"{name}[suffix={lark_literal(end)}]: {ANY_TEXT}",))
        before = end[: match.start()]
        # A slash would end the expression.
        escaped = re.escape(before).replace("/", r"\/")
        text = f"/(?s:.*){escaped}/"
        return Rules(f"{text} {self.text(end[match.start() :])}")
