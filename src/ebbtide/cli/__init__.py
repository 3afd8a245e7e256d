"""The command line. Commands import heavy modules only when they run, so that `--help` is fast."""
