"""What the gateway knows of the model: its names, template, formats and defaults."""
