"""Sentences of `tideserve status` about LoRA adapters."""

from collections.abc import Mapping
from typing import Any


def adapter_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each worker that loads adapters: its slots, and what loads have cost."""
    return [
        f"{row['id']} holds {row['adapters_loaded']} of {row['adapter_slots']} LoRA"
        f" adapters{_loads(row)}"
        for row in status.get("workers", [])
        if row.get("adapter_slots")
    ]


def _loads(row: Mapping[str, Any]) -> str:
    loads = row["adapter_loads_total"]
    if not loads:
        return ""
    return f"; {loads} loads took {row['adapter_load_seconds_total'] / loads:.2g} s on average"
