"""Ids that several services must derive in the same way."""


def group_id_of(worker_id: str) -> str:
    """Id of the group that consists of this worker only."""
    return f"group-{worker_id}"
