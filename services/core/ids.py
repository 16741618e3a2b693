"""Names that several services derive from one another."""


def group_id_of(worker_id: str) -> str:
    """The group that a worker forms alone."""
    return f"group-{worker_id}"
