"""The demo: a Fourier neural operator trained on Darcy flow, with and without offload."""
