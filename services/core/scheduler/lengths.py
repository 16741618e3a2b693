"""Expected output lengths of requests, learnt from those that have ended.

A request has keys, from the most specific to the most general; each key has the mean and the
variance of log(1 + output tokens), decayed. The estimate of a key is shrunk towards that of the
next key by `PRIOR` samples, so that few samples change it little. Lengths count as log-normal:
they are positive and have a long tail.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.ask import Ask

KEYS_MAX = 10_000
"""Maximum number of keys per level; the key whose last sample is oldest is forgotten first."""
PRIOR = 8.0
"""Samples of a key that weigh as much as the estimate of the next key."""
SAMPLES = 256.0
"""Effective number of samples: the decay per sample is 1 - 1 / SAMPLES."""
HINTED = 50.0
"""Samples of the most general key from which on a client's hint is bounded by the estimate."""
HINT_FACTOR = 4.0
"""A client's hint counts as at most this multiple of the estimate, and at least its inverse."""


class OutputLength(NamedTuple):
    """Expected output tokens of a request."""

    mean: float


Keys = tuple[Hashable | None, ...]
"""Keys of a request, the most specific first; None: the request has no key of this level."""


def keys_of(ask: Ask) -> Keys:
    """Keys of a request: prompt prefix, owner with sizes, owner, class, and all requests.

    The first prefix hash identifies a template, such as a system prompt. Sizes are the magnitudes
    of the prompt and of the token limit.
    """
    owner, service_class = ask.service.tenant, ask.service.service_class
    prefix = (owner, ask.prefix.hashes[0]) if ask.prefix.hashes else None
    sizes = ask.prompt_tokens.bit_length(), ask.max_tokens.bit_length()
    return prefix, (owner, service_class, *sizes), (owner, service_class), service_class, ""


@dataclass(slots=True)
class _Samples:
    """Decayed number, sum and sum of squares of log lengths."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, log_length: float) -> None:
        keep = 1 - 1 / SAMPLES
        self.count = self.count * keep + 1
        self.total = self.total * keep + log_length
        self.squares = self.squares * keep + log_length**2


class _Estimate(NamedTuple):
    """Samples of the most general key, and mean and variance of log(1 + output tokens)."""

    samples: float
    mean: float
    variance: float


@dataclass(slots=True)
class Lengths:
    """Output lengths of the requests of a model."""

    # By level and key; in each level the key with the oldest sample first.
    _levels: list[OrderedDict[Hashable, _Samples]] = field(default_factory=list)

    def add(self, keys: Keys, output_tokens: int, cut_off: bool) -> None:
        """Learn from an ended request.

        `cut_off`: its token limit, its client or an error ended it, so its output would have had
        at least `output_tokens`.
        """
        tokens = float(output_tokens)
        if cut_off and (estimate := self._estimate(keys)) is not None:
            # Else the estimate would fall with the limits of the clients. The median, since
            # samples of the mean would raise the mean.
            tokens = max(tokens, math.exp(estimate.mean) - 1)
        for number, key in enumerate(keys):
            if number == len(self._levels):
                self._levels.append(OrderedDict())
            if key is None:
                continue
            level = self._levels[number]
            if (samples := level.pop(key, None)) is None:
                samples = _Samples()
                if len(level) >= KEYS_MAX:
                    level.popitem(last=False)
            level[key] = samples
            samples.add(math.log1p(tokens))

    def expect(self, keys: Keys, max_tokens: float, hint: int = 0) -> OutputLength | None:
        """The expected output of a request; None without samples of its most general key.

        `hint` is the client's estimate of its output tokens, 0 for none.
        """
        estimate = self._estimate(keys)
        if estimate is None:
            return None
        expected = math.exp(estimate.mean + estimate.variance / 2) - 1
        if hint and estimate.samples >= HINTED:
            expected = min(max(hint, expected / HINT_FACTOR), expected * HINT_FACTOR)
        elif hint:
            expected = float(hint)
        return OutputLength(min(expected, max_tokens))

    def _estimate(self, keys: Keys) -> _Estimate | None:
        samples = mean = square = 0.0
        for level, key in zip(reversed(self._levels), reversed(keys), strict=bool(self._levels)):
            if (known := level.get(key)) is None:
                continue
            prior = PRIOR if samples else 0.0
            weight = known.count + prior
            mean = (known.total + prior * mean) / weight
            square = (known.squares + prior * square) / weight
            samples = samples or known.count
        return _Estimate(samples, mean, max(0.0, square - mean * mean)) if samples else None

    def check_invariants(self) -> None:
        """Raise AssertionError if a bound is exceeded or a sum is impossible."""
        for level in self._levels:
            assert len(level) <= KEYS_MAX
            for samples in level.values():
                assert 1 <= samples.count <= SAMPLES + 1e-6
                assert samples.total >= 0
                # Cauchy-Schwarz.
                assert samples.total**2 <= samples.count * samples.squares * (1 + 1e-9) + 1e-9
