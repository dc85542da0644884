"""What a notebook cell or a terminal shows. The only place that makes HTML and drawings."""
