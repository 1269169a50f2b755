"""eagle3lib: the library behind the EAGLE-3 lab's notebooks. Importing it imports no torch."""

__version__ = "0.1.0"
