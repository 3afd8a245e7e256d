"""Parameters, gradients and optimizer state that rest on the host between uses."""
