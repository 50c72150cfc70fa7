"""What a training sees of the service."""
