"""From token ids to text: tokenizer, detokenizer, stop strings."""
