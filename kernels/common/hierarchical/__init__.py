"""Operators over several hosts: operators inside each host, and chunks on their way between hosts meanwhile.

| file | what it has |
|---|---|
| call.py | what a family's schedule of chunks is given |
| operator.py | the operator, which looks like those of one host |
| building.py | which kind of operator a context gets |
| prediction.py | the time of a schedule, from those of its operators inside a host, and the number of chunks |
"""
