"""The commands of `tideserve`: options, examples and help."""
