"""Where torch calls us: saved-tensor hooks, and hooks on the layers of a model."""
