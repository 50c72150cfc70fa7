"""Schedules in the forms that other programs read and write. None of those programs is imported here."""
