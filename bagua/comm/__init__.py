"""Process groups and collectives: the only package that calls `torch.distributed` collectives."""
