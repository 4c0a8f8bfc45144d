"""A server's processes: the supervisor in the parent, and the ranks that it starts."""
