"""Operators over several hosts: operators inside each host, and chunks on their way between hosts meanwhile.

| file | what it has |
|---|---|
| call.py | what a family's schedule of chunks is given |
| operator.py | the operator, which looks like those of one host |
| prediction.py | the predicted time of a schedule, by those of its operators inside a host |
| choosing.py | how many chunks a call takes, or the library over all ranks |
"""
