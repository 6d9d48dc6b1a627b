"""Groups of ranks: how they are made, what they run, what they have done, who survives them."""
