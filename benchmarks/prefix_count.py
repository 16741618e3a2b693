"""An independent reference count of prefix-cache hits.

It shares no code with the engine's cache: a block is identified by its node in a tree of all
sequences seen, and eviction is LRU. Requests do not overlap here, so a request that starts while a
request with the same prefix is still running counts as a hit. With a second level, in host memory,
every block that the device evicts is copied there, at no cost.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]
_Name = tuple[int, tuple[int, ...]]
"""The number of the parent block, and the block's own tokens."""


@dataclass(slots=True)
class TwoLevelLru:
    """Block numbers in `blocks` blocks on the device and `host_blocks` in host memory.

    A block evicted from the device becomes the most recent in host memory. A hit in host memory
    stays there, and is the most recent of both levels.
    """

    blocks: int
    host_blocks: int = 0
    _device: OrderedDict[int, None] = field(default_factory=OrderedDict)  # oldest first
    _host: OrderedDict[int, None] = field(default_factory=OrderedDict)  # oldest first

    def hits(self, numbers: Iterable[int]) -> int:
        """The number of leading blocks in either level: a hit ends at the first missing block."""
        count = 0
        for number in numbers:
            if number not in self._device and number not in self._host:
                break
            count += 1
        return count

    def use(self, numbers: Iterable[int]) -> None:
        """Mark a sequence's blocks as used now; its last block is evicted first."""
        for number in reversed(list(numbers)):
            self._device.pop(number, None)
            self._device[number] = None
            if number in self._host:
                self._host.move_to_end(number)
        while len(self._device) > self.blocks:
            evicted, _ = self._device.popitem(last=False)
            self._host[evicted] = None
            self._host.move_to_end(evicted)
        while len(self._host) > self.host_blocks:
            self._host.popitem(last=False)


@dataclass(slots=True)
class CountedCache:
    """`blocks` blocks of `block_size` tokens; `queries` and `hits` count prompt tokens.

    `host_blocks`: the size of the second level, in host memory.
    """

    blocks: int
    block_size: int = 16
    host_blocks: int = 0
    queries: int = 0
    hits: int = 0
    _numbers: dict[_Name, int] = field(default_factory=dict)
    _levels: TwoLevelLru = field(init=False)

    def __post_init__(self) -> None:
        self._levels = TwoLevelLru(self.blocks, self.host_blocks)

    def request(self, prompt: Tokens, output: Tokens = ()) -> int:
        """Run a request from start to end; returns the number of prompt tokens that are hits.

        The last prompt token is never a hit, since the first output is computed from it. The last
        output token is not cached, since it has not been processed.
        """
        usable = (len(prompt) - 1) // self.block_size
        hit = self._levels.hits(self._walk(prompt[: usable * self.block_size])) * self.block_size
        self.queries += len(prompt)
        self.hits += hit
        whole = (*prompt, *output)
        self._levels.use(self._walk(whole[:-1] if output else whole))
        return hit

    def _walk(self, tokens: Tokens) -> Iterator[int]:
        """The numbers of a sequence's full blocks; new blocks get the next number."""
        size, before = self.block_size, -1
        for start in range(0, len(tokens) - size + 1, size):
            name = (before, tuple(tokens[start : start + size]))
            before = self._numbers.setdefault(name, len(self._numbers))
            yield before
