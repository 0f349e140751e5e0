"""Core ML: graphs from a checkpoint and a plan's shapes, and what runs them."""
