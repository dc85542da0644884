"""One step, in the order of the files.

loop.py            the requests of an engine, and the steps that serve them
batch.py           flat tensors of the rows that a scheduler chose
speculation.py     the drafts that requests hold
launch.py          the host's part of a step            decode_inputs.py    its device part
execute.py         forward, sample, accept, draft       grammar_mask.py, non_finite.py
in_flight.py       a step between launch and commit     overlap.py   which steps may be in flight
commit.py          append, check the stops, free
"""
