"""Fault-tolerant training: the survivors of a lost rank go on in the same processes."""
