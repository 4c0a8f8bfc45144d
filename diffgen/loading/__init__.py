"""From a model's name to its components on a device."""
