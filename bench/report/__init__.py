"""All tables and pictures of the documentation, and the report, from the CSVs in results/: ``iris-bench report``."""
