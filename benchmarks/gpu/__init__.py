"""What a machine with one GPU shows of this library: `make gpu`, `python -m benchmarks.gpu`."""
