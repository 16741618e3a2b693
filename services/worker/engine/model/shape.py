"""The sizes of a loaded model by which layers are divided among workers."""

from collections.abc import Mapping

from services.core.groups.layer_map import ModelShape
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.worker.engine.model.catalog import ModelGeometry


def shape_of(geometry: ModelGeometry, slab_bytes: Mapping[str, int]) -> ModelShape:
    """The shape of a model; `slab_bytes` has the size of each slab by name, in whole chunks.

    A pass reads all parameters of a layer, so its cost is assumed proportional to their bytes. The
    embedding is a look-up and costs nothing. The head multiplies with its own weight or, if tied,
    with the embedding's.
    """
    layer_bytes = max(slab_bytes[layer_name(index)] for index in range(geometry.num_layers))
    read_by_head = slab_bytes[EMBEDDING] if geometry.tied_embeddings else slab_bytes[HEAD]
    return ModelShape(
        num_layers=geometry.num_layers,
        layer_bytes=layer_bytes,
        embedding_bytes=slab_bytes[EMBEDDING],
        head_bytes=slab_bytes[HEAD],
        tied_embeddings=geometry.tied_embeddings,
        kv_bytes=geometry.kv_bytes_per_token_layer,
        layer_cost=float(layer_bytes),
        embedding_cost=0.0,
        head_cost=float(read_by_head),
    )
