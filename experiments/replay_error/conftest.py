"""The figures run under the settings of the tutorials: stable displays, honest failures."""

import importlib.util
from pathlib import Path

_path = Path(__file__).resolve().parents[2] / "tutorials" / "conftest.py"
_spec = importlib.util.spec_from_file_location("tutorials_conftest", _path)
_tutorials = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tutorials)

pytest_collectstart = _tutorials.pytest_collectstart
pytest_collection_modifyitems = _tutorials.pytest_collection_modifyitems
pytest_runtest_makereport = _tutorials.pytest_runtest_makereport
