"""Adapters in `tideserve status`."""

from typing import Any

from tideserve.cli.adapter_status import adapter_lines


def row(name: str, **changes: Any) -> dict[str, Any]:
    given = {"adapter_slots": 4, "adapters_loaded": 2, "adapter_loads_total": 5}
    return {"id": name, "adapter_load_seconds_total": 1.0} | given | changes


def test_each_worker_with_slots_has_a_line() -> None:
    fresh = row("w1", adapters_loaded=0, adapter_loads_total=0)
    # An earlier memory manager reports no slots.
    rows = [row("w0"), fresh, row("w2", adapter_slots=0), {"id": "w3"}]
    assert adapter_lines({"workers": rows}) == [
        "w0 holds 2 of 4 LoRA adapters; 5 loads took 0.2 s on average",
        "w1 holds 0 of 4 LoRA adapters",
    ]
