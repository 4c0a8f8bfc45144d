"""Pixels, pictures, clips and the files they are written to."""
