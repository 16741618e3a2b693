"""Tokenizer, incremental detokenizer, and buffers for streamed text."""
