"""Incremental parsers of tool calls and reasoning in a model's output, independent of any API."""
