"""Demonstrations and recorded episodes: reading, writing, and training rows."""
