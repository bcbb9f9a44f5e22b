"""The reducer: buckets, and the backward passes that fill them."""
