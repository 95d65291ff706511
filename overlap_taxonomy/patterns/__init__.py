"""The predicted time of a call, a function a pattern and family; ../model.py has them by name."""
