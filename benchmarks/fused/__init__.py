"""Step times of fused optimizers beside torch's own implementations."""
