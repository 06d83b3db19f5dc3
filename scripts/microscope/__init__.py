"""Answers which step trains on which document, and the reverse, from the closed formulas of the data's order."""
