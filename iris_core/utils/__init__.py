"""Small helpers that know nothing of ranks."""
