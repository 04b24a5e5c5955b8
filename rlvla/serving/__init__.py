"""Policies behind a socket: a server for robots and evaluation harnesses, and a client for evaluations."""
