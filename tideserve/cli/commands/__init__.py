"""The commands of `tideserve`: their options, examples and help."""
