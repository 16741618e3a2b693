"""Scripted tours of clients that nobody here wrote; scripts/client_tours.py runs them.

Each module is one client's tour and runs in that client's own environment: it may import the
client, the standard library and its neighbours here, and nothing else of this repository.
"""
