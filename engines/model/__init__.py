"""What computes a model: families, weights, the transformer and its parts, where they are computed."""
