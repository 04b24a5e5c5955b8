"""Helpers without an opinion on policies or simulators; nothing here is imported eagerly."""
