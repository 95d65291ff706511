"""Collectives beside matrix products in compiled graphs: how they are found, and the pass that fuses them."""
