"""Ranks: how they find each other and what they say to each other."""
