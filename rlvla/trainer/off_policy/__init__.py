"""Off-policy learning: replay, soft actor-critic, demonstrations in the batch."""
