"""How `auto` chooses.

| file | what |
|---|---|
| `auto.py` | the variant `auto` |
| `measured.py`, `measured_times` | times that were measured, and those that are shipped |
| `choices.py` | what is known of a machine, and what it comes to for each number of rows |
| `corrections.py` | predicted times, corrected by measured ones near them, and how far off they may be |
| `tuning_cache.py` | times measured on this machine |
"""
