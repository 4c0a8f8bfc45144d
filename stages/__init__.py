"""The steps that model families share. Each knows its family by a small protocol, and no family by name."""
