"""Plan before you pay: what a target costs and what fits."""
