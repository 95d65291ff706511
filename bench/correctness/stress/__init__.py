"""Many calls of every operator in a random order, every element checked: ``iris-bench stress``."""
