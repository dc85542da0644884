"""A thread that steps the engine while cells add and read requests.

background.py   Background: the thread and its end      handle.py    one request, to read or await
fair_lock.py    one thread at a time, in the order in which they asked
"""
