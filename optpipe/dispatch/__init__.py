"""A list scheduler that follows few rules, and a search among its rules."""
