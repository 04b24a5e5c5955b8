"""Where a run stands: what it trains, how long it will take, whether it still gains, and its learning curve."""
