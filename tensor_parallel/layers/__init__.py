"""Linear layers of which each rank has a part, as modules; several of one x; their weights and memory."""
