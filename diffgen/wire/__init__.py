"""The protocol between clients and rank 0: msgspec messages, tensors as raw frames beside them, no pickle."""
