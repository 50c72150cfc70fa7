"""What stands in for a process or a device: it does what a test says, also wrongly."""
