"""What a layer of which each rank has a part multiplies: its shards, its products, and their gradients."""
