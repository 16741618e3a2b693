"""Ids that several services must derive in the same way."""

NAME_LENGTH_MAX = 256
"""Maximum number of characters of a request id and of a model's name."""


def group_id_of(worker_id: str) -> str:
    """Id of the group that consists of this worker only."""
    return f"group-{worker_id}"
