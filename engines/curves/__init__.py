"""What the engine's own work takes on the hardware at hand, over a grid of shapes: what prices are fitted on."""
