"""The prefix cache: where a prompt begins, and what a request leaves for others.

manager.py            what is found at an admission and what is registered at a commit
admission.py          the answer: the pages, rows and window rows that a request begins with
snapshot_policy.py    at which page ends a request leaves window rows
snapshot_capture.py   the window rows of a prefill chunk, copied while it runs
report.py             the prefix cache in numbers
"""
