"""Requests to servers that are not trusted to be quick, brief or correct: JSON over HTTP within limits."""
