"""The runner of the tours: what it counts as a failure, and what the lists of packages hold."""

import asyncio
import json
import re
from typing import Any

import client_tours
import pytest
import tour_environments
import tour_results
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tour_environments import CLIENTS
from tours import task, tour
from tours.plain import Plain
from tours.tour import REQUIRED_KINDS, Failure, Tour

from benchmarks.systems.client_environment import LISTS

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
        text = (LISTS / f"{client.name}.txt").read_text()
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


def test_a_tour_goes_on_where_its_time_was_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("TOUR_CLIENT", "one"),
        ("TOUR_URL", "http://127.0.0.1:1"),
        ("TOUR_DONE", json.dumps([["unary", "made"], ["cancel", "no cancel"]])),
        ("TOUR_SECONDS", "0"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Plain, "model", "m")
    guide = Tour()
    guide.call("unary", "made")(lambda: "again")
    guide.cannot("cancel", "it has no cancel")
    guide.cannot("tool", "it has no tools")
    with pytest.raises(SystemExit, match=str(tour.UNFINISHED)):
        guide.call("stream", "made")(lambda: "of another kind")
    assert [one["call"] for one in recorded(capsys)] == ["no tool"]


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


def test_a_refusal_by_decision_is_expected_and_names_its_page(
    guide: Tour, capsys: pytest.CaptureFixture[str]
) -> None:
    @guide.limit("images", "api.md#chat")
    def _images() -> None:
        tour.refused(lambda: int("x"), ValueError)

    @guide.limit("audio", "api.md#chat")
    async def _audio() -> None:
        tour.refused(lambda: int("1"), ValueError)

    first, second = recorded(capsys)
    assert (first["kind"], first["ok"], first["detail"]) == ("limit", True, "api.md#chat")
    assert second["ok"] is False and "no ValueError" in second["detail"]


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


def test_each_client_has_its_row_of_the_version_that_is_installed() -> None:
    rows = tour_results.rows_in(tour_results.PAGE.read_text())
    assert list(rows) == [client.name for client in CLIENTS]
    for client in CLIENTS:
        _, _, version, calls, passed, absent, _ = (
            cell.strip() for cell in rows[client.name].split("|")
        )
        assert version == tour_results.version(client), f"{client.name}: make its tour again"
        assert int(calls) == int(passed) >= client_tours.CALLS_MIN
        for page in re.findall(r"\]\(([^)#]+)#", absent):
            assert (tour_results.PAGE.parent / page).is_file()


def test_only_the_rows_of_clients_that_ran_are_written_anew() -> None:
    one, two, other = (client.name for client in (CLIENTS[0], CLIENTS[1], CLIENTS[2]))
    page = f"before\n{tour_results.HEAD}| {one} | old |\n| {two} | old |\n\nafter\n"
    limit = {**line("limit", True, other), "call": "a|b", "detail": "api.md#chat"}
    lines = [line("unary", True, two), line("unary", False, two), limit]
    told = tour_results.with_rows(page, [*lines, {**line("tool", None, two), "detail": "none"}])
    version = tour_results.version(CLIENTS[1])
    assert told.splitlines()[3:] == [
        f"| {one} | old |",
        f"| {two} | {version} | 2 | 1 | tool: none |",
        f"| {other} | {tour_results.version(CLIENTS[2])} | 1 | 1 "
        "| a\\|b: refused, see [api.md#chat](api.md#chat) |",
        "",
        "after",
    ]
    with pytest.raises(ValueError, match="no table"):
        tour_results.with_rows("nothing", lines)
