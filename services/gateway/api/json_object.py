"""JSON objects from clients: strict, since what is ambiguous is a mistake.

Python reads a text in one go, which no other thread interrupts. So what would be millions of values
is refused before that: a text may be long, but not of many small parts.
"""

import json
import re
from typing import Any, NoReturn

from services.gateway.vocabulary.errors import BadRequest

VALUES_MAX = 2**20 + 2**16
"""Values of one text: as many token ids as a request may name, and the rest."""
PARTS_MAX = 2**16
"""Objects, lists, keys and other strings of one text, which cost ten times as much as a number."""

# The rest of a string, or some of it: no thread interrupts a match, so it ends after many escapes.
_STRING_REST = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+){0,4096}+("?)', re.DOTALL)


def parse_object(
    text: bytes | bytearray | str, what: str = "the body", param: str | None = None
) -> dict[str, Any]:
    """The JSON object in `text`; a key given twice, NaN or Infinity is an error.

    `what` and `param` name it in errors.

    Raises:
        BadRequest: if it is anything else than one object.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        if _has_many(decoded):
            raise BadRequest(
                f"{what} has more than {VALUES_MAX} values, or {PARTS_MAX} objects, lists and"
                " strings; send less at once",
                param=param,
            )
        data = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise BadRequest(f"{what} is not valid UTF-8; encode it as UTF-8", param=param) from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"{what} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno};"
            " correct it there",
            param=param,
        ) from None
    except ValueError:
        # Integers of thousands of digits; Python refuses to convert them.
        raise BadRequest(
            f"{what} holds a number that is too long; shorten it", param=param
        ) from None
    except RecursionError:
        raise BadRequest(f"{what} is nested too deeply; flatten it", param=param) from None
    if not isinstance(data, dict):
        raise BadRequest(
            f"{what} must be one JSON object; put the parameters into {{ }}", param=param
        )
    return data


def _has_many(text: str) -> bool:
    """Whether the text has more values or parts than allowed."""
    # Cheap, and enough for all but long texts.
    values, parts = _counts(text)
    if values <= VALUES_MAX and parts + text.count('"') // 2 <= PARTS_MAX:
        return False
    values, parts, end = 0, 0, 0
    while end < len(text) and values <= VALUES_MAX and parts <= PARTS_MAX:
        start = text.find('"', end)
        more_values, more_parts = _counts(text[end : start if start >= 0 else len(text)])
        values, parts = values + more_values, parts + more_parts + (start >= 0)
        end = _string_end(text, start + 1) if start >= 0 else len(text)
    return values > VALUES_MAX or parts > PARTS_MAX


def _string_end(text: str, at: int) -> int:
    """Where a string ends of which the rest is at `at`, or the text if that breaks off before."""
    while (rest := _STRING_REST.match(text, at)) is not None and rest.end() > at:
        at = rest.end()
        if rest[1]:
            return at
    return len(text)


def _counts(text: str) -> tuple[int, int]:
    """Values after the first one, and objects and lists, of a text in which no strings are."""
    return text.count(","), text.count("{") + text.count("[")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the key {key[:64]!a} stands twice in one object", param=None)
            seen.add(key)
    return data


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not JSON; send a finite number")
