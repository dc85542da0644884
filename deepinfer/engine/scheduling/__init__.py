"""Scheduling: which requests run in the next step, prefill or decode, with how many rows.

scheduler.py       FCFS, DecodeOrder, Mixed; a scheduler of your own subclasses FCFS
queue.py           the requests that wait, in order
resources.py       the pages, state ids and rows that a scheduler hands out
data_parallel.py   ranks that agree on the kind of a step
"""
