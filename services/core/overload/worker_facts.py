"""What merge planning must know about a worker, from its registration in etcd."""

from dataclasses import dataclass

from services.core.cost.model import CostModel
from services.core.groups.layer_map import ModelShape
from services.core.overload.drop_plan import Location
from services.core.role import Role


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A registered worker: its memory, model and location."""

    worker_id: str
    model: str
    block_size: int  # tokens per KV block
    kv_blocks_total: int  # with all layers resident
    arena_bytes: int  # for parameters and KV
    shape: ModelShape | None  # sizes of the model; None: not reported, so its groups cannot merge
    location: Location
    can_drop: bool = False  # it can run a subset of the layers
    draining: bool = False  # it is shutting down
    model_digest: str = ""  # of the loaded weights
    build: str = ""  # version of the code
    settings: str = ""  # settings in which members of a group must agree
    chunk_bytes: int = 1  # parameters and the KV of a layer occupy whole chunks
    role: Role = Role.MIXED  # that the worker is configured for; MIXED: any
    hands_over: bool = False  # it can hand requests over after their prompt, and take them
    cost_model: CostModel | None = None  # of its iterations
    max_batch_tokens: int = 2048  # token budget of an iteration
