"""The prefix cache: where a prompt begins, and what a request leaves for others.

manager.py            what is found at an admission and what is registered at a commit
snapshot_policy.py    at which page ends a request leaves window rows
snapshot_capture.py   the window rows of a prefill chunk, taken as they pass
"""
