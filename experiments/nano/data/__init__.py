"""The corpus and the texts that the package ships; `python -m experiments.nano.data`."""
