"""Clients for the scheduler, the memory manager and the workers."""
