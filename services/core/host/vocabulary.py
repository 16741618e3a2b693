"""Events and commands of host copies: KV blocks that also lie in host memory.

A *host copy* is the KV of a full block, in all layers, in a *slot* of the host store, under the
block's hash (`core/prefix/block_hash.py`). A *save* copies a block from the device to a slot, a
*recall* a slot to a device block. The driver owns the store and copies in the background, as jobs;
the planner decides what is copied. A job always ends with `BlocksSaved` or `BlocksRecalled`,
whether it was cancelled or not: until then its slots stay reserved.

The engine may plan while a job runs, and planning may give the device blocks of a job to others. So
the driver copies each piece under the lock of the planner, and asks `HostTier.block_of` before.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# --- settings


class Save(StrEnum):
    """The setting `save`: which blocks are saved."""

    OFF = "off"
    BATCH = "batch"  # blocks that only the prefix cache holds, and those of batch requests
    ALL = "all"  # under pressure those of online requests, too


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a planner with host copies.

    `block_bytes`: KV of a block in all layers. `link_bytes_per_s`: bandwidth between device and
    host. Running sequences are saved while more than the share `save_from` of the KV blocks is in
    use. Saves take at most the share `lane_share` of the bandwidth. Without `prefetch` nothing else
    runs during a recall.
    """

    block_bytes: int
    link_bytes_per_s: float
    save: Save = Save.BATCH
    save_from: float = 0.5
    lane_share: float = 0.5
    prefetch: bool = True


@dataclass(slots=True)
class HostCounts:
    """Totals since the engine's start.

    `hit_tokens_total`: recalled tokens of prompts that had not run here before. `failures_total`:
    damaged copies, and losses of the whole store.
    """

    saved_blocks_total: int = 0
    recalls_total: int = 0
    recalled_tokens_total: int = 0
    hit_tokens_total: int = 0
    failures_total: int = 0


# --- events


@dataclass(frozen=True, slots=True)
class HostGrown:
    """The host store has `slots` slots now; 0: the store is lost, with all copies and jobs."""

    now_s: float
    slots: int


@dataclass(frozen=True, slots=True)
class HostLooked:
    """Begin the saves and recalls that are due, see `HostTier.wants_a_look`.

    `lane_free_s`: when the lane to the host will have done all jobs so far; `now_s` if it has.
    """

    now_s: float
    lane_free_s: float


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """A save has ended; `intact[i]`: block i of the job was copied completely."""

    now_s: float
    job: int
    intact: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BlocksRecalled:
    """A recall has ended; `intact[i]`: block i was copied completely and has its checksum.

    It is False for a damaged copy, or if the pin was released. The last blocks have no entries if
    they could not be copied, for another reason than damage.
    """

    now_s: float
    job: int
    intact: tuple[bool, ...]


HostEvent = HostGrown | HostLooked | BlocksSaved | BlocksRecalled

# --- commands


class SavedBlock(NamedTuple):
    """Copy the device block with this hash to `slot`."""

    block_hash: bytes
    slot: int


class RecalledBlock(NamedTuple):
    """Copy `slot` to the device block at index `place` of the pin."""

    block_hash: bytes
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy blocks to the store, in this order."""

    job: int
    blocks: tuple[SavedBlock, ...]


@dataclass(frozen=True, slots=True)
class RecallBlocks:
    """Copy blocks from the store to those of a pin, in this order (`core/planner/pins.py`)."""

    job: int
    pin: str
    blocks: tuple[RecalledBlock, ...]


@dataclass(frozen=True, slots=True)
class CancelHostJob:
    """The result of this job is not needed any more; the driver may end the job early."""

    job: int


HostCommand = SaveBlocks | RecallBlocks | CancelHostJob
