"""Stop requests: by a user, by a parent, once or twice."""

import os
import signal
from collections.abc import Iterator

import pytest

from tideserve.cli.stop_signals import StopRequested, StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    taken = StopSignals()
    taken.install()
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_signal_forces_the_stop(signals: StopSignals) -> None:
    assert not signals.stopping
    os.kill(os.getpid(), signal.SIGINT)
    assert (signals.stopping, signals.hurry) == (True, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.hurry


def test_a_signal_of_the_parent_does_not_force_the_stop(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signals.request("make was interrupted")
    assert (signals.stopping, signals.hurry) == (True, False)
    assert signals.reason == "make was interrupted"


def test_an_interruptible_step_is_cancelled(signals: StopSignals) -> None:
    with pytest.raises(StopRequested), signals.interrupting():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    with pytest.raises(StopRequested), signals.interrupting():
        pytest.fail("a stop was requested already")


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        taken = StopSignals()
        taken.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not taken.stopping
    finally:
        signal.signal(signal.SIGHUP, before)
        for number, handler in others:
            signal.signal(number, handler)
