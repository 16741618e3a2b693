"""Tool calls and reasoning in a model's text: found while it streams, free of any door."""
