"""Runs a decoder-only model with parameters and KV cache in the engine's memory arena.

The layers are built without weights. All parameters are views of *slabs*, the memory areas with the
parameters of a layer, of the embeddings or of the head. A slab is *resident* while it has them.
*Panels* are a packed layout of weights for matrix products on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from services.core.groups.slab_names import EMBEDDING, HEAD, NORM, layer_name
from services.worker.engine.memory.kv_range import KvRange
from services.worker.engine.memory.layer_slab import LayerSlab, SlabLayout
from services.worker.engine.memory.panels import fits, in_panels, rows_of
from services.worker.engine.model.attention.paged import AttentionMetadata, PagedAttention
from services.worker.engine.model.fused_layer import cpu_layers, fused_layer
from services.worker.engine.model.interrupt import Interrupted
from services.worker.engine.model.linear import Float32RmsNorm, SlabLinear, UpcastScratch
from services.worker.engine.model.modules import EagerRmsNorm, Skeleton
from services.worker.engine.model.rope import rotary_of


def slab_layouts(
    skeleton: Skeleton, dtype: torch.dtype, *, panels: bool, biases_last: bool = False
) -> dict[str, SlabLayout]:
    """Return the layouts by slab name, in order of execution; tensors have checkpoint names.

    A tied head has no weight of its own, so its slab only holds the final norm. `panels`: pack the
    matrices of a slab in panels if all of them have suitable shapes. `biases_last`: place biases
    after all weights, so that adjacent weights can be fused into a single product.
    """
    tied = skeleton.config.tie_word_embeddings
    multiplied = {
        f"{name}.weight"
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) or (tied and name == EMBEDDING)
    }

    def layout(*modules: str) -> SlabLayout:
        # The order of parameters in the skeleton defines the layout, hence the digest.
        shapes = {
            f"{module}.{name}": tuple(parameter.shape)
            for module in modules
            for name, parameter in skeleton.get_submodule(module).named_parameters()
        }
        if biases_last:
            shapes = dict(sorted(shapes.items(), key=lambda named: named[0].endswith(".bias")))
        weights = multiplied & shapes.keys()
        in_panels = panels and all(fits(shapes[name], dtype) for name in weights)
        return SlabLayout.of(shapes.items(), dtype, weights if in_panels else ())

    layouts = {EMBEDDING: layout(EMBEDDING)}
    for index in range(skeleton.config.num_hidden_layers):
        layouts[layer_name(index)] = layout(layer_name(index))
    layouts[HEAD] = layout(NORM) if tied else layout(NORM, HEAD)
    return layouts


class LayerRunner(Protocol):
    """A backend that runs a range of layers in a single call."""

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        layers: range,
        interrupted: Callable[[], bool] | None,
    ) -> torch.Tensor:
        """As `Decoder.run_layers`; `rotation` is cosine and sine, [1, tokens, head_dim] each."""


@dataclass(frozen=True, slots=True)
class _LayerContext:
    """The attention backend, KV cache and metadata for a layer's modules (`paged`)."""

    attention: PagedAttention
    blocks: torch.Tensor
    metadata: AttentionMetadata

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sliding_window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        """As `PagedAttention.forward`."""
        return self.attention.forward(
            query,
            key,
            value,
            self.blocks,
            self.metadata,
            sliding_window=sliding_window,
            scaling=scaling,
        )


