"""A run of a scenario: rounds, result as JSON, report as tables."""
