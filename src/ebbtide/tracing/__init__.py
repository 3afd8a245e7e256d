"""What happened in a step, and when. Reads traces and knows nothing else."""
