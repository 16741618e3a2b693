"""The scenarios. One joins by adding a module here with a `SCENARIO`, or a `TRIAL`."""
