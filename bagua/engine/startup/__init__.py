"""What `distribute` does once: checks, handshake, first broadcast, measurement of the link."""
