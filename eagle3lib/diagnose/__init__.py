"""When acceptance is low: the cause, proven by engine and simulator side by side."""
