"""GEMMs fused with collectives: one folder per family, one file per variant, and what they share in ``common``."""
