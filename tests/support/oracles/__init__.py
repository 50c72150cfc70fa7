"""Independent judges of the code: other simulators, enumeration of all schedules, plain references."""
