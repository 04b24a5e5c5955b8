"""Progress of a run: time left, signal, plateaus, learning curve."""
