"""The served model as the gateway sees it: names, chat template, formats, sampling defaults."""
