"""Rank 0's decisions: which requests there are, and what each tick runs."""
