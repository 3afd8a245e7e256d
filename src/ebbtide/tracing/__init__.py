"""The trace of a step, and ways to show it. This package depends on nothing but traces."""
