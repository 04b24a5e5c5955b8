"""DeepSpeed: strategy, engines, flags."""
