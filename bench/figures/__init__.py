"""All tables and pictures of the documentation, from the CSVs in results/: ``iris-bench figures``."""
