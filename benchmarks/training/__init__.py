"""Trainings measured on ranks of this machine."""
