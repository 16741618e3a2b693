"""Loads and figures of the scenario `overload`."""
