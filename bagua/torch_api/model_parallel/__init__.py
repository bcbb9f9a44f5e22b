"""The original's place of what splits a model: mixtures of experts."""
