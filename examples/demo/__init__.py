"""The main job, small: a service, a training beside it that swaps better schedules in, and the measured gain."""
