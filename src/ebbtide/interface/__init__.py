"""What users see of every part: checks of their arguments, and texts for consoles and notebooks."""
