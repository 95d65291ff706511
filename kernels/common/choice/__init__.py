"""How `auto` chooses.

| file | what |
|---|---|
| `auto.py` | the variant `auto` |
| `measured.py`, `measured_times` | times that were measured, and those that are shipped |
| `neighbours.py` | times of problems like those that were measured |
| `tuning_cache.py` | times measured on this machine |
"""
