"""Flow-matching policies: sampling settings, distributions and the action head, for any network with a velocity."""
