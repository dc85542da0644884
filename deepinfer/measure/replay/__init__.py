"""What bounded replay changes and saves: error meters on the tokens behind a prompt, and costs.

error.py       replay_error, logits_error: the measurements
passes.py      teacher-forced passes that share what plans have in common
texts.py, windows.py, drafts.py, cost.py    ids, window keys, accepted lengths, rows x layers, FLOPs
divergence.py  where free-running text goes another way
joining.py     several reports as one
fit.py, calibration.py     Bounded.fit: the smallest keep within a tolerance; what it found
seconds.py     wall-clock seconds of prefills
report.py      ReplayReport: tables, intervals, pictures
"""
