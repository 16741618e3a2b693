"""Events and commands of host copies: KV blocks that also lie in host memory.

A *host copy* is the KV of a full block, in all layers, in a *slot* of the host store, under the
block's hash (`core/prefix/block_hash.py`). A *save* copies a block from the device to a slot, a
*recall* a slot to a device block. The driver owns the store and copies in the background, as jobs;
the planner decides what is copied. A job always ends with `BlocksSaved` or `BlocksRecalled`,
whether it was cancelled or not: until then its slots stay reserved.

The engine may plan while a job runs, so the device block of a hash changes: before each piece the
driver asks `HostTier.block_of` under the lock that it plans under, and copies before it lets go.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# --- settings


class Save(StrEnum):
    """Which blocks are saved."""

    OFF = "off"
    BATCH = "batch"  # blocks that only the prefix cache holds, and those of batch requests
    ALL = "all"  # under pressure those of online requests, too


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a planner with host copies.

    `block_bytes`: KV of a block in all layers. `link_bytes_per_s`: bandwidth between device and
    host. Batch requests are saved once more than `save_from` of the KV blocks are in use, at up to
    `lane_share` of the bandwidth. Without `prefetch` nothing else runs during a recall.
    """

    block_bytes: int
    link_bytes_per_s: float
    save: Save = Save.BATCH
    save_from: float = 0.5
    lane_share: float = 0.5
    prefetch: bool = True


@dataclass(slots=True)
class HostCounts:
    """What host copies have done since the engine's start.

    `recalled_tokens_total` were recalled, `hit_tokens_total` of these for prompts that had not run
    here before. `failures_total` counts damaged copies and losses of the store.
    """

    saved_blocks_total: int = 0
    recalls_total: int = 0
    recalled_tokens_total: int = 0
    hit_tokens_total: int = 0
    failures_total: int = 0


# --- events


@dataclass(frozen=True, slots=True)
class HostGrown:
    """The host store has `slots` slots now; 0: it is lost, with all copies and jobs."""

    now_s: float
    slots: int


@dataclass(frozen=True, slots=True)
class HostLooked:
    """Start the saves and recalls that are due, see `HostTier.wants_a_look`.

    The jobs so far will have left the lane to the host at `lane_free_s`; `now_s` if it is free.
    """

    now_s: float
    lane_free_s: float


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """The end of a save; `intact[i]`: block i was copied completely."""

    now_s: float
    job: int
    intact: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BlocksRecalled:
    """The end of a recall; `intact[i]`: block i was copied completely, with its checksum.

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
    """Nothing needs this job any more; the driver may end it early."""

    job: int


HostCommand = SaveBlocks | RecallBlocks | CancelHostJob
