"""Command-line flags, configuration files, and what all commands share."""
