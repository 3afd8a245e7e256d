"""The engine: records of what was saved, and the session that moves them."""
