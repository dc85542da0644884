"""What a checkpoint is measured on, its card and pictures; `python -m experiments.nano.report`."""
