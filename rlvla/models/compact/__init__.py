"""Small policies that learn from scratch in minutes: convolutions conditioned on the instruction."""
