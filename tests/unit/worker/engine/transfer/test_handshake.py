import pytest

from services.worker.engine.transfer.errors import FrameError, LaneFull
from services.worker.engine.transfer.handshake import (
    EXPECTED_MAX,
    Facts,
    GuestList,
    Hello,
    Welcome,
    is_proven,
    proof_of,
)
from services.worker.engine.transfer.lane import Identity
from tests.support.transfer import NONCE

FACTS = Facts("a", "1", b"endpoint", 7)
A = Identity("a", "1")
HELLO = Hello(FACTS, proof_of(Hello, FACTS, NONCE))


def test_a_nonce_lets_its_peer_in_once() -> None:
    guests = GuestList()
    guests.expect(A, NONCE, 0.0, 10.0)
    assert guests.redeem(HELLO, 1.0) == NONCE
    with pytest.raises(FrameError, match="not expected"):
        guests.redeem(HELLO, 1.0)


@pytest.mark.parametrize(
    "facts",
    [
        Facts("b", "1", b"endpoint", 7),
        Facts("a", "2", b"endpoint", 7),
        Facts("a", "1", b"elsewhere", 7),
        Facts("a", "1", b"endpoint", 8),
    ],
)
def test_a_proof_is_of_all_facts_and_a_wrong_one_uses_nothing_up(facts: Facts) -> None:
    guests = GuestList()
    guests.expect(A, NONCE, 0.0, 10.0)
    with pytest.raises(FrameError):
        guests.redeem(Hello(facts, HELLO.proof), 1.0)
    assert guests.redeem(HELLO, 1.0) == NONCE


def test_an_echo_is_no_answer() -> None:
    assert not is_proven(Welcome(FACTS, HELLO.proof), NONCE)
    assert not is_proven(HELLO, NONCE[::-1])


def test_a_nonce_expires() -> None:
    guests = GuestList()
    guests.expect(A, NONCE, 0.0, 10.0)
    with pytest.raises(FrameError):
        guests.redeem(HELLO, 10.0)


def test_a_short_nonce_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        GuestList().expect(A, b"short", 0.0, 1.0)


def test_expectations_are_bounded_and_old_ones_make_room() -> None:
    guests = GuestList()
    for number in range(EXPECTED_MAX):
        guests.expect(Identity(f"w{number}", "1"), NONCE, 0.0, 10.0)
    with pytest.raises(LaneFull):
        guests.expect(A, NONCE, 1.0, 11.0)
    guests.expect(A, NONCE, 10.0, 20.0)
    assert guests.redeem(HELLO, 11.0) == NONCE
