"""Recordings of trainings as other programs write them, with faults to be found."""
