"""Hashes of KV blocks: two prompts that begin alike have the same hashes for their first blocks.

The hash of a block covers its tokens and the hash of the block before it, so it stands for the
whole prompt up to there. The first block follows the *root*, which says what else the KV depends
on, and which requests may share it: model, type of the KV, and the salt of the tenant.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Row
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

HASH_BYTES = 16
"""Wide enough that nobody finds two prompts with one hash."""
THIN_STRIDE = 8
"""Blocks between two thin hashes; the stride doubles for long prompts."""
THIN_MAX = 64
"""Most thin hashes of a prompt."""
_THIN_BYTES = 8


class ThinHashes(NamedTuple):
    """Entry i of `hashes` is the thin hash (64 bits) of block `(i + 1) * stride - 1`."""

    stride: int
    hashes: tuple[int, ...]


def root_hash(model: str, kv_dtype: str, salt: str) -> bytes:
    """What the first block of a prompt follows."""
    return _hash_of_texts(model, kv_dtype, salt)


def tenant_salt(owner: str, cache_salt: str) -> str:
    """The salt of an owner's request, so that owners share nothing; "" is an owner without a key.

    `cache_salt` is what the client asked for: it divides the prompts of one owner. Whatever it is,
    it gives no salt of another owner.
    """
    if not owner and not cache_salt:
        return ""
    return _hash_of_texts(owner, cache_salt).hex()


def block_hashes(parent: bytes, token_ids: Row[int], block_size: int) -> Iterator[bytes]:
    """The hash of each full block of `token_ids`, which follow the block with hash `parent`."""
    packed = _packing(block_size)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = packed.pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
        yield parent


def thin(hashes: Row[bytes]) -> ThinHashes:
    """A few short hashes that stand for a prompt, given those of all its full blocks in order.

    Longer prompts have fewer of them in relation: the stride doubles until `THIN_MAX` suffice. The
    blocks of a longer stride are among those of a shorter one, so prompts of unlike length that
    begin alike have some in common.
    """
    stride = THIN_STRIDE
    while len(hashes) // stride > THIN_MAX:
        stride *= 2
    picked = hashes[stride - 1 :: stride]
    return ThinHashes(stride, tuple([thin_hash(one) for one in picked]))


def thin_hash(block_hash: bytes) -> int:
    """The thin hash of a block, 0 to 2**64 - 1."""
    return int.from_bytes(block_hash[:_THIN_BYTES], "little")


def _hash_of_texts(*texts: str) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES)
    for text in texts:
        told = text.encode()
        digest.update(len(told).to_bytes(8, "little") + told)
    return digest.digest()


@cache
def _packing(block_size: int) -> Struct:
    return Struct(f"<{block_size}i")


def prompt_root(cache_salt: str) -> bytes:
    """What the first block of a prompt follows: all KV of a worker is of one model and one type."""
    return root_hash("", "", cache_salt)


def prompt_prefix(prompt_ids: Row[int], cache_salt: str, block_size: int) -> ThinHashes:
    """The thin hashes of a prompt; blocks have `block_size` tokens, as in the workers' caches."""
    hashes = tuple(block_hashes(prompt_root(cache_salt), prompt_ids, block_size))
    return thin(hashes)
