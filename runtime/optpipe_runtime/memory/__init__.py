"""What a stage keeps of a micro-batch, and how it leaves the device and comes back."""
