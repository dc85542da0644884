"""The runtime: requests, scheduler, batches, steps, commit, the Engine."""
