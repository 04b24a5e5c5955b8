"""Put first on PYTHONPATH: an interpreter in which robosuite is not installed."""

import importlib.machinery

_find_spec = importlib.machinery.PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] == "robosuite" else _find_spec(name, path, target)


importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
