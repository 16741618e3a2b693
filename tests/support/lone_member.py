"""An engine's member that has no peers."""

from collections.abc import Callable
from functools import partial

from services.common.clock import monotonic_s
from services.core.changeover.state import Changeover
from services.core.planner.state import PlannerState
from services.worker.engine.compute.pacer import Pacer
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.member import Member
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.pieces import BULK_KINDS
from tests.support.local_lane import LocalNetwork


def lone_member(
    state: PlannerState,
    runner: ModelRunner,
    now_s: Callable[[], float] = monotonic_s,
    pacer: Pacer | None = None,
) -> Member:
    """A member that serves in a group of its own."""
    changeover = Changeover("w0", runner.stage_memory.num_layers, state)
    identity = Identity("w0", "w0-1")
    bulk = LocalNetwork(FrameCodec(BULK_KINDS)).lane(identity)
    gate = ActivationGate()
    return Member(
        identity,
        changeover,
        StageRunner(runner, state.table, pacer),
        Links(LocalNetwork(FrameCodec(KINDS)).lane(identity), "w0", gate),
        bulk,
        partial(Mover, bulk, gate, MoverConfig()),
        now_s,
    )
