"""Prompts in, answers out: token-exact and resumable."""
