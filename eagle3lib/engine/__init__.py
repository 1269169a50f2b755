"""Launching inference engines and talking to them over HTTP."""
