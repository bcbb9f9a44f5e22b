"""`bagua bench`: training steps, collectives and the engine's cost, measured against the wire and against others.

An accelerator is emulated (`compute`), the network by `bagua.lab`; what is exchanged, encoded and waited for is
real.
"""
