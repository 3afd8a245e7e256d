"""Profiles of training steps, made without running them: see `fake_profile`."""
