"""The drafter: formats, alignment, vocabulary map, the one reference forward, the simulator."""
