"""Measuring: what is called, on what data, whether it is right, how long it takes."""
