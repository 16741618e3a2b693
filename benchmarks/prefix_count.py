"""An independent reference count of prefix-cache hits.

It shares no code with the engine's cache: a block is identified by its node in a tree of all
sequences seen, and eviction is LRU. Requests do not overlap here, so a request that starts while a
request with the same prefix is still running counts as a hit.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]
_Name = tuple[int, tuple[int, ...]]
"""The number of the parent block, and the block's own tokens."""


@dataclass(slots=True)
class CountedCache:
    """`blocks` blocks of `block_size` tokens; `queries` and `hits` count prompt tokens."""

    blocks: int
    block_size: int = 16
    queries: int = 0
    hits: int = 0
    _numbers: dict[_Name, int] = field(default_factory=dict)
    _kept: OrderedDict[int, None] = field(default_factory=OrderedDict)  # oldest first

    def request(self, prompt: Tokens, output: Tokens = ()) -> int:
        """Run a request from start to end; returns the number of prompt tokens that are hits.

        The last prompt token is never a hit, since the first output is computed from it. The last
        output token is not cached, since it has not been processed.
        """
        usable = (len(prompt) - 1) // self.block_size
        hit = 0
        for number in self._walk(prompt[: usable * self.block_size]):
            # A prefix hit ends at the first missing block.
            if number not in self._kept:
                break
            hit += self.block_size
        self.queries += len(prompt)
        self.hits += hit
        whole = (*prompt, *output)
        self._keep(list(self._walk(whole[:-1] if output else whole)))
        return hit

    def _walk(self, tokens: Tokens) -> Iterator[int]:
        """The numbers of a sequence's full blocks; new blocks get the next number."""
        size, before = self.block_size, -1
        for start in range(0, len(tokens) - size + 1, size):
            name = (before, tuple(tokens[start : start + size]))
            before = self._numbers.setdefault(name, len(self._numbers))
            yield before

    def _keep(self, numbers: Iterable[int]) -> None:
        """Mark blocks as used now; the last block of a sequence is evicted first."""
        for number in reversed(list(numbers)):
            self._kept.pop(number, None)
            self._kept[number] = None
        while len(self._kept) > self.blocks:
            self._kept.popitem(last=False)
