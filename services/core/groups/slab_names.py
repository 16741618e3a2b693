"""The names of the parameter slabs of a model, and which of them a stage needs."""

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

    The first stage embeds; the last stage applies the final norm and the head. A tied head uses the
    embedding.
    """
    last = end_layer == num_layers
    names = [EMBEDDING] if first_layer == 0 or (last and tied_embeddings) else []
    names += [layer_name(index) for index in range(first_layer, end_layer)]
    return [*names, HEAD] if last else names
