"""What is measured: GEMMs of layers, models, collectives, norms and links, one folder each."""
