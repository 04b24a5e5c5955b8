"""Shared by the MuJoCo suites: GL, rendering, simplified meshes."""
