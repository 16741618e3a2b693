"""What the leader of the batches works with: runs of lines, and long tasks."""

from typing import Protocol

from services.gateway.batches.rows import BatchRow, ClaimedLine, LineResult
from services.gateway.vocabulary.errors import GatewayError


class LineRun(Protocol):
    """A run of a line as a request."""

    @property
    def placed(self) -> bool:
        """Whether a worker has been assigned."""

    @property
    def output_ids(self) -> tuple[int, ...] | None:
        """All output tokens so far; None if another run could not continue after them."""

    async def run(self, text: bytes, limit_s: float) -> LineResult:
        """Run the line `text` for at most `limit_s`. Raises GatewayError."""

    def failed(self, error: GatewayError) -> LineResult:
        """The result of a line that fails with `error`."""


class Door(Protocol):
    """Starts runs of lines."""

    def check_model(self, batch: BatchRow, model: str) -> None:
        """Raise GatewayError unless the key of the batch may use the model."""

    def tokens_max(self, batch: BatchRow) -> int | None:
        """The limit of the owner's queued tokens, None: unlimited."""

    def open(self, batch: BatchRow, line: ClaimedLine) -> LineRun:
        """A run of `line` of `batch`."""


class Jobs(Protocol):
    """Long tasks of the leader, which has `token`; each raises BatchStoreDown and Fenced."""

    async def validate(self, token: int, batch: BatchRow) -> None:
        """Read the input of a batch, and let its lines run or fail it."""

    async def write_files(self, token: int, batch: BatchRow) -> None:
        """Write the files of a batch whose lines have ended, and end it."""

    async def sweep(self, token: int) -> None:
        """Delete old batches, and objects that no file has."""
