"""Other projects' ways in: drop-in replacements, callbacks and pipelines."""
