"""Real problems to train on, generated on the user's own machine.

Import the module of a problem by name, such as ``ebbtide.problems.darcy``.
"""
