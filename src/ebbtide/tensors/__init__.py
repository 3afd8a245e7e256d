"""What tensors consist of, how their bytes are packed, and which are marked to stay."""
