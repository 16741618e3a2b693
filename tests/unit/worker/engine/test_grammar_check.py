"""Grammars are compiled beside the loop, and nobody waits for ever."""

import select
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from services.core.request import Grammar, GrammarKind, Limits, Request, Sampling
from services.worker.engine import grammar_check
from services.worker.engine.grammar_check import TIMEOUT_S, Checked, GrammarCheck
from services.worker.engine.sampling.grammar import Grammars
from tests.support.tiny_models import make_tiny_model

WAIT_S = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_model(folder, layers=1, hidden=8, heads=1, kv_heads=1)


class Gate(Grammars):
    """Compiles only while it is open."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, 320)
        self.open = Event()

    def refusal(self, grammar: Grammar) -> str:
        assert self.open.wait(WAIT_S)
        return super().refusal(grammar)


class Bench:
    def __init__(self, model_dir: Path) -> None:
        self.now_s = 0.0
        self.grammars = Gate(model_dir)
        self.check = GrammarCheck(self.grammars, lambda: self.now_s)

    def until_one(self) -> list[Checked]:
        """What comes once the descriptor is readable."""
        assert select.select([self.check], [], [], WAIT_S)[0], "nobody wakes the loop"
        return self.check.take()


@pytest.fixture
def bench(model_dir: Path) -> Iterator[Bench]:
    made = Bench(model_dir)
    yield made
    made.grammars.open.set()
    made.check.close()


def request_of(name: str, regex: str) -> Request:
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, regex))
    return Request(name, (1,), sampling, Limits(4), 0.0)


def names(checked: list[Checked]) -> list[tuple[str, bool]]:
    return [(one.request.request_id, one.refusal is None) for one in checked]


def test_requests_come_out_once_their_grammar_is_compiled(bench: Bench) -> None:
    bench.check.submit(request_of("a", "a+"))
    bench.check.submit(request_of("b", "a+"))
    assert bench.check.take() == [] and len(bench.check) == 2
    bench.grammars.open.set()
    came = names(bench.until_one())
    assert came == [("a", True), ("b", True)]
    assert len(bench.check) == 0
    bench.check.submit(request_of("c", "a+"))
    assert names(bench.check.take()) == [("c", True)], "it is known: nobody waits"


def test_what_does_not_compile_is_refused(bench: Bench) -> None:
    bench.grammars.open.set()
    bench.check.submit(request_of("a", "a("))
    (checked,) = bench.until_one()
    assert checked.refusal is not None and not checked.refusal.retryable
    assert "unclosed group" in checked.refusal.message
    bench.check.submit(request_of("b", "a("))
    assert names(bench.check.take()) == [("b", False)]


def test_what_takes_too_long_is_refused(bench: Bench) -> None:
    bench.check.submit(request_of("a", "a+"))
    bench.now_s = 1.0
    bench.check.submit(request_of("b", "b+"))
    bench.now_s = TIMEOUT_S
    (checked,) = bench.check.take()
    assert names([checked]) == [("a", False)]
    assert checked.refusal is not None and "within 5 s" in checked.refusal.message
    bench.grammars.open.set()
    came: list[Checked] = []
    while not came:
        came = bench.until_one()
    assert names(came) == [("b", True)], "and what was given up does not come later"


def test_an_aborted_request_never_comes(bench: Bench) -> None:
    bench.check.submit(request_of("a", "a+"))
    bench.check.submit(request_of("b", "a+"))
    assert bench.check.abort("a")
    assert not bench.check.abort("a") and not bench.check.abort("unknown")
    bench.grammars.open.set()
    assert names(bench.until_one()) == [("b", True)]


def test_only_so_many_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "CHECKING_MAX", 2)
    for name in ("a", "b", "c"):
        bench.check.submit(request_of(name, f"{name}+"))
    (checked,) = bench.check.take()
    assert checked.request.request_id == "c"
    assert checked.refusal is not None and checked.refusal.retryable
