"""The systems that can be measured, and how their names are read."""
