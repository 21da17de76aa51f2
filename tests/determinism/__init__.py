"""Fixed programs, and the digests that each must end in, wherever and however it is run."""
