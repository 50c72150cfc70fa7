"""What is scheduled: problems, placements, ops and programs."""
