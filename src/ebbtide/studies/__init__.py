"""Studies of a training step on paper: what fits, and how fast it is; for `ebbtide plan`."""
