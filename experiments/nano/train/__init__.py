"""The stages of training; `python -m experiments.nano.train STAGE`."""
