"""The command line and what only it needs. Nothing below imports it."""
