"""Which refusals of a line limit the lines of all owners, and which pause its owner."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.common.clock import monotonic_s
from services.core.ask import Refusal, RefusalReason
from services.core.batches.window import ClaimWindow
from services.gateway.batches.leader import BatchLeader, RunningLine
from services.gateway.cluster.admission_client import refusal_error


async def read(*part: object) -> bytes:
    return b"{}"


@pytest.mark.parametrize(
    ("reason", "pauses_all"),
    [(RefusalReason.UNKNOWN_MODEL, False), (RefusalReason.QUEUE_FULL, True)],
)
async def test_a_model_without_workers_does_not_pause_the_lines_of_others(
    reason: RefusalReason, pauses_all: bool
) -> None:
    async def refuse(*arguments: object) -> None:
        raise refusal_error(Refusal("r1", reason, "refused", 10.0))

    window = ClaimWindow(64)
    stub: Any = SimpleNamespace()
    files: Any = SimpleNamespace(read=read)
    leader = BatchLeader(stub, files, stub, stub, window, stub, 1)
    leader._objects["b"] = "input"
    line: Any = SimpleNamespace(batch_id="b", line=0, offset=0, length=2, attempts=0)
    run: Any = SimpleNamespace(run=refuse, output_ids=None)
    running = RunningLine(line, run, 0.0, 0.0)
    batch: Any = SimpleNamespace(batch_id="b", owner="o", window_s=60.0)
    returned = await leader._ending(batch, running)
    assert returned.delay_s >= 10.0 and not returned.failure  # type: ignore[union-attr]
    assert (window.room(0, 0, monotonic_s()) == 0) is pauses_all
    assert ("o" in leader._paused_s) is not pauses_all
