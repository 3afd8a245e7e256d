"""Real problems to train on, generated on the user's own machine. Import a module by name."""
