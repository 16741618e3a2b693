"""Identifiers that several services derive from each other."""


def group_id_of(worker_id: str) -> str:
    """Id of the group that a worker forms alone."""
    return f"group-{worker_id}"
