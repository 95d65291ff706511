"""The constants of a machine, measured in seconds.

| file | what |
|---|---|
| `calibrate.py` | measures what can be measured, step by step, and says what a step could not |
| `steps.py` | the steps: what runs, and which constants of the cost model follow |
| `first_use.py` | by itself, where nothing is known of a machine |
| `kept.py` | the file in which they are kept |
| `timing.py` | how long calls take |
| `links.py` | kernels that do nothing but use a link |
"""
