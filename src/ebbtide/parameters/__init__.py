"""Parameters that rest in host memory, and the device parameters that replace them."""
