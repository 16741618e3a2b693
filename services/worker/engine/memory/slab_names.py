"""How the parts of a model are called, and which of them a stage of a pipeline needs."""

EMBEDDING = "model.embed_tokens"
NORM = "model.norm"
HEAD = "lm_head"


def layer_name(index: int) -> str:
    """Name of a layer's slab, and the prefix of its tensors in a checkpoint."""
    return f"model.layers.{index}"


def stage_slabs(
    first_layer: int, end_layer: int, *, num_layers: int, tied_embeddings: bool
) -> list[str]:
    """Slabs that run layers `first_layer .. end_layer - 1`, in the order of execution.

    The first stage embeds; the last applies the final norm and the head, and a tied head is the
    embedding.
    """
    last = end_layer == num_layers
    names = [EMBEDDING] if first_layer == 0 or (last and tied_embeddings) else []
    names += [layer_name(index) for index in range(first_layer, end_layer)]
    return [*names, HEAD] if last else names
