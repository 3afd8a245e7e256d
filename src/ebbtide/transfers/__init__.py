"""What moves between the device and the tiers below: records, queues, bounds, figures."""
