"""Limits on the batches of an owner that have not ended."""

from sqlalchemy import Connection, func, select

from services.core.quota.limits import Limit
from services.gateway.batches.schema import OPEN, batches
from services.gateway.vocabulary.errors import OverQuota


def check_tokens(
    connection: Connection, owner: str, tokens: int, tokens_max: int, but: str = ""
) -> None:
    """Raise OverQuota if `tokens` and the owner's open batches, all `but` one, exceed the limit."""
    others = select(func.coalesce(func.sum(batches.c.tokens), 0)).where(
        batches.c.owner == owner, batches.c.state.in_(OPEN), batches.c.id != but
    )
    queued = int(connection.scalar(others) or 0)
    if queued + tokens > tokens_max:
        raise OverQuota(
            f"the batches of this key's owner have {queued} tokens, and this one has about"
            f" {tokens}, but {tokens_max} may be queued; wait for a batch to end, or send a"
            " smaller one",
            owner=owner,
            limit=Limit.TOKENS,
        )


def check_count(connection: Connection, owner: str, open_max: int) -> None:
    """Raise OverQuota if the owner has `open_max` batches that have not ended."""
    opened = select(func.count()).where(batches.c.owner == owner, batches.c.state.in_(OPEN))
    if int(connection.scalar(opened) or 0) >= open_max:
        raise OverQuota(
            f"{open_max} batches of this key's owner have not ended, the maximum; wait for a batch"
            " to end, or send larger ones",
            owner=owner,
        )
