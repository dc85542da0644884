"""Tables with provenance: the form of every measurement, without torch.

table.py    Table: rows with a title and their provenance      jsonable.py    values as JSON and back
provenance.py    the facts of this process: version, commit, torch, threads
"""
