"""Conformance: the laws of each slot, run on an object from a cell in under five seconds.

    di.check(Mine())        ->  Report: a table of laws; truthy iff all hold

law.py        what a law is, and the tools its statement is written with
origin.py     the line of the object's code that raised
report.py     what a check found               check.py     which laws run on what
sampler.py verifier.py grammar.py replay.py attention.py experts.py    the laws of each slot
prompt_run.py    a small model that runs a prompt by a plan, for the replay laws
walk.py       a small layer stack's worth of keys, for the attention laws     small.py    its model
"""

from deepinfer.conformance.check import check
from deepinfer.conformance.report import ConformanceError, Report, Result

__all__ = ["ConformanceError", "Report", "Result", "check"]
