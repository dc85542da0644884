from support.overlapped import knowing  # noqa: F401  (a fixture)
