"""What an engine counts and times.

stats.py       the counters, and who fills them in       records.py    one step, one request
tables.py      the counters as tables                    timeline.py   lanes of host and device
device_clock.py    when a device began and ended
"""
