"""Where bytes rest in a lower tier: page-locked memory, disk, or both."""
