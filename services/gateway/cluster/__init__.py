"""Clients of the scheduler, the memory manager and the workers."""
