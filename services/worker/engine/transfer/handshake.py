"""Mutual authentication of the two ends of a connection, by a nonce from the control plane.

The control plane sends both ends the same single-use nonce over its authenticated channel. Neither
end sends the nonce to the other: each sends facts about itself (`Facts`) with their HMAC under the
nonce. An eavesdropper learns nothing that it could use, and the listening end is authenticated too.
"""

import hashlib
import hmac
from dataclasses import dataclass
from threading import Lock

import msgspec

from services.common.protocol import PROTOCOL_VERSION
from services.worker.engine.transfer.errors import FrameError, LaneFull, VersionMismatch
from services.worker.engine.transfer.lane import Identity

NONCE_BYTES_MIN = 16
EXPECTED_MAX = 1024


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """The data that either end sends about itself."""

    worker_id: str
    incarnation: str
    endpoint: bytes  # UCX worker address
    tag: int  # UCX tag of frames to this end
    version: int = 0  # of the protocol between workers; 0 in releases before versions existed

    @property
    def identity(self) -> Identity:
        """The worker process at this end."""
        return Identity(self.worker_id, self.incarnation)


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message, from the dialling end."""

    facts: Facts
    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The listening end's answer to `Hello`."""

    facts: Facts
    proof: bytes


_encoder = msgspec.msgpack.Encoder()


def proof_of(kind: type[Hello] | type[Welcome], facts: Facts, nonce: bytes) -> bytes:
    """Return the HMAC of the message kind and `facts` under `nonce`."""
    # Include the kind, or an attacker could echo a Hello as a valid Welcome.
    message = kind.__name__.encode() + _encoder.encode(facts)
    return hmac.digest(nonce, message, hashlib.sha256)


def is_proven(message: Hello | Welcome, nonce: bytes) -> bool:
    """Whether the sender of the message holds the nonce."""
    return hmac.compare_digest(message.proof, proof_of(type(message), message.facts, nonce))


def check_version(facts: Facts) -> None:
    """Raise VersionMismatch unless the other end speaks this version of the protocol.

    Call this before the proof is checked: the proof of another version covers other facts.
    """
    if facts.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{facts.worker_id} speaks version {facts.version} of the protocol between workers and"
            f" this worker version {PROTOCOL_VERSION}; they connect once both run the same release"
        )


@dataclass(frozen=True, slots=True)
class _Expectation:
    nonce: bytes
    until_s: float


class ExpectedPeers:
    """The peers that may connect, each once; thread-safe, at most `EXPECTED_MAX` peers."""

    def __init__(self) -> None:
        self._expected: dict[Identity, _Expectation] = {}
        self._lock = Lock()

    def expect(self, peer: Identity, nonce: bytes, now_s: float, until_s: float) -> None:
        """Accept `peer` once until `until_s`; replaces an older nonce.

        Raises:
            LaneFull: if too many peers are expected.
            ValueError: if the nonce is too short.
        """
        if len(nonce) < NONCE_BYTES_MIN:
            raise ValueError(f"a nonce has at least {NONCE_BYTES_MIN} bytes")
        with self._lock:
            for identity, expectation in list(self._expected.items()):
                if expectation.until_s <= now_s:
                    del self._expected[identity]
            if len(self._expected) >= EXPECTED_MAX and peer not in self._expected:
                raise LaneFull(f"{EXPECTED_MAX} peers are expected already")
            self._expected[peer] = _Expectation(nonce, until_s)

    def redeem(self, hello: Hello, now_s: float) -> bytes:
        """Verify `hello`, and consume and return the nonce. Raises FrameError."""
        with self._lock:
            expectation = self._expected.get(hello.facts.identity)
            if expectation is None or expectation.until_s <= now_s:
                raise FrameError("the peer is not expected")
            check_version(hello.facts)
            # Keep the nonce after a wrong proof, or an attacker could lock the peer out.
            if not is_proven(hello, expectation.nonce):
                raise FrameError("the peer does not hold the nonce")
            del self._expected[hello.facts.identity]
            return expectation.nonce