class Decoder:
    """The model of a worker; takes `skeleton` and replaces its weights by slab views.

    `sliding_windows`: per layer, number of last positions that a token attends to; None: all.
    `scratch` is None if weights need no cast to `compute_dtype`. `compiled`: use the kernels of
    `cpu_kernels`. `layer_runner`, if any, runs the layers instead of the skeleton's modules.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        slabs: dict[str, LayerSlab],
        kv_ranges: Sequence[KvRange],
        attention: PagedAttention,
        *,
        sliding_windows: Sequence[int | None],
        compute_dtype: torch.dtype,
        scratch: UpcastScratch | None,
        compiled: bool,
        layer_runner: LayerRunner | None = None,
    ) -> None:
        config = skeleton.config
        self._config = config
        self._sliding_windows = sliding_windows
        self._slabs = slabs
        self._kv_ranges = kv_ranges
        self._attention = attention
        self._compute_dtype = compute_dtype
        self._scratch = scratch
        self._compiled = compiled
        self._layers = [
            self._place_layer(layer, index) for index, layer in enumerate(skeleton.model.layers)
        ]
        # On a CPU, the layer runner wraps the fused layers built above.
        self.layer_runner = (
            cpu_layers(self._layers, kv_ranges, sliding_windows, config)
            if compiled
            else layer_runner
        )
        self._norm = self._place(skeleton.model.norm, NORM, HEAD)
        self._embedding = slabs[EMBEDDING].views()[f"{EMBEDDING}.weight"]
        # A tied head multiplies by the embedding's weight, so it needs the embedding's slab.
        head = slabs[EMBEDDING if config.tie_word_embeddings else HEAD]
        self._head_slab = head
        head_weight = head.views()[f"{EMBEDDING if config.tie_word_embeddings else HEAD}.weight"]
        self._head = SlabLinear(head_weight, None, scratch, compiled=compiled)
        self._rotary = rotary_of(config, self._embedding.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed [tokens] → [tokens, hidden] in the compute dtype."""
        self._slabs[EMBEDDING].check_resident()
        # A tied embedding may be packed for the head's product.
        if in_panels(self._embedding):
            return rows_of(self._embedding, token_ids).to(self._compute_dtype)
        return functional.embedding(token_ids, self._embedding).to(self._compute_dtype)

    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        layers: range,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Run `layers` in order over `hidden` [tokens, hidden] in the compute dtype.

        `interrupted` is called before each layer, or less often if it is a `WatchedInterrupt`.
        Raises Interrupted if it returns True. Raises LayerNotResident.
        """
        batched, position_ids = hidden[None], positions[None]
        rotation = self._rotary(batched, position_ids)
        if self.layer_runner is not None:
            # The runner reads raw addresses, so an absent slab would crash the process.
            for index in layers:
                self._slabs[layer_name(index)].check_resident()
            return self.layer_runner.run(hidden, rotation, metadata, layers, interrupted)
        for index in layers:
            if interrupted is not None and interrupted():
                raise Interrupted(batched[0], index)
            self._slabs[layer_name(index)].check_resident()
            batched = self._layers[index](
                batched,
                position_embeddings=rotation,
                paged=_LayerContext(self._attention, self._kv_ranges[index].blocks(), metadata),
            )
        return batched[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and the head: [rows, hidden] → [rows, vocab]."""
        self._slabs[HEAD].check_resident()
        self._head_slab.check_resident()
        return self._head(self._norm(hidden))

    def _place_layer(self, layer: nn.Module, index: int) -> nn.Module:
        name = layer_name(index)
        placed = self._place(layer, name, name)
        if not self._compiled:
            return placed
        return fused_layer(
            placed,
            self._slabs[name].views(),
            name,
            self._config,
            sliding_window=self._sliding_windows[index],
        )

    def _place(self, module: nn.Module, path: str, slab_name: str) -> nn.Module:
        """Replace the parameters of a module tree by slab views; may return a new module."""
        for name, child in list(module.named_children()):
            setattr(module, name, self._place(child, f"{path}.{name}", slab_name))
        return self._over_views(module, path, slab_name)

    def _over_views(self, module: nn.Module, path: str, slab_name: str) -> nn.Module:
        """Return `module` with slab views as parameters, or an equivalent faster module."""
        views = self._slabs[slab_name].views()
        if isinstance(module, nn.Linear):
            return SlabLinear(
                views[f"{path}.weight"],
                views.get(f"{path}.bias"),
                self._scratch,
                compiled=self._compiled,
            )
        if self._compute_dtype == torch.float32 and isinstance(module, EagerRmsNorm):
            return Float32RmsNorm(
                views[f"{path}.weight"], module.variance_epsilon, compiled=self._compiled
            )
        for name, _ in list(module.named_parameters(recurse=False)):
            view = nn.Parameter(views[f"{path}.{name}"], requires_grad=False)
            module.register_parameter(name, view)
        return module
