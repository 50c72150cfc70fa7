"""Large-neighbourhood search: windows of a schedule, solved exactly."""
