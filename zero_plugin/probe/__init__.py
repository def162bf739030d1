"""Facts read off live objects: the loop, the model, the machine."""
