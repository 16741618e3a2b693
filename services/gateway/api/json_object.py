"""Parses JSON objects from clients strictly; duplicate keys and NaN are errors.

`json.loads` holds the interpreter lock for the whole text, for a time that grows with the number of
values. So texts with too many values are refused before; a text may be long otherwise.
"""

import json
import re
from typing import Any, NoReturn

from services.gateway.vocabulary.errors import BadRequest

VALUES_MAX = 2**20 + 2**16
"""Maximum values of a text: the token ids that a request may have, and a margin."""
PARTS_MAX = 2**16
"""Maximum objects, lists and strings of a text; each costs ten times as much as a number."""

# The rest of a string, or a part with a bounded number of escapes: a match holds the interpreter
# lock.
_STRING_REST = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+){0,4096}+("?)', re.DOTALL)


def parse_object(
    text: bytes | bytearray | str, source: str = "the body", param: str | None = None
) -> dict[str, Any]:
    """Parse a JSON object; duplicate keys, NaN and Infinity are errors.

    `source` and `param` name the text in errors.

    Raises:
        BadRequest: if the text is not a single valid object.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        if _is_too_complex(decoded):
            raise BadRequest(
                f"{source} has more than {VALUES_MAX} values, or {PARTS_MAX} objects, lists and"
                " strings; send less per request",
                param=param,
            )
        data = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise BadRequest(f"{source} is not valid UTF-8; encode it as UTF-8", param=param) from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno};"
            " correct it there",
            param=param,
        ) from None
    except ValueError:
        # Python refuses to convert integers of thousands of digits.
        raise BadRequest(
            f"{source} has a number that is too long; shorten it", param=param
        ) from None
    except RecursionError:
        raise BadRequest(f"{source} is nested too deeply; flatten it", param=param) from None
    if not isinstance(data, dict):
        raise BadRequest(
            f"{source} must be a JSON object; put the parameters into {{ }}", param=param
        )
    return data


def _is_too_complex(text: str) -> bool:
    """Whether the text has too many values or parts."""
    # Try a cheap upper bound first, which counts characters inside strings as well.
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
    """The end of the string whose content continues at `at`; the end of the text if unclosed."""
    while (rest := _STRING_REST.match(text, at)) is not None and rest.end() > at:
        at = rest.end()
        if rest[1]:
            return at
    return len(text)


def _counts(text: str) -> tuple[int, int]:
    """The number of values after the first, and of objects and lists, in a text without strings."""
    return text.count(","), text.count("{") + text.count("[")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"an object has the duplicate key {key[:64]!a}", param=None)
            seen.add(key)
    return data


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not valid JSON; send a finite number")
