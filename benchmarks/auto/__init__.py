"""What `algorithm="auto"` chooses, beside every setting of its class."""
