"""Figures, rendered notebooks, the page of a run."""
