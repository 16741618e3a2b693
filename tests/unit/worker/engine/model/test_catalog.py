"""Model properties from a configuration, as its architecture reads it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.model.catalog import geometry_of
from services.worker.engine.model.config import load_config
from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("arch", "options", "windows"),
    [
        ("llama", {"sliding_window": 16}, [None, None, None]),
        ("mistral", {"sliding_window": 16}, [16, 16, 16]),
        ("mistral", {"sliding_window": None}, [None, None, None]),
        ("qwen2", {"sliding_window": 16}, [None, None, None]),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            [None, 16, 16],
        ),
        (
            "qwen3",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 16],
        ),
    ],
)
def test_sliding_windows_are_read_from_the_config(
    tmp_path: Path, arch: str, options: dict[str, Any], windows: list[int | None]
) -> None:
    folder = make_tiny_model(tmp_path, arch, **options)
    geometry = geometry_of(load_config(folder), torch.float32)
    assert list(geometry.sliding_windows) == windows
