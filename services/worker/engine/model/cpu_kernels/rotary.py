"""Rotary positions, and the norms of heads before them."""

from services.worker.engine.model.cpu_kernels.compiler import compiled
from services.worker.engine.model.cpu_kernels.rms_norm import normalize

_ROWS = "float32[:, ::1]"


@compiled(f"void({_ROWS}, STORED[::1], float32, {_ROWS}, {_ROWS})")
def turn(rows, norm, epsilon, cosine, sine):  # type: ignore[no-untyped-def]
    """Rotate `rows` [rows, head × head_dim] by their positions; apply `norm` before, if any.

    `cosine` and `sine` [rows, head_dim]; the halves of a head are the parts of complex numbers.
    """
    size = cosine.shape[1]
    half = size // 2
    for m in range(len(rows)):
        heads = rows[m].reshape((-1, size))
        if len(norm):
            normalize(heads, norm, epsilon, heads)
        for head in heads:
            for k in range(half):
                first, second = head[k], head[half + k]
                head[k] = first * cosine[m, k] - second * sine[m, k]
                head[half + k] = second * cosine[m, half + k] + first * sine[m, half + k]
