"""JSON objects from clients: strict, since what is ambiguous is a mistake."""

import json
from typing import Any, NoReturn

from services.gateway.errors import InvalidRequest


def parse_object(
    text: bytes | bytearray | str, what: str = "the body", param: str | None = None
) -> dict[str, Any]:
    """The JSON object in `text`; a key given twice, NaN or Infinity is an error.

    `what` and `param` name it in errors.

    Raises:
        InvalidRequest: if it is anything else than one object.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        data = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{what} is not valid UTF-8; encode it as UTF-8", param=param
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{what} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno};"
            " correct it there",
            param=param,
        ) from None
    except ValueError:
        # Integers of thousands of digits; Python refuses to convert them.
        raise InvalidRequest(
            f"{what} holds a number that is too long; shorten it", param=param
        ) from None
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply; flatten it", param=param) from None
    if not isinstance(data, dict):
        raise InvalidRequest(
            f"{what} must be one JSON object; put the parameters into {{ }}", param=param
        )
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {key[:64]!a} stands twice in one object", param=None)
            seen.add(key)
    return data


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not JSON; send a finite number")
