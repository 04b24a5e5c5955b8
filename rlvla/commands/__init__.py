"""From checked flags to a finished run, one file per command."""
