"""Autotuning inside the engine: one session per distributed module measures steps and adopts settings."""
