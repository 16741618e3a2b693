"""Names of a model's parameter slabs, and the slabs that a stage needs.

A *slab* is the parameters of a layer, the embedding or the head, which are stored and moved as a
unit. A *stage* is a member of a group with its contiguous layers.
"""

EMBEDDING = "model.embed_tokens"
NORM = "model.norm"  # a prefix in the checkpoint; its tensors are in the slab `HEAD`
HEAD = "lm_head"  # slab of the final norm and the LM head


def layer_name(index: int) -> str:
    """Name of a layer's slab; also the prefix of its tensors in a checkpoint."""
    return f"model.layers.{index}"


def stage_slabs(
    first_layer: int, end_layer: int, *, num_layers: int, tied_embeddings: bool
) -> list[str]:
    """Slabs that a stage of layers `first_layer` to `end_layer` - 1 needs, in execution order.

    The first stage needs the embedding; the last stage needs the final norm and the LM head, and
    also the embedding if the head is tied to it.
    """
    last = end_layer == num_layers
    names = [EMBEDDING] if first_layer == 0 or (last and tied_embeddings) else []
    names += [layer_name(index) for index in range(first_layer, end_layer)]
    return [*names, HEAD] if last else names
