"""What a variant is made of.

| file | what |
|---|---|
| `implementation.py` | its functions |
| `entry.py` | its entry in the registry |
| `library.py` | baselines |
| `prediction.py` | parts of predicted times that families share |
"""
