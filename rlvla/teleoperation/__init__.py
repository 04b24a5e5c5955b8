"""Teleoperation in a browser: controls, the episode that a person plays, and the page with its server."""
