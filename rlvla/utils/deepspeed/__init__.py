"""DeepSpeed: the strategy, engines, flags."""
