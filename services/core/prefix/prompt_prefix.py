"""What the scheduler is told of a prompt, from which it can tell which group has cached it."""

from collections.abc import Sequence as Row

from services.core.prefix.block_hash import ThinHashes, block_hashes, root_hash, thin


def prompt_root(cache_salt: str) -> bytes:
    """What the first block of a prompt follows: all KV of a worker is of one model and one type."""
    return root_hash("", "", cache_salt)


def prompt_prefix(prompt_ids: Row[int], cache_salt: str, block_size: int) -> ThinHashes:
    """The thin hashes of a prompt; blocks have `block_size` tokens, as in the workers' caches."""
    hashes = tuple(block_hashes(prompt_root(cache_salt), prompt_ids, block_size))
    return thin(hashes)
