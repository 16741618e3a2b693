"""An independent count of prefix cache hits, beside which those of a system are judged.

It shares no code with the cache of the engine: a block is named by its place in a tree of all
sequences seen, and the one that was used longest ago makes room for a new one. Nothing runs at the
same time, so a request that begins while another one like it still runs counts as a hit here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]
_Name = tuple[int, tuple[int, ...]]
"""The number of the block before, and the block's own tokens."""


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
        """A request runs from beginning to end; returns how many tokens of its prompt are hits.

        The last token of a prompt is never one: the first output comes from it. The last output is
        not in the cache, since nothing has been computed from it.
        """
        usable = (len(prompt) - 1) // self.block_size
        hit = 0
        for number in self._walk(prompt[: usable * self.block_size]):
            if number not in self._kept:
                break
            hit += self.block_size
        self.queries += len(prompt)
        self.hits += hit
        whole = (*prompt, *output)
        self._keep(list(self._walk(whole[:-1] if output else whole)))
        return hit

    def _walk(self, tokens: Tokens) -> Iterator[int]:
        """The numbers of the full blocks of a sequence; new ones get the next number."""
        size, before = self.block_size, -1
        for start in range(0, len(tokens) - size + 1, size):
            name = (before, tuple(tokens[start : start + size]))
            before = self._numbers.setdefault(name, len(self._numbers))
            yield before

    def _keep(self, numbers: Iterable[int]) -> None:
        """These were used now; of a sequence the last block is the first to go."""
        for number in reversed(list(numbers)):
            self._kept.pop(number, None)
            self._kept[number] = None
        while len(self._kept) > self.blocks:
            self._kept.popitem(last=False)
