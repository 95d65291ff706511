"""Where the symmetric heap's memory comes from and how ranks share it: one module a kind of memory."""
