"""Trains within a byte budget: profiles the step, plans it, measures it and corrects the plan."""
