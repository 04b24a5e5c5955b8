"""Recording demonstrations, for `cli/collect_demos.py`."""
