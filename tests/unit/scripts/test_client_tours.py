"""The runner of the tours: what it counts as a failure, and what the lists of packages hold."""

import asyncio
import json
from typing import Any

import client_tours
import pytest
import tour_environments
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tour_environments import CLIENTS
from tours import task, tour
from tours.plain import Plain
from tours.tour import REQUIRED_KINDS, Failure, Tour

CLIENT = CLIENTS[0]


def line(kind: str, ok: bool | None, client: str = CLIENT.name) -> dict[str, Any]:
    return {"client": client, "call": "c", "kind": kind, "ok": ok, "seconds": 0.1, "detail": ""}


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> Tour:
    """A tour of a server that is not there; only what needs none works."""
    monkeypatch.setenv("TOUR_CLIENT", "one")
    monkeypatch.setenv("TOUR_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(Plain, "model", "m")
    return Tour()


def recorded(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_each_client_has_a_tour_and_a_complete_list() -> None:
    for client in CLIENTS:
        assert (client_tours.ROOT / "scripts" / "tours" / f"{client.tour}.py").is_file()
        if client.name == tour_environments.VLLM:
            continue
        text = (tour_environments.LISTS / f"{client.name}.txt").read_text()
        pins = [Requirement(row) for row in text.splitlines() if row and row[0] != "#"]
        assert all([s.operator for s in pin.specifier] == ["=="] for pin in pins)
        names = [canonicalize_name(pin.name) for pin in pins]
        assert len(set(names)) == len(names)
        assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(names)


def test_calls_are_recorded_whatever_happens(
    guide: Tour, capsys: pytest.CaptureFixture[str]
) -> None:
    @guide.call("unary", "good")
    def _good() -> str:
        return "seen"

    @guide.call("unary", "bad")
    def _bad() -> None:
        tour.equal("a", "b")

    @guide.call("stream", "asynchronous")
    async def _asynchronous() -> None:
        await asyncio.sleep(0)
        raise OSError("gone")

    guide.cannot("cancel", "it has no cancel")
    found = [(one["call"], one["ok"], one["detail"]) for one in recorded(capsys)]
    assert found == [
        ("good", True, "seen"),
        ("bad", False, "Failure: text: got 'a', wanted 'b'"),
        ("asynchronous", False, "OSError: gone"),
        ("no cancel", None, "it has no cancel"),
    ]


def test_a_call_that_is_given_up_must_not_be_computed_to_its_end(
    guide: Tour, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([5, 5 + task.LONG_TOKENS, 0, task.LONG_TOKENS - 1])
    monkeypatch.setattr(guide.plain, "output_tokens", lambda: next(counts))
    monkeypatch.setattr(guide.plain, "wait_until_quiet", lambda: None)
    with pytest.raises(Failure), guide.given_up():
        pass
    with guide.given_up():
        pass


def test_values_are_checked_against_the_schema() -> None:
    tour.validate({"city": "Rome", "millions": 3}, task.CITY_SCHEMA)
    wrong: list[Any] = [
        [],
        {"city": "Rome"},
        {"city": "Oslo", "millions": 3},
        {"city": "Rome", "millions": 100},
        {"city": "Rome", "millions": True},
    ]
    for value in wrong:
        with pytest.raises(Failure):
            tour.validate(value, task.CITY_SCHEMA)


def test_a_tour_without_a_kind_or_with_few_calls_fails() -> None:
    whole = [line(kind, True) for kind in REQUIRED_KINDS] + [line("about", True)] * 4
    assert client_tours.missing(CLIENT, whole) == []
    without = [one for one in whole if one["kind"] != "cancel"] + [line("about", True)]
    (failure,) = client_tours.missing(CLIENT, without)
    assert "'cancel'" in failure["detail"] and failure["ok"] is False
    assert client_tours.missing(CLIENT, [*without, line("cancel", None)]) == []
    assert len(client_tours.missing(CLIENT, whole[1:])) == 2


def test_what_a_client_prints_is_no_line() -> None:
    whole = line("unary", True)
    assert client_tours.parse(json.dumps(whole) + "\n") == whole
    for other in ("loading…\n", "[1]\n", '{"ok": true}\n', "7"):
        assert client_tours.parse(other) is None


def test_the_table_counts_what_was_made() -> None:
    lines = [
        line("unary", True),
        line("unary", False),
        line("cancel", None),
        line("tool", True, "b"),
    ]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in client_tours.table(lines).splitlines()
    ]
    head = rows[0]
    first, second = (dict(zip(head, row, strict=True)) for row in rows[2:])
    assert (first["unary"], first["cancel"], first["tool"]) == ("1/2", "–", "")
    assert (first["calls"], first["failed"]) == ("2", "1")
    assert (second["client"], second["tool"], second["failed"]) == ("b", "1/1", "0")
