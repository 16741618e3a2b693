"""Structured output: turns request fields into grammars and checks these in a process."""
