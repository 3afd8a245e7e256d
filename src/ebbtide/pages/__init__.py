"""Pages that show what a training step did, and the files that they are made from."""
