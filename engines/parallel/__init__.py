"""One model in several processes ("ranks"), over torch.distributed: each holds its part of the experts."""
