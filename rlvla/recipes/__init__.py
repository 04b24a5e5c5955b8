"""Recipes: from demonstrations to a trained and evaluated policy, as stages in a YAML file."""
