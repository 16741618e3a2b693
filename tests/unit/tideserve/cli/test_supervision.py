"""When a dead process is restarted, and when the cluster gives up."""

from hypothesis import given
from hypothesis import strategies as st

from tideserve.cli.cluster import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    DEATHS_BEFORE_READY_MAX,
    STEADY_S,
    GiveUp,
    Restart,
    Supervision,
    describe_exit,
)


def die(supervision: Supervision, code: int, started_s: float, died_s: float) -> Restart | GiveUp:
    supervision.started("worker-0", started_s)
    return supervision.died("worker-0", code, died_s)


def test_the_pause_doubles_up_to_a_bound() -> None:
    supervision = Supervision(ready=True)
    pauses = []
    for _ in range(8):
        decision = die(supervision, 1, 0.0, 1.0)
        assert isinstance(decision, Restart)
        pauses.append(decision.delay_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_a_long_lived_process_resets_its_pause() -> None:
    supervision = Supervision(ready=True)
    die(supervision, 1, 0.0, 1.0)
    die(supervision, 1, 2.0, 3.0)
    decision = die(supervision, -9, 10.0, 10.0 + STEADY_S)
    assert decision == Restart("worker-0", 10.0 + STEADY_S + BACKOFF_FIRST_S, BACKOFF_FIRST_S)


def test_a_restart_is_due_once_after_its_pause() -> None:
    supervision = Supervision(ready=True)
    decision = die(supervision, 1, 0.0, 1.0)
    assert isinstance(decision, Restart)
    assert supervision.due(decision.at_s - 0.01) == []
    assert supervision.due(decision.at_s) == ["worker-0"]
    supervision.started("worker-0", decision.at_s)
    assert supervision.due(decision.at_s + 100) == []


def test_an_unusable_configuration_gives_up_at_once_before_readiness() -> None:
    assert die(Supervision(), 2, 0.0, 1.0) == GiveUp("worker-0", 2)
    assert isinstance(die(Supervision(ready=True), 2, 0.0, 1.0), Restart)


def test_repeated_deaths_before_readiness_give_up() -> None:
    supervision = Supervision()
    decisions = [die(supervision, -11, 0.0, 1.0) for _ in range(DEATHS_BEFORE_READY_MAX)]
    assert all(isinstance(decision, Restart) for decision in decisions[:-1])
    assert decisions[-1] == GiveUp("worker-0", 1)


def test_deaths_are_counted_by_process() -> None:
    supervision = Supervision(ready=True)
    for _ in range(3):
        die(supervision, 1, 0.0, 1.0)
    supervision.started("gateway", 0.0)
    decision = supervision.died("gateway", 1, 1.0)
    assert isinstance(decision, Restart)
    assert decision.delay_s == BACKOFF_FIRST_S


@given(st.lists(st.tuples(st.integers(-64, 255), st.floats(0, 1e4)), max_size=2000))
def test_after_readiness_every_death_is_restarted_within_the_bound(
    deaths: list[tuple[int, float]],
) -> None:
    supervision = Supervision(ready=True)
    now_s = 0.0
    for code, lived_s in deaths:
        decision = die(supervision, code, now_s, now_s + lived_s)
        assert isinstance(decision, Restart)
        assert BACKOFF_FIRST_S <= decision.delay_s <= BACKOFF_MAX_S
        now_s = decision.at_s


def test_exit_codes_are_described() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(-63) == "signal 63"
