"""The served model without its weights: names, chat template, formats, sampling defaults."""
