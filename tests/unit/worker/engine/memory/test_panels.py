"""The order of a weight in panels, and slabs that hold weights so."""

import pytest
import torch

from services.worker.engine.memory.layer_slab import LayerSlab, SlabLayout
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.panels import fits, outputs_of, panel_shape, panels_of, rows_of

CHUNK_BYTES = 1 << 16


class Numbers:
    """A source whose parameters count upwards."""

    def fill(self, name: str, target: torch.Tensor) -> None:
        assert target.is_contiguous()
        target.copy_(torch.arange(target.numel()).remainder(251).view(target.shape))

    def close(self) -> None:
        """Nothing is open."""


def test_each_value_has_its_documented_place() -> None:
    weight = torch.arange(128 * 6).view(128, 6)
    panels = panels_of(weight)
    assert panels.shape == panel_shape((128, 6)) == (2, 3, 64, 2)
    for output, number in ((0, 0), (63, 5), (64, 0), (100, 3)):
        place = (output // 64, number // 2, output % 64, number % 2)
        assert panels[place] == weight[output, number]
    assert outputs_of(panels) == outputs_of(weight) == 128


def test_rows_are_read_back() -> None:
    weight = torch.randn(192, 10)
    wanted = torch.tensor([5, 0, 191, 64, 5])
    assert torch.equal(rows_of(panels_of(weight).contiguous(), wanted), weight[wanted])


@pytest.mark.parametrize(
    ("shape", "expected"), [((64, 2), True), ((63, 2), False), ((64, 3), False), ((64,), False)]
)
def test_which_shapes_fit(shape: tuple[int, ...], expected: bool) -> None:
    assert fits(shape) is expected


def filled(layout: SlabLayout) -> LayerSlab:
    arena = MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=4)
    slab = LayerSlab(arena, "layer 0", layout)
    slab.map()
    slab.fill_from(Numbers())
    assert slab.finish()
    return slab


def test_a_slab_keeps_a_weight_in_panels_and_says_so_in_its_digest() -> None:
    shapes = [("norm", (6,)), ("w", (128, 6))]
    plain = filled(SlabLayout.of(shapes, torch.bfloat16))
    slab = filled(SlabLayout.of(shapes, torch.bfloat16, {"w"}))
    assert plain.layout.tag == b"" != slab.layout.tag
    views, expected = slab.views(), plain.views()
    assert torch.equal(views["norm"], expected["norm"])
    assert torch.equal(views["w"], panels_of(expected["w"]))
    assert slab.layout.size_bytes == plain.layout.size_bytes
    assert slab.digest != plain.digest
