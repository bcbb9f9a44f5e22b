"""Speed of the codecs as ratios to memcpy."""
