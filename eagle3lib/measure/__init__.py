"""Measuring: arms that alternate, one accounting identity, speed-ups with their interval."""
