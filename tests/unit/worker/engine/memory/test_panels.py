"""The order of a weight in panels, and slabs that hold such weights."""

import pytest
import torch

from services.worker.engine.memory.layer_slab import LayerSlab, SlabLayout
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.engine.memory.panels import fits, outputs_of, panel_shape, panels_of, rows_of

CHUNK_BYTES = 1 << 16


class Numbers:
    """A source whose parameters count upwards."""

    on_device = False

    def fill(self, name: str, target: torch.Tensor) -> None:
        assert target.is_contiguous()
        target.copy_(torch.arange(target.numel()).remainder(251).view(target.shape))

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(
    ("dtype", "beside"), [(torch.int16, 2), (torch.bfloat16, 2), (torch.float32, 1)]
)
def test_each_value_has_its_documented_place(dtype: torch.dtype, beside: int) -> None:
    weight = torch.arange(128 * 6).to(dtype).view(128, 6)
    panels = panels_of(weight)
    assert panels.shape == panel_shape((128, 6), dtype) == (2, 6 // beside, 64, beside)
    for output, number in ((0, 0), (63, 5), (64, 0), (100, 3)):
        place = (output // 64, number // beside, output % 64, number % beside)
        assert panels[place] == weight[output, number]
    assert outputs_of(panels) == outputs_of(weight) == 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_read_back(dtype: torch.dtype) -> None:
    weight = torch.randn(192, 10).to(dtype)
    wanted = torch.tensor([5, 0, 191, 64, 5])
    assert torch.equal(rows_of(panels_of(weight).contiguous(), wanted), weight[wanted])


@pytest.mark.parametrize(
    ("shape", "in_bfloat16", "in_float32"),
    [((64, 2), True, True), ((63, 2), False, False), ((64, 3), False, True), ((64,), False, False)],
)
def test_supported_panel_shapes(
    shape: tuple[int, ...], in_bfloat16: bool, in_float32: bool
) -> None:
    assert fits(shape, torch.bfloat16) is in_bfloat16
    assert fits(shape, torch.float32) is in_float32


def filled(layout: SlabLayout) -> LayerSlab:
    arena = MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=4)
    slab = LayerSlab(arena, "layer 0", layout)
    slab.map()
    slab.fill_from(Numbers())
    assert slab.finish()
    return slab


def test_the_digest_of_a_slab_covers_its_panel_layout() -> None:
    shapes = [("norm", (6,)), ("w", (128, 6))]
    plain = filled(SlabLayout.of(shapes, torch.bfloat16))
    slab = filled(SlabLayout.of(shapes, torch.bfloat16, {"w"}))
    assert plain.layout.tag == b"" != slab.layout.tag
    views, expected = slab.views(), plain.views()
    assert torch.equal(views["norm"], expected["norm"])
    assert torch.equal(views["w"], panels_of(expected["w"]))
    assert slab.layout.size_bytes == plain.layout.size_bytes
    assert slab.digest != plain.digest
