"""A JSON value is scanned character by character, as `json` reads it."""

import json
from random import Random
from typing import Any

import pytest

from services.gateway.tools.json_value import DEPTH_MAX, JsonValue, Step


def scan(text: str) -> tuple[Step, str]:
    """The state at the last character, and the text in JSON form up to there."""
    value, passed, step = JsonValue(), "", Step.MORE
    for char in text:
        step = value.push(char)
        if step in (Step.WRONG, Step.PAST):
            break
        passed += value.text
        if step is Step.LAST:
            break
    return step, passed


def random_value(rng: Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(7 if depth < 4 else 5)
    match kind:
        case 0:
            return rng.choice([True, False, None])
        case 1:
            return rng.choice([0, -1, 1.5, -2e30, 10**25, 3e-9])
        case 2 | 3 | 4:
            return "".join(rng.choice('a"\\\n\té😀{}[]:,\x01') for _ in range(rng.randrange(8)))
        case 5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(n): random_value(rng, depth + 1) for n in range(rng.randrange(4))}


@pytest.mark.parametrize("seed", range(300))
def test_every_valid_value_is_scanned_to_its_end(seed: int) -> None:
    rng = Random(seed)
    value = random_value(rng)
    text = json.dumps(
        value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]), allow_nan=False
    )

    step, passed = scan(text + " x")

    assert passed.rstrip() == text
    assert step is (Step.LAST if isinstance(value, (str, list, dict)) else Step.PAST) or (
        step is Step.WRONG and not isinstance(value, (str, list, dict))
    )


@pytest.mark.parametrize("seed", range(300))
def test_mutated_values_fail_exactly_where_json_fails(seed: int) -> None:
    rng = Random(seed)
    text = json.dumps([random_value(rng)])
    at = rng.randrange(1, len(text))
    changed = text[:at] + rng.choice('{}[]",:x1-.\\eu ') + text[at + rng.randrange(2) :]

    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(changed)
    except ValueError:
        end = None
    step, passed = scan(changed)

    assert (step is Step.LAST) == (end is not None)
    assert end is None or passed == changed[:end]


@pytest.mark.parametrize(
    "text", ["01", "1.", "-", "1e", "+1", ".5", "nul", "truefalse", "'a'", "}"]
)
def test_invalid_values_are_rejected(text: str) -> None:
    assert scan(f"[{text}]")[0] is Step.WRONG


def test_control_characters_become_escapes() -> None:
    step, passed = scan('{"a": "b\n\t\x00"}')

    assert step is Step.LAST
    assert json.loads(passed) == {"a": "b\n\t\0"}


def test_the_depth_is_bounded() -> None:
    assert scan("[" * DEPTH_MAX + "]" * DEPTH_MAX)[0] is Step.LAST
    assert scan("[" * (DEPTH_MAX + 1))[0] is Step.WRONG
