"""JSON of clients: bodies with millions of values are refused before parsing."""

import json
from random import Random
from typing import Any

import pytest

from services.gateway.api import json_object
from services.gateway.api.json_object import PARTS_MAX, VALUES_MAX, parse_object
from services.gateway.vocabulary.errors import BadRequest


def refused(text: bytes | str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the body is refused before parsing."""
    read = list[str]()
    monkeypatch.setattr(json_object.json, "loads", lambda text, **_: read.append(text) or {})
    try:
        parse_object(text)
    except BadRequest as error:
        assert "send less per request" in error.message
        return True
    finally:
        monkeypatch.undo()
        assert len(read) <= 1
    return False


@pytest.mark.parametrize(
    ("begin", "again", "end", "most"),
    [
        (b'{"a":[1', b",1", b"]}", VALUES_MAX),
        (b'{"a":[[]', b",[]", b"]}", PARTS_MAX - 4),
        (b'{"a":[{}', b",{}", b"]}", PARTS_MAX - 4),
        (b'{"a":[""', b',""', b"]}", PARTS_MAX - 4),
        (b'{"a":1', b',"b":1', b"}", PARTS_MAX - 2),
    ],
)
def test_small_values_are_limited_in_number(
    begin: bytes, again: bytes, end: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not refused(begin + again * most + end, monkeypatch)
    assert refused(begin + again * (most + 1) + end, monkeypatch)


@pytest.mark.parametrize("again", ["[", "{,", ",", '\\"', "\\\\", '\\",['])
def test_brackets_in_strings_are_not_counted(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = again * (2 * VALUES_MAX // len(again) + 1)
    assert not refused(f'{{"a":"{text}"}}', monkeypatch)
    # Also in one that breaks off.
    assert not refused(f'{{"a":"{text}', monkeypatch)


def parts_of(value: Any) -> int:
    """Objects, lists, keys and strings."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(parts_of, value))
    return isinstance(value, str)


def random_json(rng: Random, depth: int) -> Any:
    """A random value with arbitrary strings."""
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return rng.randrange(10)
    if kind < 3:
        return "".join(rng.choices('",[]{}:\\ a\né', k=rng.randrange(8)))
    inner = [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if kind == 3 else {f'{place}"': value for place, value in enumerate(inner)}


@pytest.mark.parametrize("seed", range(60))
def test_counts_are_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"a": [random_json(Random(seed), 4)]}
    text, parts = json.dumps(data), parts_of(data)
    monkeypatch.setattr(json_object, "PARTS_MAX", parts)
    assert parse_object(text) == data
    monkeypatch.setattr(json_object, "PARTS_MAX", parts - 1)
    with pytest.raises(BadRequest, match="send less"):
        parse_object(text)
