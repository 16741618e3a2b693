"""KV is read from and written to blocks of its own request only."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from services.core.changeover.route import Transfer
from services.core.changeover.transfer_outcome import TransferStatus
from services.core.changeover.vocabulary import SendBlocks
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.worker.engine.pipeline.failpoints import ChangeFailpoints
from services.worker.engine.pipeline.kv_transfers import KvTransfers
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull, TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.pieces import KvPiece, OutgoingPiece
from tests.support.fake_model import BLOCKS, FAKE, SHAPE, load_fake

SENT = SendBlocks("t", "r", Transfer("w0", "w1", 1, 3), 3)


class Place:
    """The member's side of transfers: `expected` has the blocks of each expected transfer."""

    def __init__(self) -> None:
        self.table = StageTable(BlockPool(BLOCKS))
        self.runner = load_fake(FAKE)
        self.expected: dict[str, tuple[int, ...]] = {}
        self.pieces: list[OutgoingPiece] = []
        self.full = False
        self.transfers = KvTransfers(
            cast(Any, SimpleNamespace(kv_blocks_for=lambda name, _: self.expected.get(name, ()))),
            cast(Any, SimpleNamespace(group_id="g", epoch=4)),
            StageRunner(self.runner, self.table),
            cast(
                Any, SimpleNamespace(send=self._send, piece_bytes=lambda peer: 2 * SHAPE.size_bytes)
            ),
            ChangeFailpoints("w0"),
        )

    def _send(self, *command: Any) -> None:
        *self.command, pieces = command
        if self.full:
            raise MoverFull("4096 transfers wait")
        self.pieces = list(pieces)

    def blocks(self, layer: int) -> torch.Tensor:
        return self.runner.stage_memory.kv_ranges[layer].blocks()


def packed(piece: OutgoingPiece) -> Bytes:
    target = np.empty(piece.size_bytes, np.uint8)
    piece.pack(target)
    return target


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.runner.close()


def test_received_kv_is_stored_in_the_blocks_of_the_request(place: Place) -> None:
    other = Place()
    place.table.adopt("x", 2)
    place.table.adopt("r", 3)
    for layer in (1, 2):
        place.blocks(layer)[:] = torch.arange(BLOCKS).view(-1, 1, 1, 1, 1) + 100 * layer
    assert place.transfers.send(SENT) is None
    assert place.command == ["t", "w1", "g", 4]
    other.expected["t"] = (7, 5, 6)
    for layer in range(3):
        other.blocks(layer)[:] = 0
    for piece in place.pieces:
        other.transfers.store(cast(KvPiece, piece.header), packed(piece))
    for layer in range(3):
        markers = {i: int(block[0, 0, 0, 0]) for i, block in enumerate(other.blocks(layer))}
        stored = {7: 2, 5: 3, 6: 4} if layer else {}
        assert {i: value for i, value in markers.items() if value} == {
            block: source + 100 * layer for block, source in stored.items()
        }
    other.runner.close()


def test_a_transfer_without_a_place_fails(place: Place) -> None:
    place.table.adopt("r", 3)
    place.full = True
    outcome = place.transfers.send(SENT)
    assert outcome is not None
    assert (outcome.transfer_id, outcome.status) == ("t", TransferStatus.FAILED)


@pytest.mark.parametrize("gone", ["released", "released and restarted", "fewer"])
def test_blocks_no_longer_owned_are_not_read(place: Place, gone: str) -> None:
    place.table.adopt("r", 3)
    place.transfers.send(SENT)
    first, *rest = place.pieces
    packed(first)
    place.table.release("r")
    if gone != "released":
        place.table.adopt("x", 1)
        place.table.adopt("r", 3 if gone == "released and restarted" else 1)
    for piece in rest:
        with pytest.raises(TransferRefused, match="r is gone"):
            packed(piece)


def test_blocks_no_longer_owned_are_not_written(place: Place) -> None:
    place.blocks(1)[:] = 9
    payload = torch.zeros(2 * SHAPE.size_bytes, dtype=torch.uint8).numpy()
    piece = KvPiece("t", 1, False, "r", 1, 2, 2)
    for expected in ((), (3, 4), (3, 4, 5)):
        place.expected["t"] = expected
        with pytest.raises(TransferRefused, match="r is not expected here any more"):
            place.transfers.store(piece, payload)
    assert (place.blocks(1) == 9).all()
    place.expected["t"] = (3, 4, 5, 6)
    place.transfers.store(piece, payload)
    assert [i for i, block in enumerate(place.blocks(1)) if (block == 0).all()] == [5, 6]
