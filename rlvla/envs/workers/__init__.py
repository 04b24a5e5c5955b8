"""Environment workers, and the pools that run and supervise them."""
