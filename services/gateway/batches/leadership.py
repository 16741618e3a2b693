"""The fence of the batch store: only the latest leader's writes take effect.

The token is the database's own counter. The token of the election cannot be it: it begins again
if etcd loses its data, while the database keeps its lines.
"""

from sqlalchemy import Connection, or_, select, update

from services.core.batches.vocabulary import BatchState, LineState
from services.gateway.batches.errors import Fenced
from services.gateway.batches.schema import batches, database_now, leadership, lines

SILENT_S = 10.0
"""A leader that has not written for this time may be replaced by any election's winner."""


def lead(connection: Connection, election: int) -> int:
    """Become the leader with the token of an election, and return the token of the store.

    Lines that the former leader ran are pending again, with their tokens so far.

    Raises:
        Fenced: if the winner of a later election leads.
    """
    later = leadership.c.election > election
    silent = leadership.c.seen_s < database_now() - SILENT_S
    token = connection.scalar(
        update(leadership)
        .where(or_(~later, silent))
        .values(token=leadership.c.token + 1, election=election, seen_s=database_now())
        .returning(leadership.c.token)
    )
    if token is None:
        raise _fenced()
    _take_over(connection, token)
    return int(token)


def _take_over(connection: Connection, token: int) -> None:
    """Make the lines pending that former leaders ran."""
    open_batches = select(batches.c.id).where(
        batches.c.state.in_([BatchState.IN_PROGRESS, BatchState.CANCELLING])
    )
    abandoned = update(lines).where(
        lines.c.batch.in_(open_batches),
        lines.c.state == LineState.RUNNING,
        lines.c.token < token,
    )
    connection.execute(abandoned.values(state=LineState.PENDING, not_before_s=0.0))


def check_token(connection: Connection, token: int) -> None:
    """Raise Fenced unless `token` is the leader's; holds off the next leader until the end.

    A transaction of a leader begins with it: else its writes could follow those of `lead`.
    """
    statement = select(leadership.c.token).with_for_update(read=True)
    if connection.scalar(statement) != token:
        raise _fenced()


def renew(connection: Connection, token: int) -> None:
    """Note that the leader is alive. Raises Fenced unless `token` is the leader's."""
    statement = update(leadership).where(leadership.c.token == token)
    if connection.execute(statement.values(seen_s=database_now())).rowcount != 1:
        raise _fenced()


def _fenced() -> Fenced:
    return Fenced("another gateway leads the batches; stop their lines")
