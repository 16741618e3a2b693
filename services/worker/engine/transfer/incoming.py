"""Incoming transfers: which pieces have arrived, and which transfers have ended."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from services.worker.engine.transfer.errors import TransferRefused
from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.pieces import BulkPiece
from services.worker.engine.transfer.transfer_event import ENDED_MAX

TRANSFERS_MAX = 4096
PIECES_MAX = 1 << 20

Key = tuple[str, str]  # sender's worker id, transfer id


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One transfer; `last` is the number of its last piece, None until that is known.

    The transfer fails at `until_s` unless another piece comes.
    """

    group_id: str
    epoch: int
    until_s: float = 0.0
    last: int | None = None
    highest: int = -1
    size_bytes: int = 0
    taken: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether every piece was taken."""
        return self.last is not None and len(self.taken) == self.last + 1

    def check(self, frame: Frame, piece: BulkPiece) -> None:
        """Raise TransferRefused on a piece that cannot belong to the transfer."""
        if (self.group_id, self.epoch) != (frame.group_id, frame.epoch):
            raise TransferRefused("its pieces are of different epochs")
        if not 0 <= piece.piece < PIECES_MAX:
            raise TransferRefused(f"it has a piece {piece.piece}")
        last = piece.piece if piece.last else self.last
        if self.last not in (None, last):
            raise TransferRefused("it has two last pieces")
        if last is not None and max(self.highest, piece.piece) > last:
            raise TransferRefused("it has pieces after its last one")

    def take(self, piece: BulkPiece, size_bytes: int) -> None:
        """Note that a piece is stored."""
        self.taken.add(piece.piece)
        self.highest = max(self.highest, piece.piece)
        self.size_bytes += size_bytes
        if piece.last:
            self.last = piece.piece


class IncomingTransfers:
    """Incoming transfers by sender and id, bounded; remembers the latest that ended."""

    def __init__(self) -> None:
        self._transfers: dict[Key, IncomingTransfer] = {}
        self._ended: OrderedDict[Key, bool] = OrderedDict()  # whether all of it had come
        self._ended_ids: Counter[str] = Counter()
        self._unwanted: OrderedDict[str, None] = OrderedDict()

    def under_way(self) -> list[tuple[Key, IncomingTransfer]]:
        """All transfers that have begun and not ended."""
        return list(self._transfers.items())

    def transfer_of(self, key: Key, frame: Frame) -> IncomingTransfer:
        """The transfer of a piece, made if it is the first. Raises TransferRefused."""
        transfer = self._transfers.get(key)
        if transfer is None:
            if len(self._transfers) >= TRANSFERS_MAX:
                raise TransferRefused(f"{TRANSFERS_MAX} transfers are under way")
            transfer = self._transfers[key] = IncomingTransfer(frame.group_id, frame.epoch)
        return transfer

    def end(self, key: Key, whole: bool) -> None:
        """Forget the pieces of a transfer, but remember that it has ended."""
        self._transfers.pop(key, None)
        self._ended[key] = whole
        self._ended_ids[key[1]] += 1
        while len(self._ended) > ENDED_MAX:
            (_, transfer_id), _ = self._ended.popitem(last=False)
            self._ended_ids[transfer_id] -= 1
            self._ended_ids += Counter()  # drops zeros

    def ending(self, key: Key) -> bool | None:
        """True if all pieces had come, False if the transfer was given up, None if it goes on."""
        return False if key[1] in self._unwanted else self._ended.get(key)

    def is_over(self, transfer_id: str) -> bool:
        """Whether the end of a transfer of that id, from any peer, has been reported."""
        return transfer_id in self._ended_ids or transfer_id in self._unwanted

    def refuse_later(self, transfer_id: str) -> None:
        """Refuse a transfer that has not begun yet."""
        self._unwanted[transfer_id] = None
        while len(self._unwanted) > ENDED_MAX:
            self._unwanted.popitem(last=False)
