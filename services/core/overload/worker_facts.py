"""What a worker's registration says about its memory."""

from dataclasses import dataclass

from services.core.groups.layer_map import ModelShape
from services.core.overload.drop_plan import Location


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A registered worker. `kv_blocks_total` is what it has with all layers.

    `shape` is None if the worker does not report it; then its groups cannot be planned for.
    `can_drop`: whether it can run part of the layers. `draining`: it is leaving.
    `build`: what code it runs. `settings`: the settings in which the members of a group must agree.
    """

    worker_id: str
    model: str
    block_size: int
    kv_blocks_total: int
    arena_bytes: int
    shape: ModelShape | None
    location: Location
    can_drop: bool = False
    draining: bool = False
    model_digest: str = ""
    build: str = ""
    settings: str = ""
