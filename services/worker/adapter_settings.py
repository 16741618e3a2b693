"""Settings of a worker for LoRA adapters."""

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError
from services.core.engine_kind import EngineKind
from services.core.setting import number, option

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank` above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """How many adapters a worker holds, of which rank, and where their folders are."""

    adapter_slots: int = number(
        0,
        "LoRA adapters that a worker holds at once, with `engine: vllm`; 0: it loads none. Their"
        " memory comes on top of `memory_bytes`.",
        minimum=0,
        maximum=1024,
    )
    adapter_rank_max: int = number(
        16,
        f"Largest rank of an adapter: {', '.join(map(str, RANKS))}. Each slot has memory for it.",
        minimum=RANKS[0],
        maximum=RANKS[-1],
    )
    adapter_roots: tuple[str, ...] = option(
        (),
        "Folders below which adapters may lie; required with `adapter_slots`.",
        default_text="none",
    )

    @property
    def root_folders(self) -> tuple[Path, ...]:
        """`adapter_roots` as paths."""
        return tuple(Path(root) for root in self.adapter_roots)

    def check(self, engine: str) -> None:
        """Check the settings of a worker with `engine`.

        Raises:
            ConfigError: if they contradict each other or the engine.
        """
        if not self.adapter_slots:
            if self.adapter_roots:
                raise ConfigError(
                    "'adapter_roots' has no effect without 'adapter_slots'; remove it, or set"
                    " 'adapter_slots' with `engine: vllm`"
                )
            return
        if engine != EngineKind.VLLM:
            raise ConfigError(
                f"'adapter_slots' is {self.adapter_slots}, but only `engine: vllm` loads adapters;"
                " remove it, or set 'engine' to 'vllm'"
            )
        if not self.adapter_roots:
            raise ConfigError(
                "'adapter_slots' requires 'adapter_roots': set it to the folders below which"
                " adapters lie"
            )
        if self.adapter_rank_max not in RANKS:
            raise ConfigError(
                f"'adapter_rank_max' is {self.adapter_rank_max}, but vLLM supports"
                f" {', '.join(map(str, RANKS))}; choose the next larger of them"
            )
