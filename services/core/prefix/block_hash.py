"""Chained hashes of KV blocks, by which workers and scheduler find common prefixes of prompts.

The hash of a block covers its tokens and the hash of its predecessor, so it identifies the whole
prefix up to its end. The predecessor of the first block is the *root* hash, which covers model and
data type of the KV, and a *salt*: only prompts with the same salt share cached prefixes. *Thin*
hashes are a sample for the scheduler: those of every n-th block of a prompt, shortened to 64 bits.
An *owner* is the holder of an API key.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Row
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

HASH_BYTES = 16
"""128 bits: constructing a collision takes about 2**64 hashes."""
THIN_STRIDE = 8
"""Least interval of thin hashes in blocks; it doubles for long prompts."""
THIN_MAX = 64
"""Maximum number of thin hashes per prompt."""
_THIN_BYTES = 8


class ThinHashes(NamedTuple):
    """Entry i of `hashes` is the thin hash (64 bits) of block `(i + 1) * stride - 1`."""

    stride: int
    hashes: tuple[int, ...]


def root_hash(model: str, kv_dtype: str, salt: str) -> bytes:
    """Hash that precedes the first block of a prompt."""
    return _hash_of_texts(model, kv_dtype, salt)


def tenant_salt(owner: str, cache_salt: str, adapter_digest: str = "") -> str:
    """Salt that isolates the cached prefixes of owners; the `owner` "" stands for no API key.

    `cache_salt` comes from the client and subdivides the owner's prompts. A client cannot choose a
    `cache_salt` that produces the salt of another owner. Prompts with different adapters share no
    prefixes, nor do those with an adapter and those without ("").
    """
    if adapter_digest:
        # With a third text, it differs from every salt without an adapter.
        return _hash_of_texts(owner, cache_salt, adapter_digest).hex()
    if not owner and not cache_salt:
        return ""
    return _hash_of_texts(owner, cache_salt).hex()


def block_hashes(parent: bytes, token_ids: Row[int], block_size: int) -> Iterator[bytes]:
    """Hash of each full block of `token_ids`, which follow the block with hash `parent`."""
    packed = _packing(block_size)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = packed.pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
        yield parent


def sample_thin_hashes(hashes: Row[bytes]) -> ThinHashes:
    """Thin hashes of a prompt, given the hashes of all its full blocks.

    The stride doubles until at most `THIN_MAX` hashes remain. Strides are powers of two times
    `THIN_STRIDE`, so prompts of different lengths with a common prefix still share thin hashes.
    """
    stride = THIN_STRIDE
    while len(hashes) // stride > THIN_MAX:
        stride *= 2
    picked = hashes[stride - 1 :: stride]
    return ThinHashes(stride, tuple([thin_hash(block_hash) for block_hash in picked]))


def thin_hash(block_hash: bytes) -> int:
    """The first 64 bits of a block's hash, as an integer."""
    return int.from_bytes(block_hash[:_THIN_BYTES], "little")


def _hash_of_texts(*texts: str) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES)
    for text in texts:
        # The length prefix keeps ("ab", "c") and ("a", "bc") apart.
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


@cache
def _packing(block_size: int) -> Struct:
    return Struct(f"<{block_size}i")


def prompt_root(cache_salt: str) -> bytes:
    """Root hash within a worker, which stores KV of a single model and data type only."""
    return root_hash("", "", cache_salt)


def prompt_prefix(prompt_ids: Row[int], cache_salt: str, block_size: int) -> ThinHashes:
    """Thin hashes of a prompt; `block_size` must be that of the workers' caches."""
    hashes = tuple(block_hashes(prompt_root(cache_salt), prompt_ids, block_size))
    return sample_thin_hashes(hashes)
