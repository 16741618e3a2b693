"""Grammars are compiled beside the loop, and no request waits forever."""

import select
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Semaphore

import pytest

from services.common.clock import monotonic_s
from services.core.request import Grammar, GrammarKind, Limits, Request, Sampling
from services.core.service import Service
from services.worker.engine import grammar_check
from services.worker.engine.grammar_check import (
    COMPILE_MAX_S,
    WAIT_MAX_S,
    CheckedRequest,
    GrammarCheck,
)
from services.worker.engine.sampling.grammar import Grammars, GrammarVerdict
from tests.support.tiny_models import make_tiny_model

WAIT_S = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_model(folder, layers=1, hidden=8, heads=1, kv_heads=1)


class Gate(Grammars):
    """Compiles only while open."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, 320)
        self.open = Event()
        # Lets a single compilation pass.
        self.one = Semaphore(0)
        self.began = Semaphore(0)
        self.compiled: list[Grammar] = []

    def check(self, grammar: Grammar) -> GrammarVerdict:
        self.compiled.append(grammar)
        self.began.release()
        end_s = monotonic_s() + WAIT_S
        while not self.open.is_set() and not self.one.acquire(timeout=0.01):
            assert monotonic_s() < end_s
        return super().check(grammar)


class Bench:
    def __init__(self, model_dir: Path) -> None:
        self.now_s = 0.0
        self.grammars = Gate(model_dir)
        self.check = GrammarCheck(self.grammars, lambda: self.now_s)

    def take_when_readable(self) -> list[CheckedRequest]:
        """The checked requests once the descriptor is readable."""
        assert select.select([self.check], [], [], WAIT_S)[0], "the loop is not woken"
        return self.check.take()


@pytest.fixture
def bench(model_dir: Path) -> Iterator[Bench]:
    made = Bench(model_dir)
    yield made
    made.grammars.open.set()
    made.check.close()


def request_id_of(name: str, regex: str, owner: str = "") -> Request:
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, regex))
    return Request(name, (1,), sampling, Limits(4), 0.0, service=Service(tenant=owner))


def names(checked: list[CheckedRequest]) -> list[tuple[str, bool]]:
    return [(item.request.request_id, item.refusal is None) for item in checked]


def test_requests_are_released_once_their_grammar_is_compiled(bench: Bench) -> None:
    bench.check.submit(request_id_of("a", "a+"))
    bench.check.submit(request_id_of("b", "a+"))
    assert bench.check.take() == [] and len(bench.check) == 2
    bench.grammars.open.set()
    came = names(bench.take_when_readable())
    assert came == [("a", True), ("b", True)]
    assert len(bench.check) == 0
    bench.check.submit(request_id_of("c", "a+"))
    assert names(bench.check.take()) == [("c", True)], "it is cached: no wait"


def test_a_grammar_that_does_not_compile_is_refused(bench: Bench) -> None:
    bench.grammars.open.set()
    bench.check.submit(request_id_of("a", "a("))
    (checked,) = bench.take_when_readable()
    assert checked.refusal is not None and not checked.refusal.retryable
    assert "unclosed group" in checked.refusal.message
    bench.check.submit(request_id_of("b", "a("))
    assert names(bench.check.take()) == [("b", False)]


def test_only_the_slow_grammar_is_refused(bench: Bench) -> None:
    bench.now_s = 100.0
    bench.check.submit(request_id_of("slow", "a+"))
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    bench.now_s += 1.0
    bench.check.submit(request_id_of("innocent", "b+"))
    bench.check.submit(request_id_of("alike", "a+"))
    bench.now_s += COMPILE_MAX_S - 1.0
    blamed = {item.request.request_id: item.refusal for item in bench.check.take()}
    assert blamed.keys() == {"slow", "alike"}
    for refusal in blamed.values():
        assert refusal is not None and not refusal.retryable
        assert "within 5 s; simplify" in refusal.message
    bench.now_s += 1.0
    (late,) = bench.check.take()
    assert late.request.request_id == "innocent" and late.refusal is not None
    assert late.refusal.retryable and "simplify" not in late.refusal.message
    bench.check.submit(request_id_of("too", "a+"))
    (too,) = bench.check.take()
    assert too.refusal is not None and "simplify" in too.refusal.message


def test_time_limit_starts_with_each_grammar(bench: Bench) -> None:
    bench.check.submit(request_id_of("first", "a+"))
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    bench.now_s = WAIT_MAX_S - 1
    bench.check.submit(request_id_of("second", "b+"))
    bench.grammars.one.release()
    assert names(bench.take_when_readable()) == [("first", True)]
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    bench.now_s += COMPILE_MAX_S - 1
    assert bench.check.take() == [], "its own time is not up, nor its wait"
    bench.grammars.one.release()
    assert names(bench.take_when_readable()) == [("second", True)]


def test_unneeded_grammars_are_not_compiled(bench: Bench) -> None:
    bench.check.submit(request_id_of("first", "a+"))
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    for number in range(20):
        bench.check.submit(request_id_of(f"aborted-{number}", f"b{{{number + 1}}}"))
    bench.check.submit(request_id_of("waits", "c+"))
    for number in range(20):
        assert bench.check.abort(f"aborted-{number}")
    bench.grammars.open.set()
    came = names(bench.take_when_readable())
    while ("waits", True) not in came:
        came += names(bench.take_when_readable())
    assert came == [("first", True), ("waits", True)]
    assert [grammar.text for grammar in bench.grammars.compiled] == ["a+", "c+"]


def test_grammars_of_owners_alternate(bench: Bench) -> None:
    bench.check.submit(request_id_of("first", "a+"))
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    for number in range(5):
        bench.check.submit(request_id_of(f"loud-{number}", f"b{{{number + 1}}}", "loud"))
    bench.check.submit(request_id_of("shared", "b{4}", "quiet"))
    bench.check.submit(request_id_of("quiet", "c+", "quiet"))
    bench.grammars.open.set()
    came = []
    while len(came) < 8:
        came += names(bench.take_when_readable())
    wanted = ["a+", "b{1}", "b{4}", "b{2}", "c+", "b{3}", "b{5}"]
    assert [grammar.text for grammar in bench.grammars.compiled] == wanted
    assert all(good for _, good in came)


def test_the_descriptor_is_not_readable_once_drained(bench: Bench) -> None:
    """Otherwise the engine loop would spin."""
    bench.check.submit(request_id_of("a", "a+"))
    assert bench.grammars.began.acquire(timeout=WAIT_S)
    assert bench.check.abort("a")
    bench.grammars.open.set()
    assert bench.take_when_readable() == []
    assert not select.select([bench.check], [], [], 0)[0]


def test_an_aborted_request_is_never_released(bench: Bench) -> None:
    bench.check.submit(request_id_of("a", "a+"))
    bench.check.submit(request_id_of("b", "a+"))
    assert bench.check.abort("a")
    assert not bench.check.abort("a") and not bench.check.abort("unknown")
    bench.grammars.open.set()
    assert names(bench.take_when_readable()) == [("b", True)]


def test_a_request_aborted_in_the_turn_of_its_check_is_never_released(bench: Bench) -> None:
    bench.grammars.open.set()
    bench.check.submit(request_id_of("first", "a+"))
    assert names(bench.take_when_readable()) == [("first", True)]
    bench.check.submit(request_id_of("a", "a+"))
    bench.check.submit(request_id_of("b", "a+"))
    assert bench.check.abort("a") and not bench.check.abort("a")
    assert names(bench.check.take()) == [("b", True)]


def test_the_queue_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "WAITING_MAX", 3)
    monkeypatch.setattr(grammar_check, "WAITING_PER_TENANT_MAX", 2)
    for owner, name in (("x", "a"), ("x", "b"), ("x", "c"), ("y", "d"), ("y", "e")):
        bench.check.submit(request_id_of(name, f"{name}+", owner))
    refused = bench.check.take()
    assert names(refused) == [("c", False), ("e", False)], "of x, and of all"
    for checked in refused:
        assert checked.refusal is not None and checked.refusal.retryable
    assert bench.check.abort("a")
    bench.check.submit(request_id_of("f", "f+", "x"))
    assert bench.check.take() == []
