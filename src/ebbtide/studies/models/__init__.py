"""The models that `ebbtide plan` knows, and those that users name."""
