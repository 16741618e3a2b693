"""One run of a scenario: its rounds, its result as JSON, its report as tables."""
