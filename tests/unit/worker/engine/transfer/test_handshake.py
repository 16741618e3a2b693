import msgspec
import pytest

from services.common.protocol import PROTOCOL_VERSION
from services.worker.engine.transfer.errors import FrameError, LaneFull, VersionMismatch
from services.worker.engine.transfer.handshake import (
    EXPECTED_MAX,
    ExpectedPeers,
    Facts,
    Hello,
    Welcome,
    is_proven,
    proof_of,
)
from services.worker.engine.transfer.lane import Identity
from tests.support.transfer import NONCE

FACTS = Facts("a", "1", b"endpoint", 7, PROTOCOL_VERSION)
A = Identity("a", "1")
HELLO = Hello(FACTS, proof_of(Hello, FACTS, NONCE))


def test_a_nonce_authenticates_its_peer_once() -> None:
    expected = ExpectedPeers()
    expected.expect(A, NONCE, 0.0, 10.0)
    assert expected.redeem(HELLO, 1.0) == NONCE
    with pytest.raises(FrameError, match="not expected"):
        expected.redeem(HELLO, 1.0)


@pytest.mark.parametrize(
    "facts",
    [
        Facts("b", "1", b"endpoint", 7, PROTOCOL_VERSION),
        Facts("a", "2", b"endpoint", 7, PROTOCOL_VERSION),
        Facts("a", "1", b"elsewhere", 7, PROTOCOL_VERSION),
        Facts("a", "1", b"endpoint", 8, PROTOCOL_VERSION),
    ],
)
def test_a_proof_covers_all_fields_and_a_wrong_proof_consumes_nothing(facts: Facts) -> None:
    expected = ExpectedPeers()
    expected.expect(A, NONCE, 0.0, 10.0)
    with pytest.raises(FrameError):
        expected.redeem(Hello(facts, HELLO.proof), 1.0)
    assert expected.redeem(HELLO, 1.0) == NONCE


def test_a_version_mismatch_differs_from_failed_authentication() -> None:
    """Messages of releases without a version have a field less, later ones may have more."""
    earlier = msgspec.convert(["a", "1", b"endpoint", 7], Facts)
    later = msgspec.convert(["a", "1", b"endpoint", 7, PROTOCOL_VERSION + 1, "news"], Facts)
    expected = ExpectedPeers()
    expected.expect(A, NONCE, 0.0, 10.0)
    for facts, version in ((earlier, 0), (later, PROTOCOL_VERSION + 1)):
        with pytest.raises(VersionMismatch, match=f"^a speaks version {version} of"):
            expected.redeem(Hello(facts, b""), 1.0)
    assert expected.redeem(HELLO, 1.0) == NONCE


def test_an_echoed_proof_is_refused() -> None:
    assert not is_proven(Welcome(FACTS, HELLO.proof), NONCE)
    assert not is_proven(HELLO, NONCE[::-1])


def test_a_nonce_expires() -> None:
    expected = ExpectedPeers()
    expected.expect(A, NONCE, 0.0, 10.0)
    with pytest.raises(FrameError):
        expected.redeem(HELLO, 10.0)


def test_a_short_nonce_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ExpectedPeers().expect(A, b"short", 0.0, 1.0)


def test_expectations_are_bounded_and_the_oldest_are_evicted() -> None:
    expected = ExpectedPeers()
    for number in range(EXPECTED_MAX):
        expected.expect(Identity(f"w{number}", "1"), NONCE, 0.0, 10.0)
    with pytest.raises(LaneFull):
        expected.expect(A, NONCE, 1.0, 11.0)
    expected.expect(A, NONCE, 10.0, 20.0)
    assert expected.redeem(HELLO, 11.0) == NONCE
