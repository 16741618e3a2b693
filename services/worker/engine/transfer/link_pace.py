"""Paces the transfers of a paced engine to the link of the modelled device.

KV and parameters of the small model that runs here stand for those of the modelled device, which
are larger: their bytes are scaled, and a piece is sent once the link would have sent those before.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LinkPace:
    """A link of `bytes_per_s`; the factors are sizes of the modelled device over those here."""

    bytes_per_s: float
    kv_scale: float
    parameter_scale: float
    free_s: float = 0.0  # when the link has sent all pieces so far

    def note_sent(self, is_kv: bool, size_bytes: int, now_s: float) -> None:
        """Occupy the link with a piece of KV, or of parameters, that is sent now."""
        scale = self.kv_scale if is_kv else self.parameter_scale
        self.free_s = max(self.free_s, now_s) + size_bytes * scale / self.bytes_per_s
