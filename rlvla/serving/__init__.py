"""Remote policies: a server for robots and evaluation harnesses, and a client for evaluations."""
