"""What else of torch wants a say: its compiler, sharding, and the hooks of other code."""
