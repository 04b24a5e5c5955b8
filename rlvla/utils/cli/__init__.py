"""Command-line flags, configuration files, and the frame of all commands."""
