"""GEMMs fused with collectives: one folder a family, one file a variant, and what they share in ``common``."""
